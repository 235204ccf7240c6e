"""What hooks and custom Functions close over and the body reads too, in further derivatives."""

import gc
import weakref

import pytest
import torch
from cases import DTYPE, numbers
from programs import identity
from references import assert_same
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * 2 * ctx.module.weight.sum() * x, None


def by_a_hook(x, s, module, reads):
    y = (x * x * x).sin()
    y = y * s if reads else y
    y.register_hook(lambda g: g * s)
    return y


def by_a_function(x, s, module, reads):
    y = Scaled.apply((x * x * x).sin() * s, module)
    return module(y) if reads else y


def nested(remat):
    return lambda body: remat(lambda x: remat(body)(x) * 2)


def twice(remat):
    return lambda body: lambda x: remat(body)(x) + remat(body)(x * 2)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("around", [lambda remat: remat, nested, twice])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("body", [by_a_hook, by_a_function])
def test_what_is_read_twice(body, leaf, reads, around, order):
    def derivatives(remat):
        x = numbers(4).requires_grad_()
        t = torch.tensor(0.6, dtype=DTYPE, requires_grad=True)
        module = nn.Linear(4, 4, dtype=DTYPE)
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(numbers(*p.shape))
        s = t if leaf else t.exp()
        value = around(remat)(lambda x: body(x, s, module, reads))(x).sum()
        leaves = [x, t, *module.parameters()]
        for _ in range(order - 1):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            value = (g * g).sum()
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in found]

    assert_same(derivatives(functx.remat), derivatives(identity), eps=512)


def test_nothing_more_is_held():
    def differentiated():
        x, module = numbers(4).requires_grad_(), nn.Linear(4, 4, dtype=DTYPE)
        s = torch.tensor(0.6, dtype=DTYPE, requires_grad=True).exp()
        value = functx.remat(lambda x: by_a_function(x, s, module, True))(x).sum()
        (g,) = torch.autograd.grad(value, x, create_graph=True)
        torch.autograd.grad(g.sum(), x)
        return [weakref.ref(t) for t in (s, *module.parameters())]

    seen = differentiated()
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)
