"""Per-example gradients of a module: a pair of module and criterion in place of a function."""

import concurrent.futures
import contextlib
import threading

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import nn

from functx import per_sample

from .losses import slow_norms, slow_sum

B = 5


class TestModules:
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def test_the_sum_is_that_of_a_loop_over_the_examples(self):
        model = self.model()
        x, y = numbers(B, 3), torch.tensor([0, 1, 1, 0, 1])
        total, extras = per_sample.clipped_sum(
            (model, nn.functional.cross_entropy), max_norm=0.3, return_values=True
        )(x, y)
        factors, gradients = [], []
        for one in range(B):
            model.zero_grad()
            nn.functional.cross_entropy(model(x[one : one + 1]), y[one : one + 1]).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            factors.append(min(1.0, 0.3 / slow_norms(gradients[-1:]).item()))
        assert list(total) == [name for name, _ in model.named_parameters()]
        assert_same(list(total.values()), slow_sum(gradients, factors), eps=16)
        values = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
        assert_same(extras.values, values, eps=8)
        assert not any(t.requires_grad for t in (*total.values(), extras.values))

    def test_it_sees_what_an_optimizer_did(self):
        model, x = self.model(), numbers(B, 3)
        f = per_sample.norms((model, torch.sum))
        before = f(x)
        with torch.no_grad():
            model[2].weight.mul_(2)
        assert not torch.equal(f(x), before)

    def test_frozen_parameters_have_no_gradient(self):
        model, x = self.model(), numbers(B, 3)
        everything = per_sample.grads((model, torch.sum))(x)
        model[0].requires_grad_(False)
        some = per_sample.grads((model, torch.sum))(x)
        assert list(some) == ["2.weight", "2.bias"]
        assert_same(some, {name: everything[name] for name in some})

    @pytest.mark.parametrize("chunk_size", [None, 1])
    def test_tied_parameters_are_summed_before_the_norm(self, chunk_size):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(5, 3, dtype=DTYPE)
                self.head = nn.Linear(3, 5, bias=False, dtype=DTYPE)
                self.head.weight = self.embed.weight

            def forward(self, tokens):
                return self.head(torch.tanh(self.embed(tokens))).flatten(0, 1)

        def criterion(scores, tokens):
            return nn.functional.cross_entropy(scores, tokens.flatten())

        torch.manual_seed(0)
        model, tokens = Tied(), torch.tensor([[0, 1, 2], [3, 3, 3], [4, 0, 4]])
        norms = per_sample.norms((model, criterion), chunk_size=chunk_size)(tokens, tokens)
        expected = []
        for one in tokens:
            model.zero_grad()
            criterion(model(one[None]), one[None]).backward()
            expected.append(model.embed.weight.grad.norm())
        assert_same(norms, torch.stack(expected), eps=8)

    def test_inputs_may_be_several_arguments(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(numbers(3))

            def forward(self, a, b):
                assert a.shape == (1, 3)
                return (self.w * a * b).sum(1)

        model, a, b = Two(), numbers(B, 3), numbers(B, 3, start=1.0)
        for inputs in ((a, b), {"b": b, "a": a}):
            gradients = per_sample.grads((model, torch.sum), chunk_size=2)(inputs)
            assert_same(gradients, {"w": a * b}, eps=8)

    @pytest.mark.parametrize("kind", ["training", "no statistics", "nested"])
    def test_batch_norm_is_refused(self, kind):
        norm = nn.BatchNorm1d(3, track_running_stats=kind != "no statistics")
        norm.train(kind != "no statistics")
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(norm) if kind == "nested" else norm)
        for make in (per_sample.grads, per_sample.norms):
            with pytest.raises(ValueError, match="statistics of the batch, which mix its examples"):
                make((model, torch.sum))
        with pytest.raises(ValueError, match="BatchNorm1d '1"):
            per_sample.clipped_sum((model, torch.sum), max_norm=1.0)

    def test_batch_norm_that_begins_to_train_is_refused(self):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
        f = per_sample.norms((model, torch.sum))
        assert f(torch.randn(B, 3)).shape == (B,)
        model.train()
        with pytest.raises(ValueError, match="evaluation mode"):
            f(torch.randn(B, 3))

    def test_a_module_alone_is_an_error(self):
        with pytest.raises(TypeError, match=r"pass a pair \(module, criterion\)"):
            per_sample.grads(nn.Linear(2, 2))


class Meets(nn.Module):
    """Waits for other threads between its two layers."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.barrier = threading.Barrier(1)

    def forward(self, x):
        x = torch.tanh(self.one(x))
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(1.0)
        return self.other(x)


def test_threads_that_share_a_module_take_turns():
    """While one runs it, its parameters are in the place of the module's."""
    torch.manual_seed(0)
    pair = (Meets().to(DTYPE), lambda out: out.square().sum())
    batches = [numbers(3, 4), numbers(3, 4, start=5.0)]
    expected = [per_sample.grads(pair)(x) for x in batches]
    pair[0].barrier = threading.Barrier(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda x: per_sample.grads(pair)(x), batches))
    assert_same(found, expected, eps=8)


def test_sparse_gradients_need_one_example_at_a_time():
    torch.manual_seed(0)
    dense = nn.Embedding(9, 4).to(DTYPE)
    sparse = nn.Embedding(9, 4, sparse=True, _weight=dense.weight.detach())
    tokens = torch.tensor([[0, 3], [3, 3], [8, 1]])

    def results(module, **options):
        pair = (module, lambda out: out.sin().sum())
        total = per_sample.clipped_sum(pair, max_norm=1.0, **options)(tokens)
        return total, per_sample.grads(pair, **options)(tokens)

    assert_same(results(sparse, chunk_size=1), results(dense), eps=64)
    with pytest.raises(NotImplementedError) as caught:
        results(sparse)
    assert "chunk_size=1 runs each as it is" in caught.value.__notes__[-1]
