"""Chunks: memory that runs out, budgets, random numbers, transforms around, and bytes."""

import functools
import gc
import os
import warnings

import pytest
import torch
from cases import DTYPE, deep_mlp, dense, numbers
from references import assert_same, count, peak
from torch.utils._python_dispatch import TorchDispatchMode

import functx
from functx import memory, per_sample

from .losses import slow, slow_norms, slow_sum

B = 8
W, X = numbers(3), numbers(B, 3, start=1.0)


def loss(w, x):
    return (w * x).sin().sum()


class RunsOut(TorchDispatchMode):
    """Memory runs out at one operation, counted from 1, or at a sine of too many examples."""

    def __init__(self, at=0, most=B, error=None):
        super().__init__()
        self.at, self.most, self.count, self.sizes = at, most, 0, []
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count, size = self.count + 1, 0
        if func is torch.ops.aten.sin.default:
            size = len(args[0]) if args[0].dim() == 2 else 1
            self.sizes.append(size)
        if self.count == self.at or size > self.most:
            raise self.error
        return func(*args, **(kwargs or {}))


class TestOutOfMemory:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory: you "
                "tried to allocate 1 bytes."
            ),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"),
        ],
        ids=["cuda", "cpu", "cpu, posix"],
    )
    def test_the_chunk_is_halved_and_remembered(self, error):
        f = per_sample.clipped_sum(loss, max_norm=0.5, return_norms=True)
        expected = f(W, X)
        with (
            pytest.warns(RuntimeWarning, match="out of memory with") as caught,
            RunsOut(most=3, error=error) as limited,
        ):
            found = f(W, X)
        assert limited.sizes == [8, 4, 2, 2, 2, 2]
        assert_same((found[0], found[1].norms), (expected[0], expected[1].norms), eps=8)
        for warning, size in zip(caught, (8, 4), strict=True):
            assert f"out of memory with {size} examples at a time" in str(warning.message)
            assert os.path.basename(warning.filename) == os.path.basename(__file__)
        with RunsOut(most=3) as limited:
            f(W, X)  # it remembers, and does not warn again
        assert limited.sizes == [2, 2, 2, 2]

    def test_one_example_that_does_not_fit_raises(self):
        limited = RunsOut(most=0)
        with pytest.raises(torch.OutOfMemoryError), pytest.warns(RuntimeWarning), limited:
            per_sample.norms(loss)(W, X)
        assert limited.sizes == [8, 4, 2, 1]

    def test_a_sum_that_cannot_be_undone_is_an_error(self, monkeypatch):
        def fails(self, *args):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(per_sample._sums.WeightedSum, "add", fails)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            per_sample.clipped_sum(loss, max_norm=1.0)(W, X)
        assert "can't be undone" in caught.value.__notes__[0]


