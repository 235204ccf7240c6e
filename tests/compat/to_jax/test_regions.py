"""A remat region is ``jax.checkpoint`` at the same cut, and its recompute survives XLA."""

import jax
import jax.numpy as jnp
import pytest
import torch

import functx
from functx._errors import LoweringError
from functx.compat import to_jax

from ..helpers import arrays, assert_close, count_dots

LAYERS = 6


def weights():
    torch.manual_seed(0)
    return [torch.randn(8, 8) / 3 for _ in range(LAYERS)], torch.randn(4, 8)


def chain(segment):
    """An MLP cut into regions of ``segment`` layers; 0 is no region."""

    def run(x, *ws):
        for w in ws:
            x = torch.tanh(x @ w)
        return x

    def net(ws, x):
        for i in range(0, LAYERS, segment or LAYERS):
            part = ws[i : i + (segment or LAYERS)]
            x = functx.remat(run)(x, *part) if segment else run(x, *part)
        return (x * x).sum()

    return net


# Plain: 6 products forward, 6 for the weights, 5 for the activations.  Every region runs again.
PLAIN = LAYERS + LAYERS + (LAYERS - 1)


@pytest.mark.parametrize("segment", [0, 1, 2, 6])
def test_a_region_runs_again_and_gives_torch_s_gradient(segment):
    args = weights()
    expected = torch.func.grad(chain(0))(*args)
    recomputed = LAYERS if segment else 0
    for gradient in (jax.grad(to_jax(chain(segment))), to_jax(functx.grad(chain(segment)))):
        assert count_dots(gradient, *arrays(args)) == PLAIN + recomputed
        assert_close(gradient(*arrays(args)), expected)


def test_the_count_can_fail():
    """Without the option XLA's CPU compiler merges the recompute, up to JAX 0.11.0; it is seen."""
    args = arrays(weights())
    f = jax.grad(to_jax(chain(2)))
    merged = count_dots(f, *args, barriers=False)
    assert merged == PLAIN + (LAYERS if jax.__version_info__ >= (0, 11, 1) else 0)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: functx.vmap(functx.grad(lambda x, w: f(x, w).sum()), (0, None)),
        lambda f: lambda x, w: functx.jvp(lambda x: f(x, w), (x,), (x,))[1],
        lambda f: functx.jacrev(f),
    ],
)
def test_a_region_under_transforms_inside(transform):
    x, w = torch.randn(3, 4), torch.randn(4, 4)

    def f(x, w):
        return torch.tanh(torch.sin(x @ w) @ w)

    expected = transform(f)(x, w)
    assert_close(to_jax(transform(functx.remat(f)))(arrays(x), arrays(w)), expected, rtol=1e-5)


def test_second_derivatives_go_through_a_region():
    """What the engine detaches to run a region again stops no gradient."""

    def f(x):
        return (torch.tanh(x * x) * x).sum()

    x = torch.linspace(0.1, 1, 4)
    expected = torch.func.hessian(f)(x)
    region, gradient = functx.remat(f), functx.remat(lambda x: functx.grad(f)(x * 1))
    for g in (functx.grad(region), functx.remat(functx.grad(f)), gradient):
        assert_close(jax.jit(jax.jacrev(to_jax(g)))(arrays(x)), expected, rtol=1e-5)
    assert_close(jax.hessian(to_jax(region))(arrays(x)), expected, rtol=1e-5)


def test_what_a_region_captures_is_read_at_each_call():
    w = torch.randn(4, 4)
    region = functx.remat(lambda x: torch.tanh(x @ w))
    h = to_jax(lambda x: region(x).sum())
    x = torch.randn(2, 4)
    assert_close(h(arrays(x)), region(x).sum())
    w.mul_(2)
    assert_close(h(arrays(x)), torch.tanh(x @ w).sum())


