"""A region may do something else in a later run than in its first one."""

import contextlib
import types

import pytest
import torch
from cases import custom_function, identity, numbers, saves_inputs
from references import assert_same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import functx

from .programs import STACKS, same

# The step, and the tensors that leave without being returned:
now = types.SimpleNamespace(step=0, left=[])
LINEAR, V, W = nn.Linear(2, 2).double(), numbers(2, 2, start=3.0), numbers(2, 2, start=4.0)
cast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=bool(now.step))
PROGRAMS = {
    "a mask": lambda x: x[x > now.step / 2].sin(),
    "a cast": lambda x: cast()(torch.mm)(x.float(), x.float()).double(),
    "a number": lambda x: (x * (1.5 + now.step)).sin(),
    "another part without grad mode": lambda x: (
        torch.set_grad_enabled(not now.step)(torch.sin)(x)
        * torch.set_grad_enabled(bool(now.step))(torch.exp)(x)
    ),
    "another tensor at the same place": lambda x: (x * V).sin() * (W if now.step else V),
    "other weights": lambda x: functx.functional_call(
        LINEAR, {"weight": (V, W)[now.step]}, x
    ).sin(),
}


# The second run follows the first one, or departs from it.
RUNS = pytest.mark.parametrize("runs", [(0, 1, 0, 1), (0, 0, 1, 0, 1)], ids=["departs", "follows"])


@RUNS
@pytest.mark.parametrize("stack", ["backward", "grad", "grad(grad)", "jvp(grad)"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_are_those_of_the_run(name, stack, runs):
    def program(remat):
        region, found = remat(PROGRAMS[name]), []
        for now.step in runs:
            found.append(STACKS[stack](lambda x: region(x).square().sum(), numbers(2, 2)))
        return found

    assert_same(program(functx.remat), program(identity), 2.0**45 if name == "a cast" else 8)


def leaves(t):
    now.left += [t][: now.step]
    return t


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def branch(x, inside):
    with Mode() if inside else contextlib.nullcontext():
        return x.cos() if now.step else x.sin()


learned = custom_function(
    lambda x, w: x.clone(), lambda ctx, g: (g, g * ctx.saved_tensors[0]), saves_inputs
)
RIGHT = {
    "a result leaves": lambda x: leaves(x.sin()).exp(),
    "an argument leaves": lambda x: leaves(x).exp(),
    "a copy, or itself": lambda x: leaves(leaves(x.transpose(0, now.step) * 2).contiguous()).exp(),
    "a write to a view, or to a copy": lambda x: (
        now.buffer.transpose(0, 1 - now.step).reshape(-1).add_(1),
        x * now.buffer.sum(),
    )[1].sin(),
    "a leaf, read in the backward": lambda x: learned(x.sin(), now.leaf if now.step else V),
    "a product, read in the backward": lambda x: learned(x.sin(), now.product if now.step else V),
    "what a custom Function has made leaves": lambda x: (leaves(learned(x, now.leaf)), x.sin())[1],
    "another branch in a mode": lambda x: branch(x, True),
}
REFUSED = {
    "a leaf leaves": lambda x: x * leaves(torch.ones(2, 2, dtype=x.dtype, requires_grad=True)),
    "another branch in a mode that is new": lambda x: branch(x, now.step),
}


def steps(f, runs):
    def program(remat):
        region, found = remat(f), []
        for now.step in runs:
            now.left, now.buffer = [], numbers(2, 2, start=1.0)
            now.leaf, x = numbers(2, 2, start=2.0).requires_grad_(), numbers(2, 2).requires_grad_()
            now.product = now.leaf * 2
            loss = region(x * 1).sum() + sum((n + 2) * t.sum() for n, t in enumerate(now.left))
            loss.backward()
            found += [loss.detach(), x.grad, now.leaf.grad, now.buffer]
        return found

    return program


@RUNS
@pytest.mark.parametrize("name", RIGHT)
def test_what_leaves_is_written_or_read_is_that_of_the_run(name, runs):
    same(steps(RIGHT[name], runs)(functx.remat), steps(RIGHT[name], runs)(identity))


@RUNS
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_run_can_do_is_an_error_in_a_later_one_too(name, runs):
    with pytest.raises(functx.RematError, match=r"(?i)return the tensor|as an argument|outside"):
        steps(REFUSED[name], runs)(functx.remat)


def test_a_module_may_bind_a_buffer_to_what_to_returns():
    """As CTRL does: in a replay what it has bound belongs to a level that has ended."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(4))

        def forward(self, x):
            self.table = self.table.to(x.dtype)
            return (x * self.table).sin().sum()

    net, x = functx.remat(Table()), numbers(4)
    for _ in range(2):
        assert_same(functx.grad(net)(x), x.cos(), eps=4)
