"""Bytes on a device: what functx says, and what torch's allocator says."""

import warnings

import pytest
import torch
from references import assert_same

import functx
from functx import per_sample
from functx.memory import peak, profile

N = 2**20  # float32 numbers: 4 MiB, which the allocator does not round
WIDTH, ROWS, LAYERS = 64, 4096, 12


def body(w, x):
    return torch.tanh(x @ w)


def loss_with(region):
    def loss(weights, x):
        for w in weights:
            x = region(w, x)
        return x.square().mean()

    return loss


def problem(device, rows=ROWS):
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=g).to(device) / 8 for _ in range(LAYERS)]
    return weights, torch.randn(rows, WIDTH, generator=g).to(device)


def test_peaks_are_counted_to_the_byte(device):
    x = torch.ones(N, device=device)
    assert peak(lambda: x.sin().sin().sin()) == 2 * 4 * N
    assert peak(lambda: torch.ones(N)) == 4 * N  # on the CPU: no CUDA figure


def test_a_region_keeps_nothing_but_its_inputs(device):
    w = torch.ones(N, device=device, requires_grad=True)
    found = profile(lambda: w.sin().tanh().sum())
    assert found.kept == 4 * N
    region = profile(lambda: functx.remat(lambda w: w.sin().tanh())(w).sum())
    assert region.kept == 0


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_regions_keep_their_inputs_alone(way, device):
    weights, x = problem(device)

    def run(region):
        loss = loss_with(region)
        if way == "grad":
            return functx.grad(loss)(weights, x)
        leaves = [w.clone().requires_grad_() for w in weights]
        return torch.autograd.grad(loss(leaves, x), leaves)

    def four(w, x):
        for one in w:
            x = body(one, x)
        return x

    def by_four(region):
        run = region(four)

        def loss(weights, x):
            for start in range(0, LAYERS, 4):
                x = run(weights[start : start + 4], x)
            return x.square().mean()

        return functx.grad(loss)(weights, x)

    run(body)
    by_four(functx.remat)  # warm: a library's workspace is not part of it
    plain = peak(run, body) / x.nbytes
    few = peak(by_four, functx.remat) / x.nbytes
    assert plain > LAYERS
    # 3 inputs, 4 activations of the segment that is pulled back, one cotangent.
    assert few < 8.1


def test_a_budget_is_kept_to(device):
    """`per_sample` measures, and chooses chunks that fit."""
    weights, x = problem(device, 32)
    x = x[:, None].expand(-1, 256, -1).contiguous()
    f = per_sample.clipped_sum(loss_with(body), max_norm=1.0)
    f(weights, x)
    whole = peak(f, weights, x)
    budget = whole // 3
    chunked = per_sample.clipped_sum(loss_with(body), max_norm=1.0, memory_budget=budget)
    chunked(weights, x)
    assert peak(chunked, weights, x) <= budget
    assert_same(chunked(weights, x), f(weights, x), eps=64)


@pytest.mark.gpu
class TestOfTheAllocator:
    def test_the_peak_is_the_allocators(self):
        weights, x = problem("cuda")
        gradient = functx.grad(loss_with(functx.remat(body)))
        gradient(weights, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradient(weights, x)
        torch.cuda.synchronize()
        expected = torch.cuda.max_memory_allocated() - before
        assert peak(gradient, weights, x) == expected

    def test_nothing_is_left_behind(self):
        weights, x = problem("cuda")
        gradient = functx.grad(loss_with(functx.remat(body)))
        gradient(weights, x)
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            gradient(weights, x)
        assert torch.cuda.memory_allocated() == before

    def test_where_memory_runs_out_the_chunk_is_halved(self):
        weights, x = problem("cuda", 64)
        x = x[:, None].expand(-1, 2048, -1).contiguous()
        expected = per_sample.clipped_sum(loss_with(body), max_norm=1.0, chunk_size=4)(weights, x)
        f = per_sample.clipped_sum(loss_with(body), max_norm=1.0, passes=1)
        whole = peak(f, weights, x)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        limit = torch.cuda.memory_allocated() + whole // 2
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            with pytest.warns(RuntimeWarning, match="out of memory with 64 examples"):
                found = f(weights, x)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                f(weights, x)  # it remembers
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        for ours, other in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["backward", "grad", "vmap"])
def test_regions_do_not_wait_for_the_device(way):
    weights, x = problem("cuda")
    loss = loss_with(functx.remat(body))

    def run():
        if way == "grad":
            return functx.grad(loss)(weights, x)
        if way == "vmap":
            return functx.vmap(functx.grad(loss, 1), (None, 0))(weights, x)
        leaves = [w.clone().requires_grad_() for w in weights]
        return torch.autograd.grad(loss(leaves, x), leaves)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wave(x):
    y = torch.sin(x)
    return torch.exp(y)


def test_lines_are_those_of_the_forward(device):
    x = torch.linspace(0, 1, N, device=device)
    p = profile(functx.grad(lambda x: functx.remat(wave)(x).sum()), x)
    assert p.peak >= sum(held.nbytes for held in p.holders) >= 2 * x.nbytes
    assert any(held.line == wave.__code__.co_firstlineno + 1 for held in p.holders)
