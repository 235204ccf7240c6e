"""Rule 4: a tensor that requires grad and leaves otherwise than by return."""

import threading

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import nn

import functx

from .refusals import refused, right_or_refused, same

X = numbers(4)


def appended(remat):
    aux = []

    def region(x):
        h = x.sin()
        aux.append(h)
        return h.exp()

    return lambda x: remat(region)(x).sum() + (aux.pop() * X).sum()


def twice(remat):
    """Of two regions, read in a third."""

    def f(x):
        aux = []

        def region(x):
            h = x.sin()
            aux.append(h)
            return x.exp()

        y = remat(region)(remat(region)(x))
        return remat(lambda y: (y * aux[0] * aux[1]).sum())(y) + (aux[0] * aux[1]).sum()

    return f


def by_attribute(remat):
    class Holder:
        pass

    def region(x):
        Holder.aux_loss = x.sin().square().sum()
        return x.exp()

    return lambda x: remat(region)(x).sum() + 3 * Holder.aux_loss


def of_an_inner_region(remat):
    """Kept by the inner of three regions, read in the next and outside of all."""
    aux = []

    def inner(x):
        h = x.sin()
        aux.append(h)
        return x.exp()

    def outer(x):
        return remat(inner)(x * 2) * aux[-1]

    def f(x):
        out = remat(lambda x: remat(outer)(x))(x).sum() + (aux[-1] * X).sum()
        aux.clear()
        return out

    return f


ESCAPES = [appended, twice, by_attribute, of_an_inner_region]
escapes = pytest.mark.parametrize("build", ESCAPES, ids=lambda f: f.__name__)


@escapes
def test_in_plain_autograd_it_is_a_further_result(build):
    """Its gradient reaches captured leaves too, also in a region around it."""

    def program(remat):
        w, x = numbers(4, start=1.0).requires_grad_(), X.clone().requires_grad_()
        value = build(remat)(x)
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        around = remat(lambda x: build(remat)(x * w))(x)
        second = torch.autograd.grad((first * X).sum(), x)
        return first, second, torch.autograd.grad(around, (x, w))

    same(program)


@escapes
def test_under_grad_it_is_an_error(build):
    # which line, the one that made it or the region's call, the contract leaves open
    with refused("", "return", shape=() if build is by_attribute else (4,)):
        functx.grad(build(functx.remat))(X)


WAYS = {
    "vmap(grad)": lambda f: functx.vmap(functx.grad(f))(numbers(3, 4)),
    "jacrev(grad)": lambda f: functx.jacrev(functx.grad(f))(X),
    "jvp": lambda f: functx.jvp(f, (X,), (X.cos(),)),
    "jacfwd": lambda f: functx.jacfwd(f)(X),
    "torch.func.grad": lambda f: torch.func.grad(f)(X),
    "vjp": lambda f: functx.vjp(f, X)[1](torch.ones((), dtype=DTYPE)),
}


@pytest.mark.parametrize(
    ("build", "way"), [((appended, of_an_inner_region)[i % 2], way) for i, way in enumerate(WAYS)]
)
def test_under_other_transforms_it_is_never_a_constant(build, way):
    right_or_refused(lambda remat: WAYS[way](build(remat)), eps=16)


def leaves_a_view(x, aux):
    h = x.sin()
    aux.append(h[1:])
    return h.exp()


def returns_it_too(x, aux):
    aux.append(x.sin())
    return aux[0]


def makes_a_leaf(x, aux):
    aux.append(x.detach().sin().requires_grad_())
    return aux[0] * x


@pytest.mark.parametrize("body", [leaves_a_view, returns_it_too, makes_a_leaf])
def test_other_ways_to_leave_are_right_or_an_error(body):
    def program(remat):
        aux, x = [], X.clone().requires_grad_()
        value = remat(lambda x: body(x, aux))(x).sum()
        if body is not makes_a_leaf:
            value = value + (aux[0] * X[: len(aux[0])]).sum()
        value.backward()
        return x.grad, aux[0].grad if aux[0].is_leaf else None

    right_or_refused(program)


