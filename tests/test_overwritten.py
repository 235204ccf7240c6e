"""Regions that write in place to what a tape knows: value, history, and every derivative."""

import pytest
import torch
import torch._dynamo  # what torch imports when it is first needed makes cycles of its own
from cases import DTYPE, numbers
from programs import identity
from references import Operations, assert_same, no_garbage_collection
from right import X

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

W = numbers(4, start=1.0)


def same(program, eps=8.0):
    assert_same(program(functx.remat), program(identity), eps)


def doubles(t, x):
    y = t + x
    t.mul_(x.exp())
    return y * t.clone()


def through_a_view(t, x):
    v = t.view(2, 2)
    y = t + 1
    v[0] = x[:2] * 3
    v.t()[1].mul_(2)
    return y * t.clone() + v.flatten()


def twice(t, x):
    t += x
    y = t.clone().sin()
    t *= y
    return y


def part(t, x):
    t[1:3] = x[:2].exp()
    return t * x


def hands_it_back(t, x):
    return t.add_(x), x.sin()


def hands_back_a_view(t, x):
    t.add_(x)
    return t[1:3]


BODIES = [doubles, through_a_view, twice, part, hands_it_back, hands_back_a_view]


def summed(out):
    out = out if isinstance(out, tuple) else (out,)
    return sum((o * o.detach().cos()).sum() + o.sin().sum() for o in out)


@pytest.mark.parametrize("captured", [False, True], ids=["argument", "capture"])
@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
class TestHistory:
    @staticmethod
    def call(remat, body, captured, h, x):
        return remat(lambda x: body(h, x))(x) if captured else remat(body)(h, x)

    def test_backward(self, body, captured):
        def program(remat):
            x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
            h = w * 2
            out = self.call(remat, body, captured, h, x)
            return out, h, torch.autograd.grad(summed(out) + h.sin().sum(), (x, w))

        same(program, eps=16)

    def test_only_what_was_written_is_pulled_back(self, body, captured):
        def program(remat):
            x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
            h = w * 2
            self.call(remat, body, captured, h, x)
            return h, torch.autograd.grad(h.sin().sum(), (x, w), allow_unused=True)

        same(program, eps=16)

    def test_twice_and_second_derivative(self, body, captured):
        def program(remat):
            x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
            h = w * 2
            out = self.call(remat, body, captured, h, x)
            total = summed(out) + h.sin().sum()
            first = torch.autograd.grad(total, (x, w), create_graph=True)
            again = torch.autograd.grad(total, (x, w), retain_graph=True)
            return first, again, torch.autograd.grad(summed(first), (x, w))

        same(program, eps=64)

    @pytest.mark.parametrize("way", ["grad", "vmap(grad)", "grad(vmap)", "hessian", "jvp"])
    def test_under_transforms(self, body, captured, way):
        def program(remat):
            def f(x):
                h = x * 2
                out = self.call(remat, body, captured, h, x)
                return summed(out) + h.sin().sum()

            xs = numbers(3, 4)
            if way == "jvp":
                return functx.jvp(f, (X,), (X.cos(),))
            if way == "hessian":
                return functx.hessian(f)(X), functx.jacrev(functx.grad(f))(X)
            if way == "grad(vmap)":
                return functx.grad(lambda xs: functx.vmap(f)(xs).sum())(xs)
            return functx.vmap(functx.grad(f))(xs) if way == "vmap(grad)" else functx.grad(f)(X)

        same(program, eps=128)

    def test_in_nested_regions(self, body, captured):
        def program(remat):
            x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
            h = w * 2

            def outer(h, x):
                made = x.cos()
                out = self.call(remat, body, captured, h, x)
                more = self.call(remat, body, captured, made, h.clone())
                return summed(out) + summed(more), made

            out = remat(outer)(h, x)
            return out, h, torch.autograd.grad(summed(out) + h.sin().sum(), (x, w))

        same(program, eps=64)

    def test_seen_by_the_inner_region_alone(self, body, captured):
        def program(remat):
            x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
            h = w * 2

            def outer(x):
                return summed(remat(lambda x: body(h, x))(x)) * x

            out = (remat(outer) if captured else outer)(x)
            return out, h, torch.autograd.grad(out.sum() + h.sin().sum(), (x, w))

        same(program, eps=64)

    def test_one_region_after_another(self, body, captured):
        def program(remat):
            x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
            h = w * 2
            outs = [self.call(remat, body, captured, h, x * i) for i in range(3)]
            total = sum(summed(out) for out in outs) + h.sin().sum()
            return outs, h, torch.autograd.grad(total, (x, w))

        if body not in (hands_it_back, hands_back_a_view, part):  # torch saved what is written to
            same(program, eps=256)


