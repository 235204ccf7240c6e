"""Hooks, what a function asks of its tape, and where derivatives stop are as in torch."""

import collections

import jax
import pytest
import torch

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax

from ..helpers import arrays, assert_close

X = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def under_grad_inside(x):
    def inside(x):
        y = x * 2
        y.register_hook(lambda g: g * y.detach() * y)
        return (y.sin() * x).sum()

    return functx.grad(inside)(x)


ASKS = {
    "a hook under grad inside": under_grad_inside,
    "requires_grad": lambda x: x * 2 if not (x.detach() * 1).requires_grad else x * 3,
    "leaf": lambda x: x * 3 if x.is_leaf and x.grad_fn is None and (x * 2).grad_fn else x,
    "in a region, asked": functx.remat(lambda x: x.sin() if x.requires_grad else x.cos()),
}
LINEAR = ("requires_grad", "leaf")


def derivatives(f, twice=True):
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return first, torch.autograd.grad((first * first).sum(), x)[0] if twice else None


@pytest.mark.parametrize("name", ASKS)
def test_values_and_derivatives_are_as_in_torch(name):
    f = ASKS[name]
    scalar = lambda x: to_jax(f)(x).sum()
    assert_close(to_jax(f)(arrays(X)), f(X.clone().requires_grad_()))
    first, second = derivatives(f, twice=name not in LINEAR)
    assert_close(jax.grad(scalar)(arrays(X)), first)
    if name not in LINEAR:
        assert_close(jax.grad(lambda x: (jax.grad(scalar)(x) ** 2).sum())(arrays(X)), second)


def test_retain_grad_is_as_in_torch():
    def keeps_grad(x):
        y = x * 1
        y.retain_grad()
        torch.autograd.backward(y.sin().sum(), create_graph=True)
        return y.grad * x

    x = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match="reference cycle"):
        expected = keeps_grad(x)
    assert_close(to_jax(keeps_grad)(arrays(X)), expected)


def test_a_function_that_asks_nothing_is_traced_once():
    runs = []

    def f(x):
        runs.append(None)
        return functx.remat(torch.sin)(x) + functx.vmap(functx.grad(functx.remat(torch.sin)))(x)

    jax.grad(lambda x: to_jax(f)(x).sum())(arrays(X))
    assert len(runs) == 1


def packs(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.round(), lambda x: x):
        return x.sin() * x


# A deque is not looked into for what a trace depends on.
HELD = collections.deque([torch.nn.Linear(5, 5).double()])
HELD[0].register_full_backward_hook(lambda module, given, got: (given[0] * 3,))
REFUSED = {
    "register_hook: JAX's derivatives": lambda x: (x * 2).register_hook(print) and x,
    r"use x\.detach\(\)": lambda x: (x.requires_grad_(False), x * 2)[1],
    "register_hook of a grad_fn": lambda x: (x * 2).grad_fn.register_hook(lambda a, b: a) and x,
    "register_post_accumulate_grad_hook: JAX's": lambda x: (
        x.register_post_accumulate_grad_hook(print) and x
    ),
    "saved_tensors_hooks": packs,
    "that the function calls has backward hooks": lambda x: HELD[0](x),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_hook_without_a_counterpart_is_refused(words):
    with pytest.raises(LoweringError, match=words):
        to_jax(REFUSED[words])(arrays(X))


def test_saved_tensor_hooks_that_change_no_value_are_fine():
    def f(x):
        with torch.autograd.graph.save_on_cpu():
            return x.sin() * x

    assert_close(jax.grad(lambda x: to_jax(f)(x).sum())(arrays(X)), derivatives(f)[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # of the caller
        assert_close(to_jax(lambda x: x.sin())(arrays(X)), X.sin())


def no_grad_block(x):
    with torch.no_grad():
        s = torch.sin(x)
    return s * torch.tanh(x)


def write_to_a_view_without_grad(x):
    y = x * 3
    with torch.no_grad():
        y[1:3].mul_(2)
    return torch.sin(y)


CASES = {
    "no_grad": no_grad_block,
    "detach": lambda x: x.detach() * torch.tanh(x),
    "detach_": lambda x: (x * 3).detach_() * x,
    "write to a view in no_grad": write_to_a_view_without_grad,
    "enable_grad in no_grad": lambda x: torch.no_grad()(torch.enable_grad()(torch.exp))(x),
    "grad without create_graph": lambda x: x * _inner_gradient(x, False),
    "grad with create_graph": lambda x: x * _inner_gradient(x, True),
    # Autograd detaches outputs that it saves; cut there, second derivatives would be wrong.
    "grad of a saved tanh": lambda x: _inner_gradient(x, True, lambda y: torch.tanh(y + 2) ** 2),
}


def _inner_gradient(x, create_graph, f=lambda y: torch.sigmoid(y) ** 3):
    y = x * 1
    y = y if y.requires_grad else y.requires_grad_()
    return torch.autograd.grad(f(y).sum(), y, create_graph=create_graph)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_derivative_stops_where_torch_stops_it(name):
    f = CASES[name]
    assert_close(to_jax(f)(arrays(X)), f(X))
    regions = [f] if name.startswith("grad") else [f, functx.remat(f)]
    for g in regions:
        expected = torch.autograd.functional.jacobian(f, X)
        assert_close(jax.jacrev(to_jax(g))(arrays(X)), expected)
