"""What a function asks of its tape, and hangs on it, is in JAX what it is in torch."""

import jax
import pytest
import torch

import functx
from functx._errors import LoweringError
from functx.compat import to_jax

from .networks import arrays, assert_close

X = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
W = torch.linspace(-0.4, 0.6, 25, dtype=torch.float64).reshape(5, 5).requires_grad_()


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def hooked(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda g: g * 3)
    return y.sin() * x


def reads_its_value(x):
    y = x * 2
    y.register_hook(lambda g: g * y.detach() * y)
    return y.sin() * x


def two_hooks_late(x):
    y = x * 2
    z = y.exp()
    y.register_hook(lambda g: g * 3)
    y.register_hook(lambda g: g + 1)
    z.register_hook(lambda g: g.clamp(-1, 1))
    return z.sin() * x * y


def on_an_input(x):
    x.register_hook(lambda g: g * 3)
    x.register_hook(lambda g: g.sin() + x)
    return x.sin() * x


def written_to_after(x):
    y = x.sin()
    y.register_hook(lambda g: g * 3)
    y.mul_(2)
    return y * x


def in_a_region(x):
    def region(x):
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda g: g * 3)
        return y * x

    return functx.remat(region)(x) * functx.remat(region)(x.detach())


def one_of_several_results(x):
    a, b = x[:4].chunk(2)
    a.register_hook(lambda g: g * 2)
    with torch.no_grad():
        b.register_hook(lambda g: g * 5)
    return a * b


def only_looks(x):
    norms = []
    y = x.exp()
    y.register_hook(lambda g: norms.append(g.norm()))
    return y.sin()


def under_grad_inside(x):
    def inside(x):
        y = x * 2
        y.register_hook(lambda g: g * y.detach() * y)
        return (y.sin() * x).sum()

    return functx.grad(inside)(x)


def under_autograd_inside(x):
    y = x.sin()
    y.register_hook(lambda g: W @ g)
    return torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0] * y


HOOKS = [
    hooked,
    reads_its_value,
    two_hooks_late,
    on_an_input,
    written_to_after,
    in_a_region,
    one_of_several_results,
    only_looks,
    under_grad_inside,
    under_autograd_inside,
]


class DetachesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * x * x.detach()


def checkpointed(x):
    y = torch.utils.checkpoint.checkpoint(lambda x: x.sin() * x, x, use_reentrant=False) + x.cos()
    return torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0] * x


def detached_in_backward(x):
    return DetachesInBackward.apply(x).sin()


def detached_in_backward_inside(x):
    return torch.autograd.grad(DetachesInBackward.apply(x).sin().sum(), x, create_graph=True)[0]


def asks_requires_grad(x):
    return x * 2 if (x.detach() * 1).requires_grad or not (x * 1).requires_grad else x * 3


def asks_in_no_grad(x):
    with torch.no_grad():
        y = x * 2
    return y * x if not y.requires_grad and y.grad_fn is None and y.is_leaf else x


def asks_is_leaf(x):
    return x * 3 if x.is_leaf and not (x * 2).is_leaf else x


def asks_grad_fn(x):
    return x * 3 if (x * 2).grad_fn is not None and x.grad_fn is None else x


def asks_in_a_region(x):
    region = functx.remat(lambda x: x.sin() if x.requires_grad else x.cos())
    return region(x) * region(x.detach())


def keeps_grad(x):
    y = x * 1
    y.retain_grad()
    torch.autograd.backward(y.sin().sum(), create_graph=True)
    return y.grad * x


ASKS = [
    checkpointed,
    detached_in_backward,
    detached_in_backward_inside,
    asks_requires_grad,
    asks_in_no_grad,
    asks_is_leaf,
    asks_grad_fn,
    asks_in_a_region,
]


def first(f):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


def second(f):
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return torch.autograd.grad((g * g).sum(), x)[0]


def squares(gradient):
    return lambda x: (gradient(x) ** 2).sum()


