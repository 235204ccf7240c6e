"""A custom ``autograd.Function`` keeps its own derivatives in JAX, at every order, in every mode.

Most rules here are not the derivatives of their forwards, so that a dropped rule shows.
"""

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

from .networks import arrays, assert_close

X = torch.linspace(0.1, 1.0, 4)
W = torch.linspace(-1.0, 1.0, 20).reshape(4, 5)
INDEX = torch.tensor([0, 2, 2])
SCALE = torch.tensor(3.0)


class Round(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Square(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return 5 * g * ctx.saved_tensors[0]


class Clamp(Function):
    """Arguments that are no tensors, and a backward that writes."""

    @staticmethod
    def forward(ctx, x, low, high):
        ctx.low, ctx.high = low, high
        ctx.save_for_backward(x)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g = g.clone()
        g[x < ctx.low] = 0
        g[x > ctx.high] = 0
        return g, None, None


class Needs(Function):
    @staticmethod
    def forward(ctx, x, w, index):
        ctx.save_for_backward(x, w, index)
        return (x @ w)[index]

    @staticmethod
    def backward(ctx, g):
        x, w, index = ctx.saved_tensors
        full = torch.zeros(w.shape[1]).index_add(0, index, g)
        assert not ctx.needs_input_grad[2]
        gx = 2 * full @ w.T if ctx.needs_input_grad[0] else None
        gw = 3 * torch.outer(x, full) if ctx.needs_input_grad[1] else None
        return gx, gw, None


class Sort(Function):
    """An integer result, and gradients that are not materialized."""

    @staticmethod
    def forward(ctx, x):
        index = x.argsort()
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        return x[index], index

    @staticmethod
    def backward(ctx, g, g_index):
        assert g_index is None
        return torch.zeros_like(g).scatter(0, ctx.saved_tensors[0], g)


class Unlike(Function):
    """A floating-point result without a gradient."""

    @staticmethod
    def forward(ctx, x):
        y, z = x * 2, x * 3
        ctx.mark_non_differentiable(z)
        ctx.save_for_backward(x)
        return y, z

    @staticmethod
    def backward(ctx, gy, gz):
        return gy * ctx.saved_tensors[0]


class Saves(Function):
    """Saves an input, a result and an intermediate."""

    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.middle = torch.sin(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return 3 * g * y + g * ctx.middle * x


class Writes(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.mul_(x)
        ctx.middle = y * 1
        ctx.middle.add_(1)
        y[0] = 0.0
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        g = g.clone()
        g.mul_(x * 2)
        g[0] = 0.0
        g *= ctx.middle
        return g * y


class Exp(Function):
    """Its backward is a custom Function too."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        return ExpBackward.apply(g, *ctx.saved_tensors)


class ExpBackward(Function):
    @staticmethod
    def forward(ctx, g, x, y):
        ctx.save_for_backward(g, x, y)
        return g * y * 2

    @staticmethod
    def backward(ctx, h):
        g, _, y = ctx.saved_tensors
        return 3 * h * y, 7 * h * g, 11 * h * g


class Complex(Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.saved_tensors[0].conj()


class HandsBack(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x, y.view(2, 2), None, "s"

    @staticmethod
    def backward(ctx, a, b, *_):
        return -a, -2 * b.view(4)


class Many(Function):
    @staticmethod
    def forward(ctx, *xs):
        ctx.save_for_backward(*xs)
        return sum(xs)

    @staticmethod
    def backward(ctx, g):
        return tuple(g * x for x in ctx.saved_tensors)


class ClosesOver(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * SCALE

    @staticmethod
    def backward(ctx, g):
        return g * SCALE * W[:, 0] * ctx.saved_tensors[0]


class Both(Function):
    """A backward and a jvp, which do not agree."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w, x + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[0])
        ctx.save_for_forward(*inputs, output[0])

    @staticmethod
    def backward(ctx, g, h):
        x, w, y = ctx.saved_tensors
        return 5 * g * w + h, 7 * g * x + y * g

    @staticmethod
    def jvp(ctx, t, u):
        x, w, y = ctx.saved_tensors
        return 11 * t * w + 13 * u * x * y, 17 * t


def closes_over_a_traced_value(x):
    u = x * x

    class Inner(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * u

        @staticmethod
        def backward(ctx, g):
            return g * u * ctx.saved_tensors[0]

    return Inner.apply(x).sum()


def _pair(fn, f):
    return lambda x: f(*fn(x))


CASES = {
    "straight through": lambda x: (Round.apply(x * 3) * x).sum(),
    "setup_context": lambda x: (Square.apply(x) * x).sum(),
    "plain arguments": lambda x: (Clamp.apply(x * 2, 0.3, 1.0) ** 2).sum(),
    "needs_input_grad": lambda x: (Needs.apply(x, W, INDEX) ** 2).sum(),
    "integer result": _pair(lambda x: Sort.apply(torch.sin(5 * x)), lambda s, i: (s**2 * i).sum()),
    "mark_non_differentiable": _pair(Unlike.apply, lambda y, z: (y**2 * z).sum()),
    "saves": lambda x: Saves.apply(x * x).sum(),
    "writes": lambda x: Writes.apply(torch.sin(x)).sum(),
    "a Function in the backward": lambda x: (Exp.apply(x) ** 2).sum(),
    "a Function in the forward": lambda x: (Exp.apply(x * Round.apply(x)) ** 2).sum(),
    "complex": lambda x: torch.view_as_real(Complex.apply(torch.complex(x, 2 * x))).pow(2).sum(),
    "hands back": _pair(
        lambda x: HandsBack.apply(x, x * x), lambda a, b, *_: (a * b.flatten()).sum()
    ),
    "many arguments": lambda x: Many.apply(x, x * 2, x).sum(),
    "closes over tensors": lambda x: ClosesOver.apply(x).sin().sum(),
    "in no_grad": lambda x: (torch.no_grad()(Saves.apply)(x) * x).sum(),
    "in a region": lambda x: functx.remat(lambda x: torch.sin(x) * Exp.apply(x))(x).sum(),
    "in torch's checkpoint": lambda x: checkpoint(
        lambda x: torch.sin(x) * Exp.apply(x), x, use_reentrant=False
    ).sum(),
}


def write_around(x):
    y = x * 1
    y[1:].mul_(2)
    z = Saves.apply(y).clone()
    z[0] = y[1]
    return (z * Both.apply(z, y)[0]).sum()


CASES["writes around it"] = write_around


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