@pytest.mark.parametrize("inside", [False, True])
def test_a_graph_that_is_traced_again_keeps_its_regions(inside, monkeypatch):
    """Writes need a second pass; a replay that lost its mark there would be merged by XLA."""

    def run(x, a, b):
        y = x @ a
        y.mul_(2)
        return torch.tanh(torch.tanh(y) @ b)

    def net(ws, x):
        for i in range(0, LAYERS, 2):
            x = functx.remat(run)(x, *ws[i : i + 2])
        x = x.clone()
        x[0] = 1.0
        return (x * x).sum()

    args = weights()
    f = to_jax(functx.grad(net)) if inside else jax.grad(to_jax(net))
    assert count_dots(f, *arrays(args)) == PLAIN + LAYERS
    monkeypatch.setattr(functx, "remat", lambda f: f)
    assert_close(f(*arrays(args)), torch.func.grad(net)(*args))


def test_regions_nest():
    inner = functx.remat(lambda x: torch.sin(torch.cos(x)))
    outer = functx.remat(lambda x: torch.tanh(inner(inner(x))))
    x = torch.linspace(-1, 1, 4)

    def plain(x):
        return torch.tanh(torch.sin(torch.cos(torch.sin(torch.cos(x)))))

    got = jax.jacrev(to_jax(outer))(arrays(x))
    assert_close(got, torch.func.jacrev(plain)(x), rtol=1e-5)


def writes(x, b):
    def body(x):
        b.mul_(2.0)
        factors = torch.tensor([1.0, 2.0, 3.0, 4.0])
        factors.add_(1.0)
        return (x * b * factors).sum()

    return functx.remat(body)(x), b * 1


@pytest.mark.filterwarnings("ignore:the function writes to")
def test_what_a_region_writes_is_written_once():
    f = writes
    x, b = torch.linspace(-1, 1, 4), torch.arange(4.0)
    given = arrays((x, b))
    assert_close(to_jax(f)(*given), f(x, b.clone()))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(f(x, b.clone())[0], x)
    assert_close(jax.grad(lambda x, b: to_jax(f)(x, b)[0])(*given), expected)


def test_a_region_that_writes_to_what_is_captured_is_refused():
    buffer = torch.zeros(4)
    region = functx.remat(lambda x: x * buffer.add_(1.0))
    with pytest.raises(LoweringError, match="buffers=True"):
        to_jax(region)(jnp.ones(4))


CAPTURED = torch.linspace(-0.4, 0.6, 25).reshape(5, 5).requires_grad_()
INNER = functx.remat(lambda x: x.sin() * x)
BODIES = {
    "one": lambda x: functx.remat(lambda x: x.sin() * x.cos())(x) + x**2,
    "captured": lambda x: functx.remat(lambda h: torch.tanh(CAPTURED @ h) * x)(x.sin()) + x,
    "nested": functx.remat(lambda x: INNER(x).cos() + functx.vmap(functx.remat(torch.tanh))(x)),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_plain_autograd_inside_goes_through_regions(body, create_graph):
    def f(x):
        y = x * 1 if create_graph else x.detach().clone()
        if not y.requires_grad:
            y.requires_grad_()
        out = BODIES[body](y).sin().sum()
        more = [CAPTURED] if body == "captured" and create_graph else []
        first, *others = torch.autograd.grad(out, [y, *more], create_graph=create_graph)
        return sum((g @ x for g in others), first * x)

    x = torch.linspace(-1.0, 1.0, 5)
    assert_close(to_jax(f)(arrays(x)), f(x.clone().requires_grad_()))
    expected = torch.autograd.functional.jacobian(f, x)
    assert_close(jax.jit(jax.jacrev(to_jax(f)))(arrays(x)), expected, rtol=1e-5)


def test_plain_autograd_inside_recomputes():
    def f(ws, x):
        ws = [w.requires_grad_() for w in ws]
        return torch.autograd.grad(chain(2)(ws, x), ws)

    assert count_dots(to_jax(f), *arrays(weights())) == PLAIN + LAYERS
