"""Every way to differentiate a region, and regions in regions."""

import pytest
import torch
from cases import DTYPE, numbers
from programs import body, check_call
from references import assert_same

import functx

pytestmark = pytest.mark.usefixtures("hooks")


class TestDerivatives:
    def test_backward(self):
        x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
        functx.remat(lambda x: body(x) * w)(x).sum().backward()
        grads = x.grad, w.grad
        expected = torch.autograd.grad((body(x) * w).sum(), (x, w))
        assert_same(grads, expected)

    def test_double_backward(self):
        def second(f, x):
            (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            (third,) = torch.autograd.grad(second.sum(), x)
            return first, second, third

        x = numbers(3).requires_grad_()
        assert_same(second(functx.remat(body), x), second(body, x), eps=8)

    def test_retained_graph(self):
        x = numbers(3).requires_grad_()
        value = functx.remat(body)(x).sum()
        first = torch.autograd.grad(value, x, retain_graph=True)
        assert_same(torch.autograd.grad(value, x), first)
        with pytest.raises(RuntimeError, match=r"second time|freed|retain_graph"):
            torch.autograd.grad(value, x)

    def test_vmap_inside_backward_outside(self):
        w = numbers(3).requires_grad_()
        x = numbers(4, 3, start=1.0).requires_grad_()

        def value(f):
            return functx.vmap(lambda x: f(x * w).sum())(x).square().sum()

        inside = [torch.autograd.grad(value(f), (x, w)) for f in (functx.remat(body), body)]
        assert_same(*inside, eps=4)

    def test_is_grads_batched(self):
        x = numbers(3).requires_grad_()
        basis = torch.eye(3, dtype=DTYPE)
        jacobians = [
            torch.autograd.grad(f(x), x, basis, is_grads_batched=True)
            for f in (functx.remat(body), body)
        ]
        assert_same(*jacobians)

    def test_gradcheck(self):
        x = numbers(3).requires_grad_()
        region = functx.remat(lambda x: torch.tanh(x @ numbers(3, 3)) * x)
        assert torch.autograd.gradcheck(region, x, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(region, x)

    def test_forward_mode_without_functorch(self):
        x, tangent = numbers(3), numbers(3, start=1.0)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            out = [
                torch.autograd.forward_ad.unpack_dual(f(dual)) for f in (functx.remat(body), body)
            ]
            assert_same((out[0].primal, out[0].tangent), (out[1].primal, out[1].tangent))

    def test_no_grad(self):
        x = numbers(3).requires_grad_()
        with torch.no_grad():
            assert not functx.remat(body)(x).requires_grad
        with torch.inference_mode():
            assert_same(functx.remat(body)(x), body(x))
        assert functx.remat(body)(x).requires_grad
        assert not functx.remat(body)(x.detach()).requires_grad

    def test_enable_grad_inside_no_grad(self):
        def f(x):
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                return torch.autograd.grad(body(y).sum(), y)[0] * x

        with torch.no_grad():
            assert_same(functx.remat(f)(numbers(3)), f(numbers(3)))
        check_call(f, numbers(3))

    def test_hooks_on_intermediates(self):
        def f(x):
            h = x.sin()
            if h.requires_grad:
                h.register_hook(lambda gradient: gradient * 3)
            return h.exp()

        check_call(f, numbers(3))

    @pytest.mark.parametrize("batched", [False, True])
    def test_a_hook_reads_a_variable_of_plain_autograd(self, batched):
        """The pullback at a level that has ended is no region; who reads what is recorded."""
        w = numbers(3, start=1.0).requires_grad_()

        def gradients(region):
            def f(x):
                h = x.sin()
                h.register_hook(lambda gradient: gradient * w)
                return h.exp().sum()

            x = numbers(2, 3) if batched else numbers(3)
            g = functx.grad(region(f))
            g = (functx.vmap(g) if batched else g)(x)
            assert not functx.grad(region(lambda x: x.sin().exp().sum()))(x).requires_grad
            return g, *torch.autograd.grad(g.square().sum(), w)

        assert_same(gradients(functx.remat), gradients(lambda f: f))

    def test_a_transform_inside_a_region(self):
        check_call(lambda x: functx.grad(lambda x: body(x).sum())(x) * x, numbers(3))
        check_call(lambda x: functx.vmap(functx.grad(torch.sin))(x) * x, numbers(3))

    def test_functionalize(self):
        def f(x):
            y = x.clone()
            y.mul_(2)
            return functx.remat(body)(y)

        x = numbers(3)
        assert_same(functx.functionalize(f)(x), f(x))
        gradients = [
            functx.functionalize(functx.grad(lambda x, r=r: r(x).sum()))(x)
            for r in (functx.remat(body), body)
        ]
        assert_same(*gradients)

    @pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's, always
    def test_linearize(self):
        x = numbers(3)
        (value, push), (expected, expected_push) = (
            functx.linearize(f, x) for f in (functx.remat(body), body)
        )
        assert_same((value, push(x)), (expected, expected_push(x)))


class TestNesting:
    @pytest.mark.parametrize("depth", [1, 2, 3, 5])
    def test_regions_in_regions(self, depth):
        f = plain = body
        for i in range(depth):
            f = functx.remat(lambda x, f=f, i=i: f(x * 0.5) + torch.sin(x) * i)
            plain = lambda x, plain=plain, i=i: plain(x * 0.5) + torch.sin(x) * i  # noqa: E731
        x = numbers(3).requires_grad_()
        assert_same(f(x), plain(x))
        ours, theirs = (torch.autograd.grad(g(x).sum(), x) for g in (f, plain))
        assert_same(ours, theirs, eps=8)
        ours, theirs = (
            functx.vmap(functx.grad(functx.grad(lambda x, g=g: g(x).sum())))(x.detach())
            for g in (f, plain)
        )
        assert_same(ours, theirs, eps=16)

    def test_recursion(self):
        @functx.remat
        def power(x, n):
            return x if n == 1 else x * power(x, n - 1)

        x = torch.tensor(1.5, dtype=DTYPE)
        assert_same(functx.grad(power)(x, 4), 4 * x**3, eps=4)
