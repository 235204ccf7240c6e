"""Rule 4: modules whose hooks swap parameters, as offloading and sharding do; torch's wrappers."""

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import nn

import functx


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4, dtype=DTYPE)


def offloaded(how):
    """A layer whose weight is there while its forward runs."""
    layer = linear()
    kept = layer.weight.detach().clone()

    def load(module, args):
        if how == "data":
            module.weight.data = kept.clone()
        else:
            module._parameters["weight"] = nn.Parameter(kept.clone())

    def unload(module, args, out):
        if how == "data":
            module.weight.data = torch.zeros_like(kept)
        else:
            module._parameters["weight"] = nn.Parameter(torch.empty(4, 4, device="meta"))

    layer.register_forward_pre_hook(load)
    layer.register_forward_hook(unload)
    return layer


@pytest.mark.parametrize("how", ["data", "parameter"])
@pytest.mark.parametrize("around", [False, True])
def test_hooks_that_swap_parameters_are_right_or_an_error_that_says_inside(how, around):
    def gradient(remat):
        layer, x = offloaded(how), numbers(2, 4).requires_grad_()
        out = remat(nn.Sequential(layer, nn.Tanh()) if around else layer)(x)
        return torch.autograd.grad(out.sin().sum(), x)

    plain = nn.Sequential(linear(), nn.Tanh()) if around else linear()
    x = numbers(2, 4).requires_grad_()
    expected = torch.autograd.grad(plain(x).sin().sum(), x)
    try:
        found = gradient(functx.remat)
    except functx.RematError as error:
        found = str(error)
    if isinstance(found, str):
        assert "inside" in found
    else:
        assert_same(found, expected, eps=8)


@pytest.fixture
def group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


def wrap(kind):
    if kind == "DDP":
        return nn.parallel.DistributedDataParallel(linear())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    return torch.distributed.fsdp.fully_shard(linear(), mesh=mesh)


WAYS = {
    "remat": lambda m, x: functx.remat(m)(x),
    "a closure": lambda m, x: functx.remat(lambda x: m(x))(x),
    "checkpoint": lambda m, x: functx.checkpoint(m, x, use_reentrant=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "way"),
    # FSDP works in hooks, which run outside of the region that `remat` makes of a module's forward.
    [(kind, way) for kind in ("DDP", "FSDP") for way in WAYS if (kind, way) != ("FSDP", "remat")],
)
def test_a_region_around_a_distributed_module_is_an_error_that_says_swap_them(group, kind, way):
    x = numbers(2, 4).requires_grad_()
    with pytest.raises(functx.RematError, match=r"inside|swap|around"):
        WAYS[way](wrap(kind), x).sum().backward()
