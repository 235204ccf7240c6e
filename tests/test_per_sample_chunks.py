"""Chunks: memory that runs out, budgets, random numbers, transforms around, and bytes."""

import functools
import os

import pytest
import torch
from cases import DTYPE, deep_mlp, numbers
from references import assert_same, count, peak

import functx
from functx import memory, per_sample

B = 8
W, X = numbers(3), numbers(B, 3, start=1.0)


def loss(w, x):
    return (w * x).sin().sum()


class TestOutOfMemory:
    def limited(self, most, error):
        """The loss, for as many examples as fit; and the sizes it was called with."""
        sizes = []

        def with_limit(w, x):
            value = torch._C._functorch.get_unwrapped(x)
            while torch._C._functorch.is_functorch_wrapped_tensor(value):
                value = torch._C._functorch.get_unwrapped(value)
            sizes.append(len(value) if value.dim() == 2 else 1)
            if sizes[-1] > most:
                raise error
            return loss(w, x)

        return with_limit, sizes

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
    def test_halves_the_chunk_and_goes_on(self, error):
        limited, sizes = self.limited(3, error)
        f = per_sample.clipped_sum(limited, max_norm=0.5, return_norms=True)
        with pytest.warns(RuntimeWarning, match="out of memory with") as caught:
            total, extras = f(W, X)
        assert sizes == [8, 4, 2, 2, 2, 2]
        for warning, size in zip(caught, (8, 4), strict=True):
            assert f"out of memory with {size} examples at a time" in str(warning.message)
        assert all(os.path.basename(w.filename) == os.path.basename(__file__) for w in caught)
        expected, same = per_sample.clipped_sum(loss, max_norm=0.5, return_norms=True)(W, X)
        assert_same((total, extras.norms), (expected, same.norms), eps=8)
        sizes.clear()
        f(W, X)  # it remembers, and does not warn again
        assert sizes == [2, 2, 2, 2]

    @pytest.mark.parametrize("make", [per_sample.grads, per_sample.norms])
    def test_in_the_middle_of_a_batch(self, make):
        calls = []

        def fails_once(w, x):
            calls.append(1)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss(w, x)

        with pytest.warns(RuntimeWarning, match="with 4 examples at a time, going on with 2"):
            found = make(fails_once, chunk_size=4)(W, X)
        assert_same(found, make(loss)(W, X), eps=8)

    def test_one_example_that_does_not_fit_raises(self):
        limited, sizes = self.limited(0, torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(torch.OutOfMemoryError), pytest.warns(RuntimeWarning):
            per_sample.norms(limited)(W, X)
        assert sizes == [8, 4, 2, 1]

    @pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU])
    def test_what_vmap_cannot_run_says_how_it_runs(self, layer):
        torch.manual_seed(0)
        pair = (layer(3, 2, batch_first=True).to(DTYPE), lambda out: out[0].square().sum())
        x = numbers(3, 4, 3)
        with pytest.raises(RuntimeError) as caught:
            per_sample.norms(pair)(x)
        assert "chunk_size=1 runs each as it is" in caught.value.__notes__[-1]
        found = per_sample.grads(pair, chunk_size=1)(x)
        for example, row in zip(x, range(3), strict=True):
            value = pair[1](pair[0](example[None]))
            expected = torch.autograd.grad(value, list(pair[0].parameters()))
            assert_same([g[row] for g in found.values()], list(expected), eps=64)

    def test_other_errors_pass(self):
        limited, sizes = self.limited(3, RuntimeError("something else"))
        with pytest.raises(RuntimeError, match="something else"):
            per_sample.norms(limited)(W, X)
        assert sizes == [8]
        with pytest.raises(RuntimeError) as caught:
            per_sample.norms(limited)(W, X)
        assert not hasattr(caught.value, "__notes__")

    def test_one_example_that_cannot_be_added(self, monkeypatch):
        def fails(self, rows, weights):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(per_sample._sums.WeightedSum, "add", fails)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            per_sample.clipped_sum(loss, max_norm=1.0)(W, X)
        assert "can't be undone" in caught.value.__notes__[0]


def network(weights, x):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


