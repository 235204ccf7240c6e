"""`remat` of an ``nn.Module``: state, hooks, copies, training; hooks that swap its parameters."""

import pytest
import torch
from cases import COPIES, DTYPE, Block, identity, judged_by, numbers, seeded
from references import assert_same, count
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize

import functx

from .refusals import same


def is_region(module, x=None):
    """Whether the module computes its ``tanh`` again in the backward pass."""
    x = (numbers(2, 3) if x is None else x).requires_grad_()
    return count(lambda: module(x).sum().backward())["tanh"] == 2


def gradients(module, *args, **kwargs):
    x = numbers(2, 3).requires_grad_()
    out = module(x, *args, **kwargs)
    return out, torch.autograd.grad(out.square().sum(), [x, *module.parameters()])


def test_it_is_a_module_of_the_same_class_and_a_region():
    region = functx.remat(Block())
    assert isinstance(region, Block)
    assert is_region(region)
    assert not is_region(Block())
    assert "Block" in repr(region)
    block = Block()
    region = functx.remat(block)  # shares all that the original has
    assert all(a is b for a, b in zip(block.parameters(), region.parameters(), strict=True))
    assert region.shift is block.shift
    assert region.linear is block.linear


def test_the_names_of_its_state_are_the_same():
    ours, plain = functx.remat(seeded(Block)), seeded(Block)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        ours_names = [name for name, _ in getattr(ours, names)()]
        assert ours_names == [name for name, _ in getattr(plain, names)()]
    assert_same(ours.state_dict(), plain.state_dict())
    plain.load_state_dict(ours.state_dict())
    ours.load_state_dict(plain.state_dict())


def test_attributes_and_methods_are_those_of_the_original():
    region = functx.remat(Block())
    assert region.helper() == region.factor == 2.0
    region.factor = 3.0
    assert region.helper() == 3.0
    assert_same(region(numbers(3)), region.forward(numbers(3)))
    with pytest.raises(AttributeError, match="nothing"):
        _ = region.nothing
    region.extra = nn.Parameter(numbers(3))
    region.child = nn.Linear(2, 2)
    assert {"extra", "child.weight"} <= {name for name, _ in region.named_parameters()}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_a_region_of_its_own(kind):
    region = functx.remat(Block())
    other = COPIES[kind](region)
    assert type(other) is type(region)
    assert is_region(other)
    assert_same(gradients(other), gradients(region))
    other.scale.data.zero_()
    assert region.scale.abs().sum() > 0
    assert other.scale is not region.scale


@judged_by(same)
def test_hooks_of_the_module_run_as_without(remat):
    module, calls, seen = remat(seeded(Block)), [], []
    module.register_forward_pre_hook(lambda m, args: calls.append("pre") or (args[0] * 2,))
    module.register_forward_hook(lambda m, args, out: calls.append("post") or out * 3)
    module.linear.register_forward_hook(lambda m, args, out: out * 2)
    module.register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
    module.register_full_backward_pre_hook(lambda m, go: seen.extend(go))
    found = gradients(module)
    assert calls[:2] == ["pre", "post"]
    return found, [g.clone() for g in seen]


@judged_by(same)
def test_tied_weights_and_a_module_used_twice(remat):
    first, second = remat(seeded(Block)), remat(Block())
    second.linear.weight = first.linear.weight
    x = numbers(4, 3).requires_grad_()
    out = second(first(first(x))) @ first.linear.weight
    return torch.autograd.grad(out.sum(), [x, first.linear.weight, first.scale, second.scale])


class Doubled(nn.Module):
    def forward(self, w):
        return w * 2


PARAMETRIZATIONS = {
    "of the user": lambda m: parametrize.register_parametrization(m, "weight", Doubled()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize(
    ("kind", "outside"),
    [("of the user", True), ("weight_norm", False), ("spectral_norm", True), ("orthogonal", False)],
)
@judged_by(same, eps=32)
def test_parametrizations_are_right_and_advance_once(remat, kind, outside):
    torch.manual_seed(1)
    m = nn.Linear(4, 4, dtype=DTYPE)
    PARAMETRIZATIONS[kind](m)
    net = remat(nn.Sequential(m, nn.Tanh()) if outside else m)
    found = []
    for _ in range(3):
        x = numbers(3, 4).requires_grad_()
        found.append(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))
    return found, dict(net.state_dict())


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
    def gradient(layer, remat):
        x = numbers(2, 4).requires_grad_()
        out = remat(nn.Sequential(layer, nn.Tanh()) if around else layer)(x)
        return torch.autograd.grad(out.sin().sum(), x)

    try:
        found = gradient(offloaded(how), functx.remat)
    except functx.RematError as error:
        assert "inside" in str(error)  # noqa: PT017
    else:
        assert_same(found, gradient(linear(), identity), eps=8)


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
    return fully_shard(linear(), mesh=mesh)


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


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_module_in_a_region_that_is_scripted_is_an_error_that_says_so():
    for module in (functx.remat(nn.Linear(3, 3)), nn.Sequential(functx.remat(nn.Linear(3, 3)))):
        with pytest.raises(TypeError, match="script the module without remat"):
            torch.jit.script(module)


class Around(nn.Module):
    """A layer in a region."""

    def __init__(self, layer, remat):
        super().__init__()
        self.layer = layer
        self.forward = remat(lambda x: layer(x)[0].sin())


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@judged_by(same, eps=8)
def test_a_recurrent_layer_may_look_at_its_weights_in_the_replay_alone(remat, layer):
    """It does where they are not those of the run before (``functional_call`` has ended)."""
    net = Around(seeded(lambda: layer(3, 4)).to(DTYPE), remat)
    run = lambda params, n: functx.functional_call(net, params, numbers(n, 3)).sum()
    params = {name: 2 * p.detach() for name, p in net.named_parameters()}
    return functx.grad(lambda params: run(params, 2) + run(params, 5))(params)
