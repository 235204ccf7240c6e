"""A custom ``autograd.Function`` keeps its own derivatives in JAX, in every mode and order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import functx
from functx._errors import LoweringError
from functx.compat import to_jax

from .custom_functions import (
    CASES,
    INDEX,
    Both,
    Needs,
    Saves,
    Square,
    W,
    X,
    closes_over_a_traced_value,
)
from .networks import arrays, assert_close


@pytest.mark.parametrize("name", CASES)
def test_value_and_derivatives(name):
    f = CASES[name]
    lowered = to_jax(f)
    x = arrays(X)
    assert_close(lowered(x), f(X))
    assert_close(jax.grad(lowered)(x), torch.autograd.functional.jacobian(f, X), rtol=1e-5)
    twice = torch.autograd.functional.hessian(f, X)
    assert_close(jax.jit(jax.jacrev(jax.jacrev(lowered)))(x), twice, rtol=1e-5)
    batch = jnp.stack([x, 2 * x])
    expected = jnp.stack([jax.grad(lowered)(row) for row in batch])
    np.testing.assert_allclose(jax.vmap(jax.grad(lowered))(batch), expected, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in CASES if n != "writes around it"])
def test_forward_mode_is_the_transpose_of_the_backward(name):
    """Where there is no jvp; ``jax.hessian`` is forward over reverse."""
    f, x = CASES[name], arrays(X)
    lowered = to_jax(f)
    gradient = jax.grad(lowered)(x)
    for tangent in (x, jnp.ones(4)):
        pushed = jax.jvp(lowered, (x,), (tangent,))[1]
        np.testing.assert_allclose(pushed, gradient @ tangent, rtol=1e-4)
    twice = torch.autograd.functional.hessian(f, X)
    assert_close(jax.hessian(lowered)(x), twice, rtol=1e-5)


def both(x):
    a, b = Both.apply(x, x * 2)
    return (a * b).sum()


def test_jvp_and_backward_each_in_its_mode():
    lowered, x = to_jax(both), arrays(X)
    assert_close(jax.grad(lowered)(x), torch.func.grad(both)(X), rtol=1e-5)
    assert_close(jax.jvp(lowered, (x,), (x,)), torch.func.jvp(both, (X,), (X,)), rtol=1e-5)
    assert_close(jax.hessian(lowered)(x), torch.func.hessian(both)(X), rtol=1e-5)
    expected = torch.func.jacrev(torch.func.jacrev(both))(X)
    assert_close(jax.jacrev(jax.jacrev(lowered))(x), expected, rtol=1e-5)
    _, push = jax.linearize(lowered, x)
    assert_close(push(x), torch.func.jvp(both, (X,), (X,))[1], rtol=1e-5)


@pytest.mark.parametrize(
    "transform",
    [
        functx.grad,
        lambda f: functx.grad(functx.remat(f)),
        lambda f: functx.remat(functx.grad(f)),
        functx.jacrev,
        lambda f: lambda x: functx.vmap(functx.grad(f))(torch.stack([x, 2 * x])).sum(0),
    ],
)
@pytest.mark.parametrize("f", [lambda x: (Square.apply(x) * x).sum(), both])
def test_transforms_inside(transform, f):
    g = transform(f)
    x = arrays(X)
    assert_close(to_jax(g)(x), g(X), rtol=1e-5)
    assert_close(jax.jacrev(to_jax(g))(x), torch.func.jacrev(g)(X), rtol=1e-5)


def test_an_inner_tape_reads_the_rule():
    """What the tape of an inner gradient saved has the rule's derivative."""

    def f(x):
        y = x * 1
        if not y.requires_grad:
            y.requires_grad_()
        return torch.autograd.grad(Saves.apply(y).sum(), y, create_graph=True)[0]

    assert_close(to_jax(f)(arrays(X)), f(X))
    expected = torch.autograd.functional.jacobian(f, X)
    assert_close(jax.jacrev(to_jax(f))(arrays(X)), expected, rtol=1e-5)


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit])
def test_under_jax(wrap):
    f, x = CASES["saves"], arrays(X)
    lowered = wrap(to_jax(f))
    assert_close(jax.grad(lowered)(x), torch.autograd.functional.jacobian(f, X), rtol=1e-5)

    def body(x, _):
        return x - 0.1 * jax.grad(lowered)(x), None

    y, _ = jax.lax.scan(body, x, length=2)
    z = X
    for _ in range(2):
        z = z - 0.1 * torch.autograd.functional.jacobian(f, z)
    assert_close(y, z, rtol=1e-5)


