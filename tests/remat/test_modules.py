"""`remat` of an ``nn.Module`` is an ``nn.Module``: state, hooks, copies, methods, training."""

import copy
import io
import pickle

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same, count
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import functx

from .refusals import same


class Block(nn.Module):
    """A parameter, a buffer, a submodule, an attribute, a method."""

    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=DTYPE)
        self.scale = nn.Parameter(numbers(width))
        self.register_buffer("shift", numbers(width, start=1.0))
        self.factor = 2.0

    def forward(self, x, power=1):
        return torch.tanh(self.linear(x)) ** power * self.scale + self.shift * self.factor

    def helper(self):
        return self.factor


def seeded(build=Block):
    torch.manual_seed(1)
    return build()


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
    ours, plain = functx.remat(seeded()), seeded()
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


def roundtrip_by_torch(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": roundtrip_by_torch,
    "deepcopy": copy.deepcopy,
}


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


def test_hooks_of_the_module_run_as_without():
    def program(remat):
        module, calls, seen = remat(seeded()), [], []
        module.register_forward_pre_hook(lambda m, args: calls.append("pre") or (args[0] * 2,))
        module.register_forward_hook(lambda m, args, out: calls.append("post") or out * 3)
        module.linear.register_forward_hook(lambda m, args, out: out * 2)
        module.register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
        module.register_full_backward_pre_hook(lambda m, go: seen.extend(go))
        found = gradients(module)
        assert calls[:2] == ["pre", "post"]
        return found, [g.clone() for g in seen]

    same(program)


def train(net, steps=3):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(numbers(4, 3, start=float(step))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.grad for p in net.parameters()], dict(net.state_dict())


@pytest.mark.parametrize("around", [False, True])
def test_a_net_of_regions_trains_bit_by_bit_as_without(around):
    def program(remat):
        torch.manual_seed(1)
        net = nn.Sequential(remat(Block()), remat(nn.BatchNorm1d(3, dtype=DTYPE)), remat(Block()))
        return train(remat(net) if around else net)

    same(program, eps=0)


def test_tied_weights_and_a_module_used_twice():
    def program(remat):
        first, second = remat(seeded()), remat(Block())
        second.linear.weight = first.linear.weight
        x = numbers(4, 3).requires_grad_()
        out = second(first(first(x))) @ first.linear.weight
        return torch.autograd.grad(out.sum(), [x, first.linear.weight, first.scale, second.scale])

    same(program)


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
def test_parametrizations_are_right_and_advance_once(kind, outside):
    """Also where the region is around a module that holds it; buffers of power iterations once."""

    def program(remat):
        torch.manual_seed(1)
        m = nn.Linear(4, 4, dtype=DTYPE)
        PARAMETRIZATIONS[kind](m)
        net = remat(nn.Sequential(m, nn.Tanh()) if outside else m)
        found = []
        for _ in range(3):
            x = numbers(3, 4).requires_grad_()
            found.append(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))
        return found, dict(net.state_dict())

    same(program, eps=32)
