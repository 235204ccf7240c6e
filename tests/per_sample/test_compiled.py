"""Gradients of chunks by `functx.jit`: those of eager, or a warning and eager."""

import functools
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from cases import custom_function, numbers
from references import assert_same, count
from torch import nn
from torch.nn import functional as F

import functx
from functx import per_sample
from functx.per_sample import _chunk_gradients


class Graphs:
    """A backend that runs graphs as they are, and counts what was made and run."""

    def __init__(self):
        self.made = self.ran = 0
        self.operations = Counter()

    def __call__(self, graph, inputs):
        self.made += 1
        self.operations.update(str(node.target) for node in graph.graph.nodes)

        def run(*args):
            self.ran += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3))


PAIR = (network(), F.cross_entropy)
X, Y = torch.randn(10, 5), torch.arange(10) % 3


def of_dicts(params, shared, batch, *, power=2):
    value = (torch.tanh(batch["x"] @ params["w"] + shared) ** power).sum() + params["b"].sum()
    return value, {"x": batch["x"].sum(), "y": batch["y"]}


DICTS = ({"w": torch.randn(5, 2), "b": torch.randn(2)}, torch.randn(2), {"y": Y, "x": X})
OF_DICTS = {"has_aux": True, "in_dims": (None, None, 0), "argnums": (0, 1)}
bounded = custom_function(
    lambda x: x.clone(), lambda ctx, g: g.clamp(-1, 1), lambda ctx, inputs, output: None
)


def hooked(w, x):
    h = w * x
    h.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return (h * x).sum()


W = torch.full((5,), 0.5)
KINDS = {
    "clipped_sum": (per_sample.clipped_sum, PAIR, (X, Y), {"max_norm": 0.1, "return_norms": True}),
    "norms": (per_sample.norms, PAIR, (X, Y), {"return_values": True}),
    "groups": (
        per_sample.clipped_sum,
        of_dicts,
        DICTS,
        {**OF_DICTS, "max_norm": ({"w": 0.1, "b": 1.0}, 0.5), "return_values": True},
    ),
    "own backward": (per_sample.grads, lambda w, x: (bounded(w) * x).sum(), (W, 3 * X), {}),
    # Also in a transform inside, on whose tape the Function is not.
    "own backward inside": (
        per_sample.grads,
        lambda w, x: functx.grad(lambda x: (bounded(x) * w).sum())(x).square().sum(),
        *((4 * W * X[0], X), {}),
    ),
    "hook on a tensor": (per_sample.grads, hooked, (W, 3 * X), {}),
    "random numbers": (
        per_sample.grads,
        lambda w, x: (F.dropout(w * x, 0.5) ** 2).sum(),
        *((W, X), {"randomness": "different"}),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_eager(graphs, kind):
    make, func, args, options = KINDS[kind]
    eager = make(func, chunk_size=4, **options)
    compiled = make(func, chunk_size=4, compile={"backend": graphs}, **options)
    for calls in range(3):
        found = []
        for f in (compiled, eager):
            torch.manual_seed(calls)
            found.append(f(*args))
        assert_same(*found, eps=64)
        # Two chunks of four; what is left over is not worth a graph. The first one of all may look
        # for factors.
        assert graphs.made == 1
        assert graphs.ran in (2 * calls + 2, 2 * calls + 1)


def test_few_shapes_are_compiled(graphs, monkeypatch):
    monkeypatch.setattr(_chunk_gradients, "_SHAPES", 2)
    f = per_sample.grads(lambda w, x: (w * x).sin().sum(), compile={"backend": graphs})
    w = torch.randn(())
    for length in (1, 2, 1, 3, 4, 2):
        x = X[:, :length]
        with pytest.warns(RuntimeWarning, match="pad them") if length == 3 else nullcontext():
            assert_same(f(w, x), (torch.cos(w * x) * x).sum(1), eps=16)
    assert (graphs.made, graphs.ran) == (2, 4)


def test_regions_stay_recomputed(graphs):
    weights, x = [numbers(8, 8, start=float(i)) for i in range(4)], numbers(3, 8)
    layer = functx.remat(lambda x, w: torch.tanh(x @ w))
    loss = lambda x: functools.reduce(layer, weights, x).sum()
    eager = per_sample.grads(loss, in_dims=0)
    compiled = per_sample.grads(loss, in_dims=0, compile={"backend": graphs})
    assert_same(compiled(x), eager(x), eps=64)
    assert graphs.operations["aten.tanh.default"] == count(eager, x)["tanh"] == 8


def test_what_can_not_be_traced_runs_in_eager(graphs):
    loss = lambda w, x: (w * x).sum() if w.sum() > 0 else w.sum()
    f = per_sample.grads(loss, chunk_size=5, compile={"backend": graphs})
    with pytest.warns(RuntimeWarning, match="compile=True has no effect here.*value of a tensor"):
        assert_same(f(torch.ones(5), X), X)
    assert graphs.made == 0


# Four graphs are compiled.
def test_what_the_loss_closes_over_may_change(graphs):
    settings, net = {"scale": 2.0}, network()
    criterion = lambda scores, target: settings["scale"] * F.cross_entropy(scores, target)
    f = per_sample.grads((net, criterion), chunk_size=5, compile={"backend": graphs})
    eager = per_sample.grads((net, criterion), chunk_size=5)
    for change in (
        lambda: None,
        lambda: settings.update(scale=3.0),
        lambda: net[1].register_forward_hook(lambda module, args, out: out * 2),
        lambda: net[3].weight.requires_grad_(False),
    ):
        change()
        made = graphs.made
        assert_same(f(X, Y), eager(X, Y), eps=64)
        assert graphs.made > made


def test_eager_where_something_else_looks_on(graphs):
    w = torch.randn(5)
    loss = lambda w, x: (w * x).sin().sum()
    f = per_sample.grads(loss, chunk_size=5, compile={"backend": graphs})
    expected = torch.cos(w * X) * X
    asked = w.clone().requires_grad_()
    found = f(asked, X)
    assert_same(found.detach(), expected, eps=16)
    assert_same(torch.autograd.grad(found.sum(), asked)[0], (-torch.sin(w * X) * X**2).sum(0), 64)
    assert count(f, w, X)["cos"] == 2  # each operation of both chunks
    assert graphs.ran == 0
    assert_same(f(w, X), expected, eps=16)
    assert graphs.ran == 2


def test_a_clipped_sum_is_compiled_from_its_first_call_on():
    graphs = []
    backend = lambda module, _: graphs.append(module) or module
    loss = lambda w, x: (w * x).sin().sum()
    clipped = per_sample.clipped_sum(loss, max_norm=1.0, compile={"backend": backend})
    w, x = numbers(3), numbers(8, 3)
    expected = per_sample.clipped_sum(loss, max_norm=1.0)(w, x)
    assert_same(clipped(w, x), expected, eps=16)
    assert len(graphs) == 1
