"""Jagged nested tensors that a region makes: their symbolic sizes are compared up to renaming."""

import subprocess
import sys
import textwrap

import pytest
import torch
from cases import numbers
from references import assert_same
from torch.nn import functional as F

import functx

WEIGHT = numbers(4, 4)


def from_offsets(x):
    rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 5, 6]))
    return (rows.sin() * 2).values()


def from_a_list(x):
    rows = torch.nested.as_nested_tensor([x[:2], x[2:5], x[5:]], layout=torch.jagged)
    return F.softmax(rows, -1).values() * x


def padded(x):
    rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))
    return F.linear(rows, WEIGHT * x.sum()).to_padded_tensor(0.0).sum(1)


def of_two_kinds(x):
    one = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))
    other = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 6]))
    return (one * one.cos()).values() + (other.exp() * other).values()


@pytest.mark.parametrize("f", [from_offsets, from_a_list, padded, of_two_kinds])
def test_a_region_makes_jagged_tensors(f):
    def found(region):
        gradients, g = [], region(f)
        for step in range(3):
            x = numbers(6, 4, start=float(step)).requires_grad_()
            gradients += torch.autograd.grad(g(x).square().sum(), x)
        return gradients

    assert_same(found(functx.remat), found(lambda f: f), eps=64)


def test_a_replay_with_other_offsets_is_an_error():
    offsets = [torch.tensor([0, 2, 6])]

    def f(x):
        one = torch.nested.nested_tensor_from_jagged(x, offsets[0])
        other = torch.nested.nested_tensor_from_jagged(x, offsets[-1])
        return (one.sin() if len(offsets) > 1 else one.sin() + other.cos()).values()

    x = numbers(6, 4).requires_grad_()
    y = functx.remat(f)(x)
    offsets.append(torch.tensor([0, 3, 6]))
    with pytest.raises(functx.ReplayError, match="rule 3"):
        y.sum().backward()


def test_the_first_jagged_tensor_of_a_process_can_be_made_in_a_region():
    code = """
        import functx
        import torch

        def f(x):
            rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))
            return rows.sin().values()

        x = torch.ones(6, 4, requires_grad=True)
        functx.remat(f)(x).sum().backward()
        assert torch.equal(x.grad, torch.cos(torch.ones(6, 4)))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
