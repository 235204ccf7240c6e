"""`functx.jit` of an ``nn.Module`` is an ``nn.Module`` with the same parameters (J7)."""

import copy

import pytest
import torch
from cases import COPIES, Block, numbers
from references import assert_same
from torch import nn
from torch.func import functional_call

import functx

from .jitted import as_traced


def counted(module, graphs=None):
    """A jitted module, and the graphs that it has been compiled to."""
    graphs = [] if graphs is None else graphs
    return functx.jit(module, backend=lambda m, _: graphs.append(m) or m), graphs


def gradients(module, x=None):
    x = numbers(2, 3).requires_grad_() if x is None else x
    out = module(x)
    return out, torch.autograd.grad(out.square().sum(), [x, *module.parameters()])


def test_it_is_a_module_of_the_same_class_over_the_same_state():
    block = Block()
    jitted, graphs = counted(block)
    assert isinstance(jitted, Block)
    assert all(a is b for a, b in zip(block.parameters(), jitted.parameters(), strict=True))
    for names in ("named_parameters", "named_buffers", "named_modules"):
        found = [name for name, _ in getattr(jitted, names)()]
        assert found == [name for name, _ in getattr(block, names)()]
    assert_same(jitted.state_dict(), block.state_dict())
    block.load_state_dict(jitted.state_dict())
    assert_same(gradients(jitted), gradients(block), eps=16)
    assert len(graphs) == 2, "a forward and a backward"
    assert_same(jitted.forward(numbers(2, 3)), block(numbers(2, 3)), eps=16)


def test_modes_and_attributes_are_those_of_the_original():
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
    jitted, x = functx.jit(net, backend=as_traced), numbers(2, 3)
    assert (jitted(x) == 0).any()
    jitted.eval()
    assert not net.training
    assert_same(jitted(x), net[0](x), eps=8)
    net[0].weight = nn.Parameter(numbers(3, 3, start=4.0))
    assert_same(jitted(x), net(x), eps=8)
    assert len(jitted) == 2
    assert jitted[0] is net[0]
    with pytest.raises(AttributeError, match="nothing"):
        _ = jitted.nothing
    block = Block()
    jitted = functx.jit(block, backend=as_traced)
    jitted.factor = 3.0
    assert block.factor == jitted.helper() == 3.0
    jitted.child = nn.Linear(2, 2)
    assert "child.weight" in dict(block.named_parameters())
    assert jitted.to(torch.float64) is jitted


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("region", [False, True])
def test_a_copy_is_compiled_by_itself(kind, region):
    block = functx.remat(Block()) if region else Block()
    jitted = functx.jit(block, backend="aot_eager")
    other = COPIES[kind](jitted)
    assert isinstance(other, Block)
    assert functx.jit(other) is not other
    assert_same(gradients(other), gradients(jitted), eps=64)
    other.scale.data.zero_()
    assert block.scale.abs().sum() > 0


def test_a_shallow_copy_shares_parameters_and_has_attributes_of_its_own():
    jitted = functx.jit(Block(), backend="aot_eager")
    other = copy.copy(jitted)
    other.factor = 5.0
    assert jitted.factor == 2.0
    assert other.scale is jitted.scale
    assert_same(other(numbers(2, 3)), Block.forward(other, numbers(2, 3)), eps=16)


def test_hooks_of_the_module_run_outside_and_once_a_call():
    jitted, graphs = counted(nn.Linear(3, 3).double())
    seen = []
    jitted.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    jitted.register_forward_hook(lambda m, args, out: seen.append(out))
    jitted.register_full_backward_hook(lambda m, gx, gy: seen.append(gy[0]))
    for n in (1, 2):
        x = numbers(2, 3).requires_grad_()
        out = jitted(x)
        assert_same(out, seen[-1])
        out.sum().backward()
        assert len(seen) == 2 * n
        assert_same(seen[-1], torch.ones(2, 3).double())
    assert len(graphs) == 2


def test_it_works_where_a_module_does():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    jitted, x = functx.jit(net, backend=as_traced), numbers(5, 3)
    params = {name: p.detach() * 2 for name, p in net.named_parameters()}
    assert_same(functional_call(jitted, params, (x,)), functional_call(net, params, (x,)), eps=8)
    loss = lambda net, params: functional_call(net, params, (x,)).square().sum()
    assert_same(functx.grad(lambda p: loss(jitted, p))(params),
                functx.grad(lambda p: loss(net, p))(params), eps=64)  # fmt: skip
    outer = nn.Sequential(jitted, nn.Sigmoid())
    plain = nn.Sequential(net, nn.Sigmoid())
    first, second = (gradients(f, x.clone().requires_grad_()) for f in (outer, plain))
    assert_same(first, second, eps=64)
    assert_same(functx.jit(outer, backend=as_traced)(x), outer(x), eps=8)
    optimizer = torch.optim.SGD(jitted.parameters(), lr=0.1)
    before = net[0].weight.clone()
    jitted(x).sum().backward()
    optimizer.step()
    assert not torch.equal(net[0].weight, before)
    assert_same(jitted(x), net(x), eps=8)


def test_a_region_of_a_jitted_module_and_a_jitted_region():
    block = Block()
    for module in (
        functx.remat(functx.jit(block, backend=as_traced)),
        functx.jit(functx.remat(block), backend=as_traced),
        functx.jit(functx.jit(block, backend=as_traced), backend=as_traced),
    ):
        assert isinstance(module, Block)
        for _ in range(2):
            assert_same(gradients(module), gradients(block), eps=64)


def test_a_forward_of_the_instance_is_compiled():
    block = Block()
    block.forward = lambda x: x * block.scale.sum()
    jitted, graphs = counted(block)
    assert_same(jitted(numbers(3)), numbers(3) * block.scale.sum())
    assert len(graphs) == 2


@pytest.mark.parametrize("which", ["the original", "the jitted one"])
def test_a_parametrization_that_is_added_later_is_seen(which):
    net = nn.Linear(3, 3).double()
    jitted = functx.jit(net, backend=as_traced)
    assert_same(jitted(numbers(3)), net(numbers(3)), eps=8)
    changed = net if which == "the original" else jitted
    nn.utils.parametrize.register_parametrization(changed, "weight", nn.Softplus())
    assert_same(jitted(numbers(3)), changed(numbers(3)), eps=8)
