"""A region of several results of which the loss uses some; and what stand-ins are.

Both are in the known limits of docs/engine.md.
"""

import pytest
import torch
from cases import identity, numbers
from references import assert_same
from torch import nn

import functx

RUNS = 3  # the later ones may follow what the first one has left


class Heads(nn.Module):
    """``main`` is read by the first result alone, ``aux`` by the second."""

    def __init__(self):
        super().__init__()
        self.main, self.aux = nn.Parameter(numbers(3)), nn.Parameter(numbers(3, start=1.0))

    def forward(self, x):
        return (x * self.main).sin(), (x * self.aux).cos()


def hooked(remat):
    """The gradients that hooks of the parameters are called with, in backwards of one result."""
    heads, calls = Heads(), []
    for name, p in heads.named_parameters():
        p.register_hook(lambda g, n=name: calls.append((n, g)))
    region = remat(heads)
    for step in range(RUNS):
        region(numbers(3, start=step).requires_grad_())[0].sum().backward()
    return heads, calls


def test_parameters_that_only_an_unused_result_reads_get_no_gradient():
    heads, calls = hooked(functx.remat)
    plain, expected = hooked(identity)
    assert heads.aux.grad is None
    assert_same(heads.main.grad, plain.main.grad)
    assert_same([g for _, g in calls if g is not None], [g for _, g in expected])
    assert {name for name, g in calls if g is None} <= {"aux"}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_skips_them(optimizer):
    def trained(remat):
        heads = Heads()
        region = remat(heads)
        steps = optimizer(heads.parameters(), lr=0.1, weight_decay=0.5)
        for step in range(RUNS):
            steps.zero_grad()
            region(numbers(3, start=step).requires_grad_())[0].sum().backward()
            steps.step()
        return [p.detach() for p in heads.parameters()]

    assert_same(trained(functx.remat), trained(identity))


def test_gradients_that_are_asked_for_of_them_are_none():
    heads = Heads()
    x = numbers(3).requires_grad_()
    out = functx.remat(heads)(x)[0].sum()
    given = torch.autograd.grad(out, (heads.main, heads.aux), allow_unused=True)
    assert given[0] is not None
    assert given[1] is None


def test_a_region_sees_stand_ins():
    """By design: it runs on leaves of its own, so that its tape ends there."""
    x, seen = numbers(3).requires_grad_(), []
    h = x * 2

    def f(t):
        seen.append((t is h, t.is_leaf, t.grad_fn))
        return t.sin()

    functx.remat(f)(h)
    assert seen == [(False, True, None)]
