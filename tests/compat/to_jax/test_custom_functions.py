"""A custom ``autograd.Function`` keeps its own derivatives in JAX, in every mode and order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd.function import once_differentiable

import functx
from functx._errors import LoweringError
from functx.compat import to_jax

from ..helpers import arrays, assert_close
from .custom_functions import CASES, INDEX, Both, Rich, Saves, Square, W, X, function


@pytest.mark.parametrize("name", CASES)
def test_the_rule_is_kept_in_every_mode_and_order(name):
    """Without a jvp, forward mode is the transpose of the backward."""
    f, x = CASES[name], arrays(X)
    lowered = to_jax(f)

    @jax.jit
    def derivatives(x):
        first = jax.grad(lowered)
        batched = jax.vmap(first)(jnp.stack([2 * x, x]))[1]
        found = lowered(x), first(x), batched, jax.jacrev(first)(x)
        if name == "writes around it":  # which has a jvp, another rule
            return found, ()
        return found, (jax.jvp(lowered, (x,), (x,))[1], jax.jacfwd(first)(x))

    once = torch.autograd.functional.jacobian(f, X)
    twice = torch.autograd.functional.hessian(f, X)
    reverse, forward = derivatives(x)
    assert_close(reverse, (f(X), once, once, twice), rtol=1e-5)
    assert_close(forward, (once @ X, twice) if forward else (), rtol=1e-4)


def both(x):
    a, b = Both.apply(x, x * 2)
    return (a * b).sum()


def test_jvp_and_backward_each_serve_their_mode():
    def derivatives(f, library, x):
        grad, jacrev = library.grad, library.jacrev
        pushed = library.jvp(f, (x,), (x,))
        return grad(f)(x), pushed, library.hessian(f)(x), jacrev(jacrev(f))(x)

    found = jax.jit(lambda x: derivatives(to_jax(both), jax, x))(arrays(X))
    assert_close(found, derivatives(both, torch.func, X), rtol=1e-5)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: functx.grad(functx.remat(f)),
        lambda f: functx.remat(functx.grad(f)),
        lambda f: lambda x: functx.vmap(functx.grad(f))(torch.stack([x, 2 * x])).sum(0),
    ],
)
def test_transforms_inside_keep_the_rule(transform):
    g = transform(lambda x: both(x) + (Square.apply(x) * x).sum())
    x = arrays(X)
    assert_close(jax.jit(to_jax(g))(x), g(X), rtol=1e-5)
    assert_close(jax.jit(jax.jacrev(to_jax(g)))(x), torch.func.jacrev(g)(X), rtol=1e-5)


def test_an_inner_tape_uses_the_rule():
    """What the tape of an inner gradient saved has the rule's derivative."""

    def f(x):
        y = x * 1
        if not y.requires_grad:
            y.requires_grad_()
        return torch.autograd.grad(Saves.apply(y).sum(), y, create_graph=True)[0]

    assert_close(to_jax(f)(arrays(X)), f(X))
    expected = torch.autograd.functional.jacobian(f, X)
    assert_close(jax.jacrev(to_jax(f))(arrays(X)), expected, rtol=1e-5)


def test_an_argument_that_needs_no_gradient_gets_none():
    f = lambda x, w: (Rich.apply(x, w, INDEX, -0.5) ** 2).sum()  # noqa: E731
    got = jax.grad(to_jax(f), (0, 1))(*arrays((X, W)))
    assert_close(got, torch.autograd.functional.jacobian(f, (X, W)), rtol=1e-5)


def test_once_differentiable_is_heeded():
    once = function(once_differentiable(lambda ctx, g: 3 * g * ctx.saved_tensors[0]), name="Once")
    lowered, x = to_jax(lambda x: once(x).sum()), arrays(X)
    np.testing.assert_allclose(jax.grad(lowered)(x), 3 * x)
    np.testing.assert_allclose(jax.jvp(lowered, (x,), (x,))[1], 3 * x @ x, rtol=1e-6)
    for twice in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        with pytest.raises(LoweringError, match=r"Once.*once_differentiable"):
            twice(lowered)(x)


def test_a_stop_in_a_backward_stops_second_derivatives_only():
    stops = function(torch.no_grad()(lambda ctx, g: 3 * g.detach()))
    lowered, x = to_jax(lambda x: (stops(x) * x).sum()), arrays(X)
    np.testing.assert_allclose(jax.jvp(lowered, (x,), (jnp.ones(4),))[1], (5 * x).sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lowered)(x), 5 * x, rtol=1e-6)


def test_a_derivative_that_there_is_not_is_refused():
    x = arrays(X)
    none = to_jax(lambda x: function(name="NoBackward")(x).sum())
    assert float(none(x)) == pytest.approx(4.4)
    with pytest.raises(LoweringError, match=r"NoBackward.*no backward.*NotImplementedError"):
        jax.grad(none)(x)
    clipped = to_jax(lambda x: function(lambda ctx, g: g.clamp(-0.5, 0.5), name="Clipped")(x).sum())
    np.testing.assert_allclose(jax.grad(clipped)(x), 0.5)
    with pytest.raises(LoweringError, match=r"Clipped.*not linear"):
        jax.jvp(clipped, (x,), (x,))
    dirty = function(
        lambda ctx, g: g, lambda ctx, x: (ctx.mark_dirty(x), x.mul_(2))[1], name="Dirty"
    )
    with pytest.raises(LoweringError, match=r"Dirty.*mark_dirty"):
        to_jax(lambda x: dirty(x * 1))(x)


@pytest.mark.parametrize("remat", [lambda f: f, functx.remat])
def test_what_a_function_draws_is_drawn_once(remat):
    def forward(ctx, x):
        mask = (torch.rand_like(x) > 0.5).float()
        ctx.save_for_backward(mask)
        return x * mask

    mask = function(lambda ctx, g: 3 * g * ctx.saved_tensors[0], forward)
    x, key = jnp.ones(64), jax.random.key(0)
    out = to_jax(mask, rng=True)(key, x)
    assert 0 < int(out.sum()) < 64
    f = remat(lambda x: mask(x).sum())
    np.testing.assert_array_equal(jax.grad(to_jax(f, rng=True), 1)(key, x), 3 * out)
    inside = to_jax(lambda x: torch.autograd.grad(f(x), x, create_graph=True)[0], rng=True)
    np.testing.assert_array_equal(inside(key, x), 3 * out)
