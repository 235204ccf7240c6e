"""Gradients of chunks by torch.compile: those of eager, or a warning and eager."""

import threading
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from references import assert_same
from torch import nn
from torch.nn import functional as F

import functx
from functx import per_sample
from functx.per_sample import _compiled


class Graphs:
    """A backend that runs graphs as they are, and counts what was made and run."""

    def __init__(self):
        self.made = self.ran = 0

    def __call__(self, graph, inputs):
        self.made += 1

        def run(*args):
            self.ran += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


@contextmanager
def without_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compile=True")
        yield


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3))


PAIR = (network(), F.cross_entropy)
X, Y = torch.randn(10, 5), torch.arange(10) % 3


def of_dicts(params, shared, batch, *, power=2):
    value = (torch.tanh(batch["x"] @ params["w"] + shared) ** power).sum() + params["b"].sum()
    return value, {"x": batch["x"].sum(), "y": batch["y"]}


DICTS = (
    {"w": torch.randn(5, 2), "b": torch.randn(2)},
    torch.randn(2),
    {"y": Y, "x": X},
)
OF_DICTS = {"has_aux": True, "in_dims": (None, None, 0), "argnums": (0, 1)}
KINDS = {
    "clipped_sum": (per_sample.clipped_sum, PAIR, (X, Y), {"max_norm": 0.1, "return_norms": True}),
    "passes": (per_sample.clipped_sum, PAIR, (X, Y), {"max_norm": 0.1, "passes": 2}),
    "norms": (per_sample.norms, PAIR, (X, Y), {"return_values": True}),
    "grads": (per_sample.grads, of_dicts, DICTS, OF_DICTS),
    "groups": (
        per_sample.clipped_sum,
        of_dicts,
        DICTS,
        {**OF_DICTS, "max_norm": ({"w": 0.1, "b": 1.0}, 0.5), "return_values": True},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_as_in_eager(graphs, kind):
    make, func, args, options = KINDS[kind]
    eager = make(func, chunk_size=4, **options)(*args)
    compiled = make(func, chunk_size=4, compile={"backend": graphs}, **options)
    for calls in range(3):
        assert_same(compiled(*args), eager, eps=64)
        # Two chunks of four; what is left over is not worth a graph. The first one of all may look
        # for factors.
        if kind != "passes":
            assert graphs.made == 1
            assert graphs.ran in (2 * calls + 2, 2 * calls + 1)


def test_few_shapes_are_compiled(graphs, monkeypatch):
    monkeypatch.setattr(_compiled, "_SHAPES", 2)
    f = per_sample.grads(lambda w, x: (w * x).sin().sum(), compile={"backend": graphs})
    w = torch.randn(())
    for length in (1, 2, 1, 3, 4, 2):
        x = X[:, :length]
        with pytest.warns(RuntimeWarning, match="pad them") if length == 3 else nullcontext():
            assert_same(f(w, x), (torch.cos(w * x) * x).sum(1), eps=16)
    assert (graphs.made, graphs.ran) == (2, 4)


@pytest.mark.sweep
def test_inductor_is_the_default(graphs):
    w = torch.randn(6)
    f = per_sample.grads(lambda w, x: (w * x).sin().sum(), chunk_size=2, compile=True)
    x = torch.randn(4, 6)
    assert_same(f(w, x), torch.cos(w * x) * x, eps=16)
    assert torch._dynamo.utils.counters["inductor"]


class Bounded(torch.autograd.Function):
    """The compiler differentiates its forward, and passes its backward over."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)


def test_backwards_of_their_own_run_in_eager(graphs):
    def loss(w, x):
        return (Bounded.apply(w) * x).sum()

    f = per_sample.grads(loss, chunk_size=5, compile={"backend": graphs})
    few = X.clamp(-1, 1)
    with pytest.warns(RuntimeWarning, match="backward of its own"):
        assert_same(f(torch.ones(5), few), few, eps=2)
    ran = graphs.ran
    assert_same(f(torch.ones(5), 3 * few), (3 * few).clamp(-1, 1), eps=2)
    assert graphs.ran == ran


class Straight(torch.autograd.Function):
    """Rounds, and passes gradients on: forward and backward agree for small numbers only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clamp(-1, 1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def by_grad(w, x):
    """A loss, ``(w * w).sum()``, on whose tape the Function inside is not."""
    return torch.func.grad(lambda x: (Straight.apply(x) * w).sum())(x).square().sum()


def by_vjp(w, x):
    return torch.func.vjp(Straight.apply, x)[1](w)[0].square().sum()


def by_jacrev(w, x):
    return (w @ torch.func.jacrev(lambda x: Straight.apply(x))(x)).square().sum()


@pytest.mark.parametrize("loss", [by_grad, by_vjp, by_jacrev])
def test_backwards_of_their_own_in_transforms_inside(graphs, loss):
    w = torch.randn(5)
    f = per_sample.grads(loss, chunk_size=5, compile={"backend": graphs})
    with pytest.warns(RuntimeWarning, match="backward of its own"):
        assert_same(f(w, 1e-3 * X), (2 * w).expand(10, 5), eps=4)
    assert_same(f(w, 100 * X), (2 * w).expand(10, 5), eps=4)


def test_no_thread_runs_a_graph_before_its_check_has_ended(graphs):
    checking, done = threading.Event(), threading.Event()

    def loss(w, x):
        if not torch.compiler.is_compiling() and not checking.is_set():
            checking.set()
            done.wait(0.5)  # for the other one, which has to wait for this one
        return by_grad(w, x)

    f = per_sample.grads(loss, chunk_size=5, compile={"backend": graphs})
    w = torch.randn(5)
    results = []

    def call():
        results.append(f(w, 100 * X))

    def both():
        first = threading.Thread(target=call)
        first.start()
        assert checking.wait(60)
        call()
        done.set()
        first.join()

    with pytest.warns(RuntimeWarning, match="backward of its own"):
        both()
    assert len(results) == 2
    for found in results:
        assert_same(found, (2 * w).expand(10, 5), eps=4)


def test_what_is_other_compiled_runs_in_eager(graphs):
    def wrong(graph, inputs):
        def run(*args):
            first, *others = graph.forward(*args)
            return 2 * first, *others

        return run

    f = per_sample.grads(lambda w, x: (w * x).sin().sum(), chunk_size=5, compile={"backend": wrong})
    with pytest.warns(RuntimeWarning, match="gradients are others than in eager|other values"):
        assert_same(f(torch.ones(5), X), torch.cos(X) * X, eps=16)


def test_hooks_on_tensors(graphs):
    def loss(w, x):
        h = w * x
        h.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return (h * x).sum()

    f = per_sample.grads(loss, chunk_size=5, compile={"backend": graphs})
    few = X.clamp(-1, 1)
    for x in (few, 3 * few):
        assert_same(f(torch.ones(5), x), x * x.clamp(-1, 1), eps=2)


def test_what_it_can_not_compile_runs_in_eager(graphs):
    def loss(w, x):
        torch._dynamo.graph_break()
        return (w * x).sum()

    f = per_sample.grads(loss, chunk_size=5, compile={"backend": graphs})
    with pytest.warns(RuntimeWarning, match="compile=True has no effect here"):
        assert_same(f(torch.ones(5), X), X)


def test_errors_of_the_loss_are_its_own(graphs):
    f = per_sample.grads(lambda w, x: w * x, chunk_size=5, compile={"backend": graphs})
    with without_warnings(), pytest.raises(RuntimeError, match="scalar"):
        f(torch.ones(5), X)


def test_after_an_error_of_the_caller_it_still_compiles(graphs, monkeypatch):
    monkeypatch.setattr(_compiled, "_SHAPES", 2)
    f = per_sample.grads(
        lambda w, x: (w * x).sin().sum(), chunk_size=5, compile={"backend": graphs}
    )
    w = torch.randn(5)
    for calls in range(2):
        with without_warnings():
            assert_same(f(w, X), torch.cos(w * X) * X, eps=16)
            assert (graphs.made, graphs.ran) == (1, 2 * calls + 2)
            for length in (6, 7, 8):  # nor do they count as shapes
                with pytest.raises(RuntimeError, match="size"):
                    f(w, torch.randn(10, length))


def test_a_graph_whose_check_was_interrupted_is_made_again(graphs):
    stop = [True]

    def loss(w, x):
        if not torch.compiler.is_compiling() and stop:
            stop.clear()
            raise KeyboardInterrupt
        return by_grad(w, x)

    f = per_sample.grads(loss, chunk_size=5, compile={"backend": graphs})
    w = torch.randn(5)
    with pytest.raises(KeyboardInterrupt):
        f(w, 100 * X)
    with pytest.warns(RuntimeWarning, match="backward of its own"):
        assert_same(f(w, 100 * X), (2 * w).expand(10, 5), eps=4)


def test_what_the_loss_closes_over_may_change(graphs):
    settings, net = {"scale": 2.0}, network()

    def criterion(scores, target):
        return settings["scale"] * F.cross_entropy(scores, target)

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


def test_statistics_of_the_batch_are_refused_later_too(graphs):
    net = nn.Sequential(nn.Linear(5, 3), nn.Identity())
    f = per_sample.grads((net, F.cross_entropy), chunk_size=5, compile={"backend": graphs})
    f(X, Y)
    assert graphs.ran == 2
    net[1] = nn.BatchNorm1d(3)
    with without_warnings(), pytest.raises(ValueError, match="statistics of the batch"):
        f(X, Y)


def test_eager_where_something_else_looks_on(graphs):
    w = torch.randn(5)

    def loss(w, x):
        return (w * x).sin().sum()

    f = per_sample.grads(loss, chunk_size=5, compile={"backend": graphs})
    expected = torch.cos(w * X) * X
    peak = functx.memory.peak(lambda: f(w, X))
    assert peak == functx.memory.peak(lambda: per_sample.grads(loss, chunk_size=5)(w, X))
    asked = w.clone().requires_grad_()
    found = f(asked, X)
    assert_same(found.detach(), expected, eps=16)
    assert_same(torch.autograd.grad(found.sum(), asked)[0], (-torch.sin(w * X) * X**2).sum(0), 64)
    assert graphs.ran == 0
    assert_same(f(w, X), expected, eps=16)
    assert graphs.ran == 2


def test_random_numbers_run_in_eager(graphs):
    net = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5))
    options = {"chunk_size": 5, "randomness": "different"}
    torch.manual_seed(0)
    expected = per_sample.grads((net, F.cross_entropy), **options)(X, Y)
    torch.manual_seed(0)
    f = per_sample.grads((net, F.cross_entropy), compile={"backend": graphs}, **options)
    assert_same(f(X, Y), expected)
    assert graphs.made == 0


def test_regions_inside(graphs):
    net = functx.apply_remat(network(), "0")
    eager = per_sample.grads((net, F.cross_entropy), chunk_size=5)(X, Y)
    f = per_sample.grads((net, F.cross_entropy), chunk_size=5, compile={"backend": graphs})
    with pytest.warns(RuntimeWarning, match="compile=True"):
        assert_same(f(X, Y), eager, eps=64)


def test_arguments():
    with pytest.raises(TypeError, match="compile must be True or a dict"):
        per_sample.grads(of_dicts, compile="inductor")
    with pytest.raises(ValueError, match="give chunk_size with compile"):
        per_sample.norms(PAIR, compile=True, memory_budget=10**9)