def test_what_does_not_require_grad_may_leave():
    log = []

    def region(x):
        h = x.sin()
        log.extend([h.detach(), h.detach().sum().item()])
        return h.exp()

    x = X.clone().requires_grad_()
    functx.remat(region)(x).sum().backward()
    assert_same((log[0], x.grad), (X.sin(), X.cos() * X.sin().exp()), eps=8)
    assert functx.grad(lambda x: functx.remat(region)(x).sum())(X).shape == (4,)


def test_what_is_gone_when_the_region_ends_is_no_error():
    scratch = []

    def region(x):
        scratch.append(x.sin())
        return scratch.pop().exp()

    found = functx.grad(lambda x: functx.remat(region)(x).sum())(X)
    assert_same(found, X.cos() * X.sin().exp(), eps=8)


class TestForwardHooks:
    """Models record hidden states and router logits so."""

    @staticmethod
    def gradients(remat, nested):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(DTYPE) for _ in range(3)]
        kept = []
        for block in blocks:
            block[0].register_forward_hook(lambda module, args, out: kept.append(out))
        x = y = numbers(2, 4).requires_grad_()
        for block in blocks:
            y = remat(lambda y, b=block: remat(b)(y))(y) if nested else remat(block)(y)
        value = y.sum() + sum(h.square().sum() * (i + 1) for i, h in enumerate(kept[:3]))
        assert len(kept) == 3
        return torch.autograd.grad(value, [x, *nn.ModuleList(blocks).parameters()])

    @pytest.mark.parametrize("nested", [False, True])
    def test_what_they_record_has_its_gradient(self, nested):
        same(lambda remat: self.gradients(remat, nested))


@pytest.mark.parametrize("transform", ["vjp", "vmap"])
def test_a_leaf_that_a_transform_inside_hands_through_has_its_gradient(transform):
    leaf = numbers(3, start=2.0).requires_grad_()

    def program(remat):
        def f(x):
            if transform == "vmap":
                return functx.vmap(lambda x: (x.sin(), leaf))(x)
            return functx.vjp(lambda x: (x.sin(), leaf), x)[0]

        x = numbers(2, 3).requires_grad_()
        out = remat(f)(x)
        return torch.autograd.grad(out[0].sum() + out[1].sin().sum(), [x, leaf])

    same(program)


@pytest.mark.parametrize("captured", [False, True])
def test_what_a_thread_of_the_region_computes_is_refused(captured):
    w = numbers(3, start=2.0).requires_grad_()

    def f(x):
        found = []
        thread = threading.Thread(target=lambda: found.append((x * w if captured else x).sin()))
        thread.start()
        thread.join()
        return found[0] * 2

    with pytest.raises(functx.RematError, match="Start the thread outside"):
        functx.remat(f)(numbers(3).requires_grad_())


def test_what_leaves_below_a_transform_and_requires_grad_in_plain_autograd_is_refused():
    w = numbers(3, start=2.0).requires_grad_()
    kept = []

    def f(x):
        kept.append(w.sin())
        return x * w

    def outer(x):
        out = functx.remat(f)(x)
        return out * kept.pop()

    with pytest.raises(functx.RematError, match="leaves it otherwise than by return"):
        functx.jacfwd(outer)(numbers(3))


class Times(torch.autograd.Function):
    """``x * w``, as a fused layer: what it is given no function mode is shown."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, cotangent):
        x, w = ctx.saved_tensors
        return cotangent * w, cotangent * x


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_weight_that_only_a_custom_function_is_given_has_its_gradient_at_any_depth(depth):
    w = numbers(4, start=2.0).requires_grad_()

    def program(remat):
        def f(x):
            return Times.apply(x.sin(), w)

        for _ in range(depth):
            f = remat(lambda x, inner=f: inner(x))
        x = X.clone().requires_grad_()
        return torch.autograd.grad(f(x).sum(), [x, w])

    same(program)