class TestBudget:
    @pytest.mark.parametrize(
        "make",
        ["clipped_sum", "norms", "grads", "jacobian", "map_reduce", "gram", "gram of others"],
    )
    def test_it_is_kept_and_used(self, make):
        weights, x, loss = deep_mlp(layers=6, batch=16, width=24)
        scores = lambda w, x: dense(w, x)[:4]
        function = {"jacobian": scores, "gram": scores, "map_reduce": functx.grad(loss)}
        options = {"clipped_sum": {"max_norm": 1.0}, "map_reduce": {"in_dims": (None, 0)}}
        make, _, others = make.partition(" of ")
        f = functools.partial(
            getattr(per_sample, make), function.get(make, loss), **options.get(make, {})
        )
        more = {"others": x[:7].sin()} if others else {}
        whole, least = (peak(f(chunk_size=size), weights, x, **more) for size in (16, 1))
        for budget in (whole, (whole + 3 * least) // 4):
            limited = f(budget=budget)
            limited(weights, x, **more)  # measures
            used = memory.peak(limited, weights, x, **more)
            assert 0.5 * budget < used <= budget
        assert_same(limited(weights, x, **more), f()(weights, x, **more), eps=64)

    def test_it_may_be_a_text_or_a_share_of_all_at_once(self):
        weights, x, loss = deep_mlp(layers=6, batch=16, width=24)
        whole = memory.peak(per_sample.grads(loss), weights, x)
        for budget, allowed in ((f"{whole / 2048:.3f}KiB", whole / 2), (0.75, 0.75 * whole)):
            limited = per_sample.norms(loss, budget=budget)
            limited(weights, x)  # measures
            assert memory.peak(limited, weights, x) <= allowed

    @pytest.mark.parametrize("outputs", ["full", "trace"])
    def test_a_share_of_a_gram_matrix_is_one_of_a_single_jacobian(self, outputs):
        """Where it is that of the examples with themselves, the other one is not computed."""
        weights, x, _ = deep_mlp(layers=3, batch=16, width=24)
        f = functools.partial(per_sample.gram, lambda w, x: dense(w, x)[:4], outputs=outputs)
        limited = f(budget=0.6)
        assert_same(limited(weights, x), f()(weights, x), eps=64)
        assert memory.peak(limited, weights, x) <= 0.6 * memory.peak(f(), weights, x)

    def test_it_holds_where_an_example_would_be_left_over(self):
        loss = lambda w, x: (w @ x).sin().sum()  # norms by factors, but of one example alone
        w, x = numbers(64, 48), numbers(10, 48, start=1.0)
        for size in range(2, 10):
            budget = peak(per_sample.norms(loss, chunk_size=size), w, x[: size * (10 // size)])
            limited = per_sample.norms(loss, budget=budget)
            limited(w, x)  # measures
            assert memory.peak(limited, w, x) <= budget

    def test_too_small_a_budget_is_an_error(self):
        message = r"budget=10 bytes is too little.*functx\.remat"
        with pytest.raises(ValueError, match=message):
            per_sample.grads(loss, budget=10)(W, X)

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"chunk_size": 0}, ValueError, "chunk_size should be greater than 0, got 0"),
            ({"chunk_size": 2.0}, TypeError, "chunk_size must be an int, got 2.0"),
            ({"budget": -1}, ValueError, "budget must be positive"),
            ({"budget": 1, "chunk_size": 1}, ValueError, "either chunk_size or budget"),
            ({"randomness": "some"}, RuntimeError, "randomness must be"),
            ({"argnums": "w"}, RuntimeError, "argnums must be"),
            ({"compile": "inductor"}, TypeError, "compile must be True or a dict"),
            ({"compile": True, "budget": 9}, ValueError, "pass chunk_size instead"),
        ],
    )
    def test_options_that_make_no_sense_are_an_error(self, options, error, match):
        with pytest.raises(error, match=match):
            per_sample.grads(loss, **options)


def noisy(w, x, generator=None):
    return (w * torch.randn(3, generator=generator, dtype=DTYPE) * x / x).sum()


@pytest.mark.parametrize("chunk_size", [None, 3, 1])
class TestRandomness:
    @pytest.mark.parametrize("generator", [None, torch.Generator()])
    def test_error_is_the_default(self, chunk_size, generator):
        f = functools.partial(noisy, generator=generator)
        with pytest.raises(RuntimeError, match="random") as caught:
            per_sample.grads(f, chunk_size=chunk_size)(W, X)
        if chunk_size != 1:
            assert "per_sample: pass randomness='different'" in caught.value.__notes__[0]

    def test_different_draws_for_each_example(self, chunk_size):
        f = per_sample.grads(noisy, randomness="different", chunk_size=chunk_size)
        assert len({row[0].item() for row in f(W, X)}) == B

    def test_same_draws_once(self, chunk_size):
        f = per_sample.grads(noisy, randomness="same", chunk_size=chunk_size)
        torch.manual_seed(5)
        rows = f(W, X)
        torch.manual_seed(5)
        assert_same(rows, torch.randn(3, dtype=DTYPE).expand(B, 3), eps=2)


class TestCompositions:
    def reference(self, w, x, scale=1.0):
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x) * scale
        return (0.5 / gradients.square().sum(1).sqrt()).clamp(max=1) @ gradients

    @pytest.mark.parametrize(
        ("library", "chunk_size"),
        [(torch.func, None), (torch.func, 3), (functx, 1), (functx, None)],
    )
    def test_it_works_inside_transforms(self, library, chunk_size):
        f = per_sample.clipped_sum(loss, max_norm=0.5, chunk_size=chunk_size)
        v = numbers(3, start=3.0)
        for transformed in (
            lambda f: library.grad(lambda w: f(w, X).square().sum())(W),
            lambda f: library.jacrev(f)(W, X),
            lambda f: library.jvp(lambda w: f(w, X), (W,), (v,)),
            lambda f: library.vmap(f, (0, None))(torch.stack([W, v]), X),
            lambda f: library.vmap(f, (None, 0))(W, torch.stack([X, X.sin()])),
            lambda f: library.vmap(library.grad(lambda w: f(w, X).sum()))(torch.stack([W, v])),
        ):
            assert_same(transformed(f), transformed(self.reference), eps=64)

    @pytest.mark.parametrize("chunk_size", [None, 1, 3])
    def test_plain_autograd_follows_also_to_a_closure(self, chunk_size):
        w, scale = W.clone().requires_grad_(), torch.tensor(1.5, dtype=DTYPE, requires_grad=True)
        f = per_sample.clipped_sum(
            lambda w, x: loss(w, x) * scale, max_norm=0.5, chunk_size=chunk_size
        )
        ours, theirs = (
            torch.autograd.grad(total.square().sum(), (w, scale))
            for total in (f(w, X), self.reference(w, X, scale))
        )
        assert_same(ours, theirs, eps=64)

    def test_it_can_be_traced(self):
        from torch.fx.experimental.proxy_tensor import make_fx

        f = per_sample.clipped_sum(loss, max_norm=0.5, chunk_size=3)
        graph = make_fx(f)(W, X)
        assert_same(graph(W * 2, X), f(W * 2, X), eps=8)
        with pytest.raises(RuntimeError, match=r"in a trace.*pass chunk_size"):
            make_fx(per_sample.norms(loss, budget=10**9))(W, X)


