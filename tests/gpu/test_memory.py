"""Bytes on a device: what functx says, what torch's allocator says; kept in host memory."""

import contextlib
import json
import warnings

import pytest
import torch
from cases import dense, identity
from references import assert_same, gradients

import functx
from functx import checkpoint_policies as cp
from functx import per_sample
from functx.__main__ import main
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
        def loss(weights, x):
            for start in range(0, LAYERS, 4):
                x = region(dense)(weights[start : start + 4], x)
            return x.square().mean()

        if way == "grad":
            return functx.grad(loss)(weights, x)
        leaves = [w.detach().requires_grad_() for w in weights]
        return torch.autograd.grad(loss(leaves, x), leaves)

    for region in (identity, functx.remat):
        run(region)  # warm: a library's workspace is not part of it
    assert peak(run, identity) / x.nbytes > LAYERS
    # 3 inputs, 4 activations of the segment that is pulled back, one cotangent.
    assert peak(run, functx.remat) / x.nbytes < 8.1


def test_a_budget_is_kept_to(device):
    weights, x = problem(device, 32)
    x = x[:, None].expand(-1, 256, -1).contiguous()
    f = per_sample.clipped_sum(loss_with(body), max_norm=1.0)
    f(weights, x)
    whole = peak(f, weights, x)
    budget = whole // 3
    chunked = per_sample.clipped_sum(loss_with(body), max_norm=1.0, budget=budget)
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
        f = per_sample.clipped_sum(loss_with(body), max_norm=1.0)
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


def wave(x):
    y = torch.sin(x)
    return torch.exp(y)


def test_lines_are_those_of_the_forward(device):
    x = torch.linspace(0, 1, N, device=device)
    p = profile(functx.grad(lambda x: functx.remat(wave)(x).sum()), x)
    assert p.peak >= sum(held.nbytes for held in p.holders) >= 2 * x.nbytes
    assert any(held.line == wave.__code__.co_firstlineno + 1 for held in p.holders)


DEPTH, WIDE, HIGH = 6, 128, 512


def weights(device):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(WIDE, WIDE, generator=g).to(device) / 11 for _ in range(DEPTH)]


def named(w, x):
    return torch.tanh(functx.checkpoint_name(x @ w, "product"))


def loss_of(policy):
    region = functx.remat(named, policy=policy)

    def loss(weights, x):
        for w in weights:
            x = region(w, x)
        return x.square().mean()

    return loss


KEPT = cp.save_only_these_names("product")
NAMED = {
    "offload": cp.offload(KEPT),
    "by name": cp.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["product"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "dots": cp.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@contextlib.contextmanager
def stream_of(device, own):
    """A stream of its own, on a device that has streams."""
    if device == "cpu" or not own:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def twice(loss, weights, x):
    leaves = [w.requires_grad_() for w in weights]
    out = loss(leaves, x)
    return [torch.autograd.grad(out, leaves, retain_graph=True) for _ in range(2)]


WAYS = {
    "backward": lambda loss, weights, x: gradients(lambda weights: loss(weights, x), weights),
    "grad": lambda loss, weights, x: functx.grad(loss)(weights, x),
    "vmap": lambda loss, weights, x: functx.vmap(functx.grad(loss, 1), (None, 0))(
        weights, x[:, None]
    ),
    "twice": twice,
}


@pytest.mark.parametrize("policy", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradients_are_those_of_kept_values(policy, own_stream, way, device):
    x = torch.linspace(-1, 1, HIGH * WIDE, device=device).view(HIGH, WIDE)
    with stream_of(device, own_stream):
        for _ in range(3):  # memory is used again while copies may be under way
            ours = way(loss_of(policy), weights(device), x)
        expected = way(loss_of(KEPT), weights(device), x)
    assert_same(ours, expected)


@pytest.mark.gpu
class TestMemory:
    HIGH = 2**16

    def peak(self, policy):
        x = torch.randn(self.HIGH, WIDE, device="cuda")
        leaves = [w.requires_grad_() for w in weights("cuda")]

        def run():
            loss_of(policy)(leaves, x).backward()

        run()
        return functx.memory.peak(run) / x.nbytes

    def test_kept_values_are_not_on_the_device(self):
        kept, offloaded = self.peak(KEPT), self.peak(NAMED["offload"])
        assert kept - offloaded > DEPTH - 3

    def test_they_are_in_pinned_memory(self):
        from functx._policies.offload import to_host

        host = to_host(torch.ones(8, device="cuda"))
        assert host.is_pinned()
        assert host.device.type == "cpu"

    @pytest.mark.parametrize("policy", ["none", "offload"])
    @pytest.mark.parametrize("way", ["backward", "grad", "vmap"])
    def test_nobody_waits_for_the_device(self, way, policy):
        """Copies are queued: neither forward nor backward synchronizes."""
        x = torch.randn(HIGH, WIDE, device="cuda")
        loss, given = loss_of(NAMED["offload"] if policy == "offload" else None), weights("cuda")
        WAYS[way](loss, given, x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            WAYS[way](loss, given, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_demo_runs_on_a_device(tmp_path):
    for package in ("sklearn", "rich", "matplotlib"):
        pytest.importorskip(package)
    assert main(["demo", "--quick", "--device", "cuda", "--out", str(tmp_path)]) == 0
    assert "cuda" in json.loads((tmp_path / "figures.json").read_text())["environment"]["device"]
