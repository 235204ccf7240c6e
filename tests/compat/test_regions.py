"""A remat region is ``jax.checkpoint`` at the same cut, and its recompute survives XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import fx

import functx
from functx._errors import LoweringError
from functx.compat import to_jax
from functx.compat._lowering._graph import is_region
from functx.compat._lowering._interpret import Interpreter

from .networks import arrays, assert_close, count_dots

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


@pytest.mark.parametrize("segment", [0, 1, 2, 3, 6])
def test_products_of_the_gradient_taken_by_jax(segment):
    args = arrays(weights())
    recomputed = LAYERS if segment else 0
    assert count_dots(jax.grad(to_jax(chain(segment))), *args) == PLAIN + recomputed


@pytest.mark.parametrize("segment", [0, 1, 2, 3, 6])
def test_products_of_the_gradient_taken_inside(segment):
    args = arrays(weights())
    recomputed = LAYERS if segment else 0
    assert count_dots(to_jax(functx.grad(chain(segment))), *args) == PLAIN + recomputed


def test_the_count_can_fail():
    """Without the option XLA's CPU compiler merges the recompute, up to JAX 0.11.0; it is seen."""
    args = arrays(weights())
    f = jax.grad(to_jax(chain(2)))
    merged = count_dots(f, *args, barriers=False)
    assert merged == PLAIN + (LAYERS if jax.__version_info__ >= (0, 11, 1) else 0)
    assert count_dots(f, *args) == PLAIN + LAYERS
    assert count_dots(jax.jit(jax.grad(to_jax(chain(0)))), *args) == PLAIN


@pytest.mark.parametrize("segment", [1, 2, 6])
def test_values(segment):
    args = weights()
    expected = torch.func.grad(chain(0))(*args)
    assert_close(jax.grad(to_jax(chain(segment)))(*arrays(args)), expected)
    assert_close(to_jax(functx.grad(chain(segment)))(*arrays(args)), expected)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: functx.vmap(functx.grad(lambda x, w: f(x, w).sum()), (0, None)),
        lambda f: functx.vmap(f, (0, None)),
        lambda f: lambda x, w: functx.jvp(lambda x: f(x, w), (x,), (x,))[1],
        lambda f: functx.jacrev(f),
    ],
)
def test_under_transforms_inside(transform):
    x, w = torch.randn(3, 4), torch.randn(4, 4)

    def f(x, w):
        return torch.tanh(torch.sin(x @ w) @ w)

    expected = transform(f)(x, w)
    assert_close(to_jax(transform(functx.remat(f)))(arrays(x), arrays(w)), expected, rtol=1e-5)


def test_second_derivative_of_a_region():
    def f(x):
        return torch.tanh(x * x).sum()

    x = torch.linspace(0.1, 1, 4)
    expected = torch.func.hessian(f)(x)
    regional = functx.remat(f)
    assert_close(jax.hessian(to_jax(regional))(arrays(x)), expected, rtol=1e-5)
    assert_close(jax.jacrev(to_jax(functx.grad(regional)))(arrays(x)), expected, rtol=1e-5)


def test_derivative_of_a_transform_in_a_region():
    """What the engine detaches to run a region again stops no gradient."""

    def f(x):
        return (torch.sin(x) * x).sum()

    x = torch.linspace(0.1, 1, 4)
    expected = torch.func.hessian(f)(x)
    for g in (functx.remat(functx.grad(f)), functx.remat(lambda x: functx.grad(f)(x * 1))):
        assert_close(jax.jacrev(to_jax(g))(arrays(x)), expected, rtol=1e-5)


def test_captures_of_a_region_are_operands():
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


def test_nested_regions():
    inner = functx.remat(lambda x: torch.sin(torch.cos(x)))
    outer = functx.remat(lambda x: torch.tanh(inner(inner(x))))
    x = torch.linspace(-1, 1, 4)

    def plain(x):
        return torch.tanh(torch.sin(torch.cos(torch.sin(torch.cos(x)))))

    got = jax.jacrev(to_jax(outer))(arrays(x))
    assert_close(got, torch.func.jacrev(plain)(x), rtol=1e-5)


def _hand_made():
    """A graph with one region that holds one region, as the engine would leave it."""
    inner = fx.Graph()
    inner.output((_call(inner, torch.ops.aten.sin.default, inner.placeholder("x")),))
    middle = fx.Graph()
    x = middle.placeholder("x")
    node = _region(middle, x)
    middle.output((_call(middle, torch.ops.aten.cos.default, _first(middle, node)),))
    body = fx.GraphModule({"region": fx.GraphModule({}, inner)}, middle)
    graph = fx.Graph()
    node = _region(graph, graph.placeholder("x"))
    graph.output([_first(graph, node)])
    return fx.GraphModule({"region": body}, graph)


def _call(graph, op, *args):
    node = graph.call_function(op, args)
    node.meta["val"] = torch.empty(3, device="meta")
    return node


def _region(graph, x):
    return graph.call_function(lambda module, *xs: module(*xs), (graph.get_attr("region"), x))


def _first(graph, node):
    import operator

    return graph.call_function(operator.getitem, (node, 0))


def test_hand_made_nested_regions():
    module = _hand_made()
    assert sum(is_region(n) for n in module.graph.nodes) == 1
    x = jnp.ones(3)
    seen = []

    def observe(operands, name):
        seen.append(len(operands))
        return operands

    (out,) = Interpreter(observe).run(module, [x])
    np.testing.assert_allclose(out, np.cos(np.sin(np.ones(3))), rtol=1e-6)
    assert seen == [1]  # the outermost only
    jaxpr = str(jax.make_jaxpr(lambda x: Interpreter().run(module, [x]))(x))
    assert jaxpr.count("checkpoint") + jaxpr.count("remat") >= 2


def writes(x, b):
    def body(x):
        b.mul_(2.0)
        factors = torch.tensor([1.0, 2.0, 3.0, 4.0])
        factors.add_(1.0)
        return (x * b * factors).sum()

    return functx.remat(body)(x), b * 1


def writes_in_a_nest(x, b):
    b = b.clone()

    def body(x):
        def inner(x):
            b.mul_(2.0)
            return x * b

        return functx.remat(inner)(x).sum()

    return functx.remat(body)(x), b * 1


@pytest.mark.parametrize("f", [writes, writes_in_a_nest])
@pytest.mark.filterwarnings("ignore:the function writes to")
def test_what_a_region_writes_is_written_once(f):
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