class TestBytes:
    def setup_method(self):
        self.weights, self.x, self.loss = deep_mlp(layers=8, batch=16, width=48)
        self.masks = [w.sign() for w in self.weights]
        self.one = sum(w.nbytes for w in self.weights)

    def masked(self, weights, x):
        """Nothing in it is a product of a weight: no gradient is known by factors."""
        return self.loss([w * mask for w, mask in zip(weights, self.masks)], x)

    def test_norms_keep_one_leaf_at_a_time(self):
        measured = lambda f: peak(f, self.weights, self.x)
        norms, masked = (measured(per_sample.norms(f)) for f in (self.loss, self.masked))
        everything = measured(per_sample.grads(self.loss))
        assert everything > 16 * self.one
        assert norms < 0.05 * everything
        assert norms < masked < 0.35 * everything

    @torch.no_grad()
    def test_a_chunk_of_one_keeps_one_gradient(self):
        f = per_sample.clipped_sum(self.loss, max_norm=1.0, chunk_size=1)
        assert peak(f, self.weights, self.x) < 2.2 * self.one

    def test_nothing_runs_twice(self):
        for loss in (self.loss, self.masked):
            clipped = per_sample.clipped_sum(loss, max_norm=1.0)
            counts = count(clipped, self.weights, self.x)
            assert counts["tanh"] == counts["tanh_backward"] == 8


SIZE, STEP = 7, 7
PARAMS = [numbers(20, 70, start=0.5) / 7, numbers(3, start=2.0), numbers(70, 30, start=1.0) / 7]
ROWS = numbers(SIZE, 20)


def loss_of_all(p, x):
    h = torch.tanh(x @ p[0])  # known by factors; then a gradient that is not, and a small one
    return ((h * p[0][0]) @ p[2]).sin().sum() + (x[:3] * p[1]).square().sum()


GRADIENTS = slow(loss_of_all, PARAMS, ROWS)
NORMS = slow_norms(GRADIENTS)
LIMIT = NORMS.mean().item()
SUM = slow_sum(GRADIENTS, (LIMIT / NORMS).clamp(max=1))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: per_sample.clipped_sum(
                loss_of_all, max_norm=LIMIT, chunk_size=4, return_norms=True
            ),
            (SUM, (None, NORMS, None)),
        ),
        (lambda: per_sample.norms(loss_of_all, chunk_size=4), (NORMS,)),
        (
            lambda: per_sample.grads(loss_of_all, chunk_size=4, return_norms=True),
            ([torch.stack(leaf) for leaf in zip(*GRADIENTS)], (None, NORMS, None)),
        ),
    ],
    ids=["clipped_sum", "norms", "grads"],
)
def test_at_any_operation_the_chunk_is_halved(make, expected, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # it takes longer than all else here
    with torch.no_grad(), RunsOut(0) as counter:
        make()(PARAMS, ROWS)
    survived = 0
    for at in range(1, counter.count + 1, STEP):
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught, RunsOut(at):
            warnings.simplefilter("always")
            try:
                found = make()(PARAMS, ROWS)
            except torch.OutOfMemoryError:  # around the chunks, where nothing can be halved
                continue
        assert any("out of memory with" in str(w.message) for w in caught)
        total, *extras = found if isinstance(found, tuple) else (found,)
        total = list(total) if isinstance(total, (list, tuple)) else total
        assert_same((total, *map(tuple, extras)), expected, eps=1024)
        survived += 1
    assert survived > 0.9 * counter.count / STEP - 3
