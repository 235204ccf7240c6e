"""Kept values in host memory: the same gradients, less memory on the device, on any stream."""

import contextlib

import pytest
import torch
from references import assert_same

import functx
from functx import checkpoint_policies as cp

LAYERS, WIDTH, ROWS = 6, 128, 512


def weights(device):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=g).to(device) / 11 for _ in range(LAYERS)]


def named(w, x):
    return torch.tanh(functx.checkpoint_name(x @ w, "product"))


def loss_with(policy):
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


@pytest.mark.parametrize("policy", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("way", ["backward", "grad", "vmap", "twice"])
def test_gradients_are_those_of_kept_values(policy, own_stream, way, device):
    x = torch.linspace(-1, 1, ROWS * WIDTH, device=device).view(ROWS, WIDTH)

    def gradients(policy):
        loss = loss_with(policy)
        if way == "grad":
            return functx.grad(loss)(weights(device), x)
        if way == "vmap":
            return functx.vmap(functx.grad(loss, 1), (None, 0))(weights(device), x[:, None])
        leaves = [w.requires_grad_() for w in weights(device)]
        out = loss(leaves, x)
        first = torch.autograd.grad(out, leaves, retain_graph=way == "twice")
        return first if way == "backward" else (first, torch.autograd.grad(out, leaves))

    with stream_of(device, own_stream):
        for _ in range(3):  # memory is used again while copies may be under way
            ours = gradients(policy)
        expected = gradients(KEPT)
    assert_same(ours, expected)


@pytest.mark.gpu
class TestMemory:
    ROWS = 2**16

    def peak(self, policy):
        x = torch.randn(self.ROWS, WIDTH, device="cuda")
        leaves = [w.requires_grad_() for w in weights("cuda")]

        def run():
            loss_with(policy)(leaves, x).backward()

        run()
        return functx.memory.peak(run) / x.nbytes

    def test_kept_values_are_not_on_the_device(self):
        kept, offloaded = self.peak(KEPT), self.peak(NAMED["offload"])
        assert kept - offloaded > LAYERS - 3

    def test_they_are_in_pinned_memory(self):
        from functx._offload import to_host

        host = to_host(torch.ones(8, device="cuda"))
        assert host.is_pinned()
        assert host.device.type == "cpu"

    def test_nobody_waits_for_the_device(self):
        """Copies are queued: neither forward nor backward synchronizes."""
        x = torch.randn(ROWS, WIDTH, device="cuda")
        leaves = [w.requires_grad_() for w in weights("cuda")]
        loss = loss_with(NAMED["offload"])
        loss(leaves, x).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss(leaves, x).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
