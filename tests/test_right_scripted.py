"""TorchScript in a region: scripted and traced functions and modules.

Its interpreter runs other kernels once it has run something twice, so that not even the same call
gives the same bits each time: what is compared here is equal up to rounding.
"""

import warnings

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch import nn

import functx


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(torch.tanh(self.inner(x)))


class Counts(nn.Module):
    n: int

    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, x):
        self.n += 1
        return x.sin()


def attend(x, w):
    y = x @ w
    return torch.tanh(y) * x


def script(f):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        return torch.jit.script(f)


def trace(f, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(f, args)


def check(program):
    for _ in range(3):
        program(identity)  # the interpreter has done with optimizing
    assert_same(program(functx.remat), program(identity), 64.0)


@pytest.mark.parametrize("nested", [False, True])
def test_a_function_of_what_is_closed_over(nested):
    f = script(attend)

    def program(remat):
        x, w = numbers(4, 3).requires_grad_(), numbers(3, 3, start=0.5).requires_grad_()
        body = lambda x: f(x, w).sin()  # noqa: E731
        remat((lambda x: remat(body)(x)) if nested else body)(x).sum().backward()
        return x.grad, w.grad

    check(program)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [script, lambda m: trace(m, numbers(4, 3))])
def test_a_module_that_is_trained(make, training, nested):
    def program(remat):
        torch.manual_seed(0)
        block = make(Block(0.5 if training and make is script else 0.0).double().train(training))
        x = numbers(4, 3).requires_grad_()
        body = lambda x: block(x) * x  # noqa: E731
        for _ in range(2):
            remat((lambda x: remat(body)(x)) if nested else body)(x).sum().backward()
        state = {n: b for n, b in block.state_dict().items() if b.is_floating_point()}
        return x.grad, [p.grad for p in block.parameters()], state, torch.get_rng_state()

    check(program)


def test_a_module_among_others():
    def program(remat):
        torch.manual_seed(0)
        net = nn.Sequential(script(Block(0.0).double()), nn.Linear(3, 3).double())
        x = numbers(4, 3).requires_grad_()
        remat(net)(x).sum().backward()
        return x.grad, [p.grad for p in net.parameters()]

    check(program)


def test_statistics_advance_once():
    torch.manual_seed(0)
    block = script(Block(0.0).double())
    functx.remat(lambda x: block(x))(numbers(4, 3).requires_grad_()).sum().backward()
    assert dict(block.named_buffers())["inner.1.num_batches_tracked"] == 1


def test_differentiated_twice():
    f = script(attend)

    def program(remat):
        x, w = numbers(4, 3).requires_grad_(), numbers(3, 3, start=0.5).requires_grad_()
        y = remat(lambda x: f(x, w).sin())(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [x, w])

    check(program)


def test_a_module_that_binds_attributes_raises():
    counts = script(Counts())
    with pytest.raises(functx.RematError, match=r"scripted module .*Counts.* binds attributes"):
        functx.remat(lambda x: counts(x))(numbers(3).requires_grad_())
    assert counts.n == 0


def test_a_region_is_no_script():
    with pytest.raises(TypeError, match=r"TorchScript.*Call it in one"):
        functx.remat(script(Block(0.0)))


@pytest.mark.parametrize("inside", [False, True])
def test_torch_does_not_script_a_region(inside):
    """Nor what holds one, which stays as it is."""
    linear = nn.Linear(3, 3)
    module = functx.remat(linear)
    parent = nn.Sequential(nn.Linear(3, 3), module)
    with pytest.raises(TypeError, match=r"made by functx\.remat.*torch\.jit\.trace"):
        script(parent if inside else module)
    assert parent[1] is module
    x = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(parent, x)
    assert_same([script(linear)(x), traced(x)], [linear(x), parent(x)])