class TestBudget:
    @pytest.mark.parametrize("make", ["clipped_sum", "norms", "grads", "jacobian", "map_reduce"])
    def test_is_kept_and_used(self, make):
        weights, x, of_batch = deep_mlp(layers=6, batch=32, width=24)
        makes = {
            "clipped_sum": functools.partial(per_sample.clipped_sum, of_batch, max_norm=1.0),
            "map_reduce": functools.partial(
                per_sample.map_reduce, functx.grad(of_batch), in_dims=(None, 0)
            ),
            "jacobian": functools.partial(
                per_sample.jacobian, lambda weights, x: network(weights, x)[:4]
            ),
        }
        f = makes.get(make) or functools.partial(getattr(per_sample, make), of_batch)
        whole, least = (peak(f(chunk_size=size), weights, x) for size in (32, 1))
        for budget in (whole, (whole + least) // 2, whole // 4 + 3 * least // 4):
            limited = f(memory_budget=budget)
            limited(weights, x)  # measures
            used = memory.peak(limited, weights, x)
            assert 0.5 * budget < used <= budget
        assert_same(limited(weights, x), f()(weights, x), eps=64)

    def test_too_small(self):
        with pytest.raises(
            ValueError, match=r"memory_budget=10 bytes is too little.*functx\.remat"
        ):
            per_sample.grads(loss, memory_budget=10)(W, X)

    def test_measures_once_for_each_shape(self):
        calls = []

        def counted(w, x):
            calls.append(1)
            return loss(w, x)

        f = per_sample.norms(counted, memory_budget=10**9)
        f(W, X)
        first = len(calls)
        f(W, X[:5])
        assert len(calls) == first + 1
        f(W[:2], X[:, :2])
        assert len(calls) == 2 * first + 1

    def test_measuring_draws_no_random_numbers(self):
        def noisy(w, x):
            return loss(w, x + torch.randn_like(x))

        torch.manual_seed(1)
        plain = per_sample.norms(noisy, randomness="different")(W, X)
        torch.manual_seed(1)
        budget = per_sample.norms(noisy, randomness="different", memory_budget=10**9)
        assert_same(budget(W, X), plain)

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"chunk_size": 0}, ValueError, "chunk_size should be greater than 0, got 0"),
            ({"chunk_size": 2.0}, TypeError, "chunk_size must be an int, got 2.0"),
            ({"memory_budget": -1}, ValueError, "memory_budget should be greater than 0"),
            ({"memory_budget": 1, "chunk_size": 1}, ValueError, "exclude each other"),
            ({"randomness": "some"}, RuntimeError, "randomness must be"),
            ({"argnums": "w"}, RuntimeError, "argnums must be int"),
        ],
    )
    def test_options(self, options, error, match):
        with pytest.raises(error, match=match):
            per_sample.grads(loss, **options)


class TestRandomness:
    def noisy(self, w, x):
        return (w * torch.randn_like(x)).sum()

    @pytest.mark.parametrize("chunk_size", [None, 3, 1])
    def test_error(self, chunk_size):
        with pytest.raises(RuntimeError, match="random"):
            per_sample.grads(self.noisy, chunk_size=chunk_size)(W, X)

    @pytest.mark.parametrize("chunk_size", [None, 1])
    def test_error_also_for_a_generator_that_is_handed_over(self, chunk_size):
        generator = torch.Generator()

        def noisy(w, x):
            return (w * torch.randn(3, generator=generator, dtype=DTYPE) * x).sum()

        with pytest.raises(RuntimeError, match="random"):
            per_sample.grads(noisy, chunk_size=chunk_size)(W, X)

    @pytest.mark.parametrize("chunk_size", [None, 3, 1])
    def test_different(self, chunk_size):
        f = per_sample.grads(self.noisy, randomness="different", chunk_size=chunk_size)
        assert len({row[0].item() for row in f(W, X)}) == B

    @pytest.mark.parametrize("chunk_size", [None, 3, 1])
    def test_same(self, chunk_size):
        f = per_sample.grads(self.noisy, randomness="same", chunk_size=chunk_size)
        torch.manual_seed(5)
        rows = f(W, X)
        torch.manual_seed(5)
        assert_same(rows, torch.randn(3, dtype=DTYPE).expand(B, 3))

    def test_both_passes_see_the_same_numbers(self):
        torch.manual_seed(5)
        noise = torch.randn(B, 3, dtype=DTYPE)
        expected = (0.5 / noise.norm(dim=1)).clamp(max=1) @ noise
        for passes in (1, 2):
            f = per_sample.clipped_sum(
                self.noisy, max_norm=0.5, passes=passes, randomness="different"
            )
            torch.manual_seed(5)
            assert_same(f(W, X), expected, eps=8)


