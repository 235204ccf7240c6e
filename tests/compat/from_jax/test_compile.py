"""from_jax under torch.compile, make_fx and torch.export: in the graph, or an honest break."""

import gc

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import functx
from functx._errors import LoweringError
from functx.compat import from_jax
from functx.compat._call import program_of

# What Dynamo warns of is its own business.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(f, **options):
    return torch.compile(f, backend="aot_eager", **options)


def test_structures_numbers_and_none_are_in_the_graph():
    def g(tree, scale, *, shift=None, mode="double", n=1):
        factor = 2 if mode == "double" else 1
        y = tree["x"] * scale * factor * n
        return {"a": y if shift is None else y + shift, "b": [tree["y"]]}

    f = from_jax(g, static_argnames="n")
    run = compiled(lambda tree: f(tree, 3.0, shift=None, n=2)["a"] + 1, fullgraph=True)
    assert run({"x": torch.ones(2), "y": torch.ones(3)}).tolist() == [13, 13]


def test_each_shape_and_number_is_a_signature():
    f = from_jax(lambda x, s: x.sum() * s * jnp.ones(x.shape))
    run = compiled(lambda x, s: f(x, s) * 2, dynamic=True)
    for n in range(2, 5):
        for s in (n / 2, n):
            assert run(torch.ones(n), s).tolist() == [2.0 * n * s] * n


@pytest.mark.parametrize("where", ["argument", "closure"])
def test_a_key_breaks_the_graph(where):
    key = jax.random.key(0)
    f = from_jax(lambda key, x: x * jax.random.normal(key, x.shape))
    x = torch.ones(3, requires_grad=True)
    if where == "argument":
        y = compiled(lambda key, x: f(key, x) * 1)(key, x)
    else:
        y = compiled(lambda x: f(key, x) * 1)(x)
    y.sum().backward()
    assert torch.equal(y, f(key, x))
    assert torch.equal(x.grad, f(key, torch.ones(3)))


# Slow: inductor writes and compiles C++.
def test_inductor_compiles_forward_and_backward():
    def make():
        f = from_jax(lambda x: jnp.sin(x))
        return torch.compile(lambda x: 2 * f(x), fullgraph=True)

    compiled = make()
    gc.collect()  # the graph keeps the function
    x = torch.ones(2, requires_grad=True)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.cos(x.detach()))


def test_a_transform_of_it_compiles():
    f = from_jax(lambda w, x: (w * x**2).sum())
    w, x = torch.ones(3), torch.randn(4, 3)
    expected = x.square()
    for t in (torch.func, functx):
        per_example = t.vmap(t.grad(f), (None, 0))
        torch.testing.assert_close(compiled(lambda w, x: per_example(w, x))(w, x), expected)  # noqa: B023


def test_it_is_a_call_in_traced_and_exported_graphs():
    f = from_jax(jnp.sin)
    graph = make_fx(torch.func.grad(lambda x: f(x).sum()))(torch.ones(3))
    assert "functx.jax_call" in graph.code
    torch.testing.assert_close(graph(torch.zeros(3)), torch.ones(3))

    class Net(torch.nn.Module):
        def forward(self, x):
            return f(x) * 2

    exported = torch.export.export(Net(), (torch.ones(3),))
    torch.testing.assert_close(exported.module()(torch.zeros(3)), torch.zeros(3))


def test_a_graph_of_another_process_is_refused():
    with pytest.raises(LoweringError, match=r"not in this process.*saved and loaded"):
        program_of("sin 0123456789abcdef")
