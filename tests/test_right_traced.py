"""Graphs traced of programs with regions, and differentiated afterwards: no gradient is cut off."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import functx
from functx import checkpoint_policies as cp


class Net(nn.Module):
    def __init__(self, remat):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            [remat(nn.Sequential(nn.Linear(3, 3), nn.Tanh())) for _ in range(2)]
        )
        self.head = nn.Linear(3, 2)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gradients(remat, traced):
    net = Net(remat)
    traced(net, numbers(4, 3))(numbers(4, 3)).square().sum().backward()
    return [p.grad for p in net.parameters()]


def check(traced):
    expected = gradients(identity, traced)
    assert all(g is not None for g in expected)
    assert_same(gradients(functx.remat, traced), expected)


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx(pre_dispatch):
    check(lambda net, x: make_fx(lambda x: net(x), pre_dispatch=pre_dispatch)(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_export(strict):
    def exported(net, x):
        program = torch.export.export(net, (x,), strict=strict).module()
        copied = dict(program.named_parameters())

        def run(x):
            out = program(x)
            for name, p in net.named_parameters():  # it has parameters of its own
                copied[name].register_hook(lambda g, p=p: setattr(p, "grad", g))
            return out

        return run

    check(exported)


@pytest.mark.parametrize("policy", [None, cp.dots_saveable])
@pytest.mark.parametrize("nested", [False, True])
def test_a_graph_of_gradients(policy, nested):
    """A step is traced with its backward pass, and differentiated once more."""

    def remat_it(f):
        return functx.remat(f, policy=policy)

    def program(remat):
        def body(x, w):
            return torch.tanh(torch.sin(x) @ w) @ w

        region = remat(
            (lambda x, w: remat(body)(x, w) + x) if nested else lambda *a: body(*a) + a[0]
        )

        def step(x, w):
            return torch.autograd.grad(region(x, w).square().sum(), [x, w], create_graph=True)

        x, w = numbers(4, 3).requires_grad_(), numbers(3, 3, start=0.5).requires_grad_()
        first = make_fx(step)(x, w)(x, w)
        return first, torch.autograd.grad(sum(g.square().sum() for g in first), [x, w])

    assert_same(program(remat_it), program(identity), 512.0)