class TestNewHistory:
    """A buffer that no tape knew, until a region wrote to it."""

    def test_a_cache_over_steps(self):
        def program(remat):
            w, x = W.diag().requires_grad_(), X.clone().requires_grad_()
            keys = torch.zeros(5, 4, dtype=DTYPE)

            def step(x, keys, at):
                keys[at] = w @ x
                seen = keys.clone()[: at + 1]
                return torch.softmax(seen @ x, 0) @ seen

            region, out = remat(step), x
            for at in range(4):
                out = region(out, keys, at)
            return out, keys, torch.autograd.grad(out.sum() + keys.sin().sum(), (w, x))

        same(program, eps=64)

    def test_a_captured_cache_over_steps(self):
        def program(remat):
            x = X.clone().requires_grad_()
            keys = torch.zeros(3, 4, dtype=DTYPE)

            def step(x, at):
                keys[at] = x.sin()
                return keys.clone().sum(0) * x

            region, out = remat(step), x
            for at in range(3):
                out = region(out, at)
            return out, keys, torch.autograd.grad(out.sum() + keys.exp().sum(), x)

        same(program, eps=64)

    def test_second_derivative(self):
        def program(remat):
            x, keys = X.clone().requires_grad_(), torch.zeros(4, dtype=DTYPE)
            out = remat(lambda x, keys: keys.copy_(x.sin()) * x)(x, keys)
            (first,) = torch.autograd.grad(summed((out, keys)), x, create_graph=True)
            return out, keys, first, torch.autograd.grad(first.sum(), x)

        same(program, eps=64)


class TestNoHistory:
    """Writes that torch does not record: the replay starts from the value before."""

    @pytest.mark.parametrize("leaf", [True, False])
    @pytest.mark.parametrize("way", ["no_grad", "detach", "data"])
    def test_a_tensor_of_a_tape(self, way, leaf):
        def write(t):
            if way == "no_grad":
                with torch.no_grad():
                    t.mul_(0.5)
            elif way == "detach":
                t.detach().mul_(0.5)
            else:
                t.data.mul_(0.5)

        def program(remat):
            w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
            t = w if leaf else w * 2

            def f(x):
                y = t * 2 + x
                write(t)
                return y.sin() + t.sum()

            region = remat(f)
            out = region(x) + region(x)
            first = torch.autograd.grad(out.sum() + t.sum(), (w, x), retain_graph=True)
            return out, t, first, torch.autograd.grad(out.sum() + t.sum(), (w, x))

        same(program, eps=16)

    def test_weights_clipped_in_the_forward(self):
        def program(remat):
            layer = torch.nn.Linear(4, 4, dtype=DTYPE)
            with torch.no_grad():
                layer.weight.copy_(W.diag() * 2)
                layer.bias.zero_()

            def f(x):
                with torch.no_grad():
                    layer.weight.clamp_(-0.5, 0.5)
                return layer(x).sin()

            x = X.clone().requires_grad_()
            out = remat(f)(x)
            return out, layer.weight, torch.autograd.grad(out.sum(), (x, layer.weight))

        same(program)


class TestRefused:
    @pytest.mark.parametrize("remat", [functx.remat, identity])
    @pytest.mark.parametrize("view", [False, True])
    def test_a_leaf(self, remat, view):
        w = W.clone().requires_grad_()
        x = X.clone().requires_grad_()
        with pytest.raises(RuntimeError, match=r"leaf|requires grad"):
            remat(lambda x: (w[1:] if view else w).mul_(2).sum() * x)(x)
        assert_same(w, W)

    def test_memory_by_two_names(self):
        """A replay would write to one copy and read the other."""
        w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
        h = w * 2
        part = h[:2]
        with pytest.raises(functx.RematError, match="several tensors"):
            functx.remat(lambda h, part, x: (part.mul_(2), h.clone() * x)[1])(h, part, x)

    def test_buffers_by_two_names(self):
        buffer, x = W.clone(), X.clone().requires_grad_()
        part = buffer[:2]
        with pytest.raises(functx.RematError, match="several tensors"):
            functx.remat(lambda x: (part.mul_(2), buffer.clone() * x)[1])(x)


class TestMemory:
    @pytest.mark.parametrize("pulled", [True, False])
    @pytest.mark.parametrize("kind", ["argument", "capture", "nested capture", "new history"])
    def test_nothing_is_left_without_the_garbage_collector(self, kind, pulled):
        """What was written to depends on the region, which must not hold it."""
        w = W.clone().requires_grad_()

        def step():
            x = X.clone().requires_grad_()
            h = torch.zeros(4, dtype=DTYPE) if kind == "new history" else w * 2
            if kind in ("argument", "new history"):
                out = functx.remat(doubles)(h, x)
            elif kind == "capture":
                out = functx.remat(lambda x: doubles(h, x))(x)
            else:
                out = functx.remat(lambda x: functx.remat(lambda x: doubles(h, x))(x))(x)
            if pulled:
                torch.autograd.grad(out.sum() + h.sum(), x)

        step()
        with no_garbage_collection(), Operations() as operations:
            step()
            assert operations.live == 0