def test_second_argument():
    f = lambda x, w: (Needs.apply(x, w, INDEX) ** 2).sum()  # noqa: E731
    got = jax.grad(to_jax(f), (0, 1))(*arrays((X, W)))
    assert_close(got, torch.autograd.functional.jacobian(f, (X, W)), rtol=1e-5)


def test_closed_over_values_are_no_inputs():
    f = closes_over_a_traced_value
    assert_close(jax.grad(to_jax(f))(arrays(X)), torch.autograd.functional.jacobian(f, X))


def test_reentrant_checkpoint_is_a_region():
    f = lambda x: checkpoint(torch.sin, x, use_reentrant=True).sum()  # noqa: E731
    x = arrays(X)
    np.testing.assert_allclose(jax.grad(to_jax(f))(x), jnp.cos(x), rtol=1e-6)
    assert "remat" in str(jax.make_jaxpr(to_jax(f))(x))


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0]


def test_once_differentiable():
    lowered, x = to_jax(lambda x: Once.apply(x).sum()), arrays(X)
    np.testing.assert_allclose(jax.grad(lowered)(x), 3 * x)
    np.testing.assert_allclose(jax.jvp(lowered, (x,), (x,))[1], 3 * x @ x, rtol=1e-6)
    for twice in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        with pytest.raises(LoweringError, match=r"Once.*once_differentiable"):
            twice(lowered)(x)


class NoGradBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return 3 * g.detach()


def test_stops_in_a_backward_stop_second_derivatives_only():
    lowered, x = to_jax(lambda x: (NoGradBackward.apply(x) * x).sum()), arrays(X)
    np.testing.assert_allclose(jax.jvp(lowered, (x,), (jnp.ones(4),))[1], (5 * x).sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lowered)(x), 5 * x, rtol=1e-6)


class NoBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def test_without_a_backward():
    lowered, x = to_jax(lambda x: NoBackward.apply(x).sum()), arrays(X)
    assert float(lowered(x)) == pytest.approx(4.4)
    with pytest.raises(LoweringError, match=r"NoBackward.*no backward.*NotImplementedError"):
        jax.grad(lowered)(x)


class Clipped(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.5, 0.5)


def test_a_backward_that_is_not_linear_has_no_forward_mode():
    lowered, x = to_jax(lambda x: Clipped.apply(x).sum()), arrays(X)
    np.testing.assert_allclose(jax.grad(lowered)(x), 0.5)
    with pytest.raises(LoweringError, match=r"Clipped.*not linear"):
        jax.jvp(lowered, (x,), (x,))


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g


def test_mark_dirty_is_refused():
    with pytest.raises(LoweringError, match=r"Dirty.*mark_dirty"):
        to_jax(lambda x: Dirty.apply(x * 1))(arrays(X))


class Mask(Function):
    """Draws in its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        mask = (torch.rand_like(x) > 0.5).float()
        return x * mask, mask

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        return 3 * g * ctx.saved_tensors[0]


@pytest.mark.parametrize("remat", [lambda f: f, functx.remat])
def test_a_function_that_draws(remat):
    x, key = jnp.ones(64), jax.random.key(0)
    out = to_jax(lambda x: Mask.apply(x)[0], rng=True)(key, x)
    assert 0 < int(out.sum()) < 64
    f = remat(lambda x: Mask.apply(x)[0].sum())
    np.testing.assert_array_equal(jax.grad(to_jax(f, rng=True), 1)(key, x), 3 * out)
    np.testing.assert_array_equal(to_jax(functx.grad(f), rng=True)(key, x), 3 * out)
