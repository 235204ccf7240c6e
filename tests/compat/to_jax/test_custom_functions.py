"""A custom ``autograd.Function`` keeps its own derivatives in JAX, in every mode and order.

Most rules are not the derivatives of their forwards, so that a dropped rule shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import custom_function, saves_inputs
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax

from ..helpers import arrays, assert_close

X = torch.linspace(0.1, 1.0, 4)
W = torch.linspace(-1.0, 1.0, 20).reshape(4, 5)
INDEX = torch.tensor([0, 2, 2])


def function(backward=None, forward=None, name="F", saves=True):
    """``apply`` of a Function; by default it doubles its argument and saves it."""

    def doubles(ctx, x):
        if saves:
            ctx.save_for_backward(x)
        return x * 2

    rules = {"forward": forward or doubles, **({"backward": backward} if backward else {})}
    return type(name, (Function,), {k: staticmethod(rule) for k, rule in rules.items()}).apply


square = custom_function(lambda x: x * x, lambda ctx, g: 5 * g * ctx.saved_tensors[0], saves_inputs)


class Rich(Function):
    """Arguments that need no gradient or are no tensors; a forward and a backward that write."""

    @staticmethod
    def forward(ctx, x, w, index, low):
        ctx.low, ctx.middle = low, x * 1
        ctx.middle.mul_(x).add_(1)
        ctx.save_for_backward(x, w, index)
        return (x @ w)[index]

    @staticmethod
    def backward(ctx, g):
        x, w, index = ctx.saved_tensors
        full = torch.zeros(w.shape[1]).index_add(0, index, g)
        full[w[0] < ctx.low] = 0
        full *= 2
        assert not ctx.needs_input_grad[2]
        gx = (full @ w.T).mul_(ctx.middle) if ctx.needs_input_grad[0] else None
        gw = 3 * torch.outer(x, full) if ctx.needs_input_grad[1] else None
        return gx, gw, None, None


def sorts(ctx, x):
    """Results without a gradient, and gradients that are not materialized."""
    index, tripled = x.argsort(), x * 3
    ctx.mark_non_differentiable(index, tripled)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(index)
    return x[index], index, tripled


def unsorts(ctx, g, g_index, g_tripled):
    assert g_index is None
    return torch.zeros_like(g).scatter(0, ctx.saved_tensors[0], g)


def saves_all(ctx, x):
    """An input, a result and an intermediate."""
    y = torch.exp(x)
    ctx.middle = torch.sin(x)
    ctx.save_for_backward(x, y)
    return y


def reads_all(ctx, g):
    x, y = ctx.saved_tensors
    return 3 * g * y + g * ctx.middle * x


sort = function(unsorts, sorts)
saves = function(reads_all, saves_all)
hands_back = function(
    lambda ctx, a, b, *_: (-a, -2 * b.view(4)), lambda ctx, x, y: (x, y.view(2, 2), None, "s")
)


def saves_exp(ctx, x):
    y = x.exp()
    ctx.save_for_backward(x, y)
    return y


def saves_and_multiplies(ctx, g, x, y):
    ctx.save_for_backward(g, y)
    return g * y * 2


def of_the_product(ctx, h):
    g, y = ctx.saved_tensors
    return 3 * h * y, 7 * h * g, 11 * h * g


# Its backward is a custom Function too.
exp_backward = function(of_the_product, saves_and_multiplies)
exp = function(lambda ctx, g: exp_backward(g, *ctx.saved_tensors), saves_exp)


def saves_for_both(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[0])
    ctx.save_for_forward(*inputs, output[0])


def both_backward(ctx, g, h):
    x, w, y = ctx.saved_tensors
    return 5 * g * w + h, 7 * g * x + y * g


def both_jvp(ctx, t, u):
    x, w, y = ctx.saved_tensors
    return 11 * t * w + 13 * u * x * y, 17 * t


# A backward and a jvp, which do not agree.
both_rules = custom_function(lambda x, w: (x * w, x + 1), both_backward, saves_for_both, both_jvp)


def closes_over_a_traced_value(x):
    u = x * x

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * u

    return function(lambda ctx, g: g * u * ctx.saved_tensors[0], forward)(x).sum()


def write_around(x):
    y = x * 1
    y[1:].mul_(2)
    z = saves(y).clone()
    z[0] = y[1]
    return (z * both_rules(z, y)[0]).sum()


def write_after_a_region(x):
    y = functx.remat(lambda x: x * square(x))(x)
    written = torch.zeros_like(y)
    written[0] = y[0]
    return (written * y).sum()


def squares_complex(x):
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    square = function(lambda ctx, g: g * 3 * ctx.saved_tensors[0].conj(), forward)
    return torch.view_as_real(square(torch.complex(x, 2 * x))).pow(2).sum()


sin_exp = lambda x: torch.sin(x) * exp(x)
CASES = {
    "setup_context": lambda x: (square(x) * x).sum(),
    "rich": lambda x: (Rich.apply(x, W, INDEX, -0.5) ** 2).sum(),
    "rich, of both": lambda x: (Rich.apply(x, x[:, None] * W, INDEX, -0.5) ** 2).sum(),
    "mark_non_differentiable": lambda x: (lambda s, i, tripled: (s**2 * i * tripled).sum())(
        *sort(torch.sin(5 * x))
    ),
    "writes around it": write_around,
    "a Function in the backward": lambda x: (exp(x) ** 2).sum(),
    "complex": squares_complex,
    "hands back": lambda x: (lambda a, b, *_: (a * b.flatten()).sum())(*hands_back(x, x * x)),
    "closes over a traced value": closes_over_a_traced_value,
    "in a region": lambda x: functx.remat(sin_exp)(x).sum(),
    "in a region that a write has traced again": write_after_a_region,
    "in torch's checkpoint": lambda x: checkpoint(sin_exp, x, use_reentrant=False).sum(),
}


@pytest.mark.filterwarnings("ignore:the JAX function saves what torch.utils.checkpoint")
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
    a, b = both_rules(x, x * 2)
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
    g = transform(lambda x: both(x) + (square(x) * x).sum())
    x = arrays(X)
    assert_close(jax.jit(to_jax(g))(x), g(X), rtol=1e-5)
    assert_close(jax.jit(jax.jacrev(to_jax(g)))(x), torch.func.jacrev(g)(X), rtol=1e-5)


def test_once_differentiable_is_heeded():
    once = function(once_differentiable(lambda ctx, g: 3 * g * ctx.saved_tensors[0]), name="Once")
    lowered, x = to_jax(lambda x: once(x).sum()), arrays(X)
    np.testing.assert_allclose(jax.grad(lowered)(x), 3 * x)
    np.testing.assert_allclose(jax.jvp(lowered, (x,), (x,))[1], 3 * x @ x, rtol=1e-6)
    for twice in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        with pytest.raises(LoweringError, match=r"Once.*once_differentiable"):
            twice(lowered)(x)


@pytest.mark.parametrize("transform", [jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))])
def test_the_rule_is_kept_in_a_loop_of_jax_at_second_order(transform):
    """Where JAX forgets that of a ``jax.custom_jvp``."""
    f = function(lambda ctx, g: 3 * g * ctx.saved_tensors[0])
    lowered, x = to_jax(f), arrays(X)

    def loop(scan):
        def run(x):
            for _ in () if scan else range(3):
                x = lowered(x / 2)
            return jax.lax.scan(lambda x, _: (lowered(x / 2), None), x, None, 3)[0] if scan else x

        return lambda x: (run(x) ** 2).sum()

    expected = transform(loop(False))(x)
    assert np.abs(expected).max() > 0.01
    assert_close(transform(loop(True))(x), expected)
    once = function(once_differentiable(lambda ctx, g: 3 * g * ctx.saved_tensors[0]), name="Once")
    lowered = to_jax(once)
    with pytest.raises(LoweringError, match=r"Once.*once_differentiable"):
        transform(loop(True))(x)


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