@pytest.mark.parametrize("f", HOOKS + ASKS)
def test_as_in_torch(f):
    scalar = lambda x: to_jax(f)(x).sum()  # noqa: E731
    assert_close(to_jax(f)(arrays(X)), f(X.clone().requires_grad_()))
    assert_close(jax.grad(scalar)(arrays(X)), first(f))
    twice = jax.grad(squares(jax.grad(scalar)))
    if f in (two_hooks_late, on_an_input):  # not linear: one sum in torch, its parts in JAX
        with pytest.raises(LoweringError, match=r"TensorHook.*no second derivative"):
            twice(arrays(X))
    elif f not in (asks_requires_grad, asks_is_leaf, asks_grad_fn, asks_in_no_grad):
        assert_close(twice(arrays(X)), second(f))


@pytest.mark.parametrize("f", [hooked, two_hooks_late, on_an_input])
def test_hooks_are_no_matter_to_forward_mode(f):
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(X.clone().requires_grad_(), X.cos())
        expected = torch.autograd.forward_ad.unpack_dual(f(x)).tangent
    x, t = arrays((X, X.cos()))
    assert_close(jax.jvp(to_jax(f), (x,), (t,))[1], expected)


def test_keeps_grad():
    x = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match="reference cycle"):
        expected = keeps_grad(x)
    assert_close(to_jax(keeps_grad)(arrays(X)), expected)


def test_what_does_not_ask_is_traced_once():
    runs = []

    def f(x):
        runs.append(x)
        return functx.remat(torch.sin)(x) + functx.vmap(functx.grad(functx.remat(torch.sin)))(x)

    jax.grad(lambda x: to_jax(f)(x).sum())(arrays(X))
    assert len(runs) == 1


def reads_later(x):
    y = x * 2
    z = y.exp()
    y.register_hook(lambda g: g * z)
    return z


def view_is_written(x):
    y = x.sin()
    y[1:3].register_hook(lambda g: g * 3)
    y.mul_(2)
    return y * x


def removes(x):
    y = x.sin()
    with y.register_hook(lambda g: g * 3):
        return y * 2


def freezes(x):
    y = x.sin()
    x.requires_grad_(False)
    return y + x


def freezes_by_attribute(x):
    x.requires_grad = False
    return x * 2


def hooks_a_node(x):
    y = x * 2
    y.grad_fn.register_hook(lambda a, b: a)
    return y


def after_accumulation(x):
    x.register_post_accumulate_grad_hook(print)
    return x * 2


def packs(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.round(), lambda x: x):
        return x.sin() * x


def saves_on_cpu(x):
    with torch.autograd.graph.save_on_cpu():
        y = x.sin() * x
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Holder:
    """Not looked into for what a trace depends on."""

    def __init__(self):
        self.module = torch.nn.Linear(5, 5).double()
        self.module.register_full_backward_hook(lambda module, given, got: (given[0] * 3,))


HELD = Holder()


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (reads_later, "register the hook before"),
        (view_is_written, r"hook a \.clone\(\)"),
        (removes, "removed again"),
        (freezes, r"use x\.detach\(\)"),
        (freezes_by_attribute, r"use x\.detach\(\)"),
        (hooks_a_node, "Tensor.register_hook"),
        (after_accumulation, "nothing accumulates in JAX"),
        (packs, "saved_tensors_hooks"),
        (saves_on_cpu, "saved_tensors_hooks"),
        (lambda x: HELD.module(x), "has backward hooks"),
    ],
)
def test_what_can_not_be_said_raises(f, words):
    with pytest.raises(LoweringError, match=words):
        to_jax(f)(arrays(X))


def test_what_only_moves_values_may_save_them():
    def f(x):
        with torch.autograd.graph.save_on_cpu():
            return x.sin() * x

    assert_close(jax.grad(lambda x: to_jax(f)(x).sum())(arrays(X)), first(f))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # of the caller
        assert_close(to_jax(lambda x: x.sin())(arrays(X)), X.sin())


def test_a_parameter_with_a_hook_after_accumulation():
    net = torch.nn.Linear(5, 5).double()
    net.weight.register_post_accumulate_grad_hook(lambda p: None)
    params, fn = to_jax(net)
    with pytest.raises(LoweringError, match="backward hooks"):
        fn(params, arrays(X))