class TestCompositions:
    def reference(self, w, x):
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)
        norms = gradients.square().sum(1).sqrt()
        return (0.5 / norms).clamp(max=1) @ gradients

    @pytest.mark.parametrize("passes", [1, 2])
    @pytest.mark.parametrize("chunk_size", [None, 1, 3])
    @pytest.mark.parametrize("library", [torch.func, functx], ids=["torch", "functx"])
    def test_inside_transforms(self, library, chunk_size, passes):
        f = per_sample.clipped_sum(loss, max_norm=0.5, chunk_size=chunk_size, passes=passes)
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
    def test_under_plain_autograd(self, chunk_size):
        """Also with respect to a variable that only the closure knows."""
        w, scale = W.clone().requires_grad_(), torch.tensor(1.5, dtype=DTYPE, requires_grad=True)
        f = per_sample.clipped_sum(
            lambda w, x: loss(w, x) * scale, max_norm=0.5, chunk_size=chunk_size
        )
        g = lambda w, x: self.scaled(w, x, scale)  # noqa: E731
        ours, theirs = (torch.autograd.grad(h(w, X).square().sum(), (w, scale)) for h in (f, g))
        assert_same(ours, theirs, eps=64)

    def scaled(self, w, x, scale):
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x) * scale
        return (0.5 / gradients.square().sum(1).sqrt()).clamp(max=1) @ gradients

    @pytest.mark.parametrize("make", [per_sample.norms, per_sample.grads])
    def test_regions_inside(self, make):
        weights, x, plain = deep_mlp(layers=4, batch=6, width=4)

        @functx.remat
        def layer(w, x):
            return torch.tanh(x @ w)

        def with_regions(weights, x):
            for w in weights:
                x = layer(w, x)
            return x.square().sum()

        for chunk_size in (None, 1, 4):
            for grad_mode in (True, False):
                with torch.set_grad_enabled(grad_mode):
                    f, g = (make(h, chunk_size=chunk_size) for h in (with_regions, plain))
                    assert_same(f(weights, x), g(weights, x), eps=8)

    def test_inside_a_region(self):
        f = per_sample.clipped_sum(loss, max_norm=0.5, chunk_size=3)
        ours, theirs = (
            torch.func.grad(lambda w, h=h: h(w, X).square().sum())(W) for h in (f, functx.remat(f))
        )
        assert_same(ours, theirs, eps=8)

    def test_traced(self):
        from torch.fx.experimental.proxy_tensor import make_fx

        f = per_sample.clipped_sum(loss, max_norm=0.5, chunk_size=3)
        graph = make_fx(f)(W, X)
        assert_same(graph(W * 2, X), f(W * 2, X), eps=8)
        with pytest.raises(RuntimeError, match="traced; give chunk_size"):
            make_fx(per_sample.norms(loss, memory_budget=10**9))(W, X)

    def test_in_inference_mode(self):
        with torch.inference_mode():
            for chunk_size in (None, 1):
                f = per_sample.norms(loss, chunk_size=chunk_size)
                assert f(W, X).shape == (B,)


class TestBytes:
    def setup_method(self):
        self.weights, self.x, self.loss = deep_mlp(layers=8, batch=16, width=48)
        self.masks = [w.sign() for w in self.weights]
        self.one = sum(w.nbytes for w in self.weights)

    def test_norms_keep_one_leaf_at_a_time(self):
        norms = peak(per_sample.norms(self.loss), self.weights, self.x)
        everything = peak(per_sample.grads(self.loss), self.weights, self.x)
        assert everything > 16 * self.one
        assert norms < 0.05 * everything
        masked = peak(per_sample.norms(self.masked), self.weights, self.x)
        assert norms < masked < 0.35 * everything

    def masked(self, weights, x):
        """Nothing in it is a product of a weight: no gradient is known by factors."""
        for w, mask in zip(weights, self.masks):
            x = torch.tanh(x @ (w * mask))
        return x.square().sum()

    @torch.no_grad()
    def test_two_passes_keep_one_leaf_at_a_time(self):
        once, twice = (
            peak(per_sample.clipped_sum(self.masked, max_norm=1.0, passes=n), self.weights, self.x)
            for n in (1, 2)
        )
        assert twice < 0.4 * once

    def test_two_passes_are_chosen_where_gradients_are_large(self, monkeypatch):
        monkeypatch.setattr(per_sample._second, "_SMALL", 0)
        peaks = {
            passes: peak(
                per_sample.clipped_sum(self.masked, max_norm=1.0, passes=passes),
                self.weights,
                self.x,
            )
            for passes in (None, 1, 2)
        }
        assert peaks[None] <= 1.1 * peaks[2] < 0.5 * peaks[1]
        x = self.x.unsqueeze(1).expand(-1, 40, -1).contiguous()  # 40 times the activations
        counts = {
            passes: count(
                per_sample.clipped_sum(self.masked, max_norm=1.0, passes=passes), self.weights, x
            )["tanh"]
            for passes in (1, 2)
        }
        assert counts == {1: 8, 2: 16}
        f = per_sample.clipped_sum(self.masked, max_norm=1.0)
        f(self.weights, x)  # measures
        assert count(f, self.weights, x)["tanh"] == 8

    def test_a_loss_that_changes_is_not_run_twice(self):
        calls = []

        def changing(w, x):
            calls.append(1)
            return loss(w, x) * len(calls)

        f = per_sample.clipped_sum(changing, max_norm=1.0, passes=2)
        with pytest.raises(RuntimeError, match="other values when it ran a second time"):
            f(W, X)

    @torch.no_grad()
    def test_a_chunk_of_one_keeps_one_gradient(self):
        f = per_sample.clipped_sum(self.loss, max_norm=1.0, chunk_size=1)
        assert peak(f, self.weights, self.x) < 2.2 * self.one

    def test_chunks_of_gradients_are_copied_to_their_place(self):
        f = per_sample.grads(self.loss, chunk_size=2)
        assert peak(f, self.weights, self.x) < (16 + 2.5) * self.one

    def test_one_pass_runs_nothing_twice(self):
        for loss in (self.loss, self.masked):
            f = per_sample.clipped_sum(loss, max_norm=1.0, passes=1)
            counts = count(f, self.weights, self.x)
            assert counts["tanh"] == counts["tanh_backward"] == 8
