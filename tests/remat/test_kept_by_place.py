"""Rule 3: tensors of Python's or NumPy's data, and others from outside, are kept by their place."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import functx

from .programs import STACKS, X, Y, check, numbers, right_or_raises, same

every_stack = pytest.mark.parametrize("stack", STACKS)

DATA = {
    "tensor of a number": lambda a: (a * torch.tensor(random.random())).sin(),
    "as_tensor of an array": lambda a: (a * torch.as_tensor(np.random.rand(3))).sin(),
    "from_numpy": lambda a: (a * torch.from_numpy(np.random.rand(3))).sin(),
    "a permutation": lambda a: a.exp()[torch.as_tensor(np.random.permutation(3))].sin() * Y,
    "a mask": lambda a: torch.where(torch.tensor(np.random.rand(3) < 0.5), a.exp(), a.sin()),
    "computed from before it is used": lambda a: (
        a * (torch.tensor(random.random()).exp() + torch.from_numpy(np.random.rand(3)).sin())
    ).sin(),
    "used twice": lambda a: (lambda t: (a * t).sin() * t)(torch.tensor(random.random())),
}


@pytest.mark.parametrize(
    ("name", "stack"),
    [(n, s) for i, n in enumerate(DATA) for j, s in enumerate(STACKS) if (i + j) % 4 == 0],
)
def test_data_is_not_made_again(name, stack):
    def program(remat):
        region = remat(DATA[name])
        return STACKS[stack](lambda x: (region(region(x)) * Y).sum(), X)

    check(program)


@pytest.mark.parametrize("name", ["a permutation", "from_numpy"])
def test_data_in_a_region_in_a_region(name):
    def program(remat):
        inner = remat(DATA[name])
        region = remat(lambda x: inner(DATA[name](x)) * inner(x))
        return functx.grad(lambda x: (region(x) * Y).sum())(X)

    check(program)


def test_an_array_that_changes_after_torch_has_copied_it_changes_nothing():
    array = np.ones(3)
    x = X.clone().requires_grad_()
    y = functx.remat(lambda x: (x.sin() * torch.tensor(array)).sin())(x)
    array[:] = 7
    same(
        torch.autograd.grad(y.sum(), x)[0],
        functx.grad(lambda x: x.sin().sin().sum())(X),
    )


class Rope(nn.Module):
    """A table that the first call fills, as many models have it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.tables, self.table = kind, {}, None

    def forward(self, x):
        if self.kind == "a dict" and len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x), dtype=x.dtype).exp().cos()
        if self.kind == "an attribute" and self.table is None:
            self.table = torch.arange(len(x), dtype=x.dtype).exp().cos()
        table = self.tables[len(x)] if self.kind == "a dict" else self.table
        return (x.sin() * table).sin()


@pytest.mark.parametrize(
    ("kind", "stack"), [("a dict", "backward"), ("an attribute", "grad"), ("a dict", "vjp")]
)
class TestLazilyFilledCaches:
    def program(self, stack, kind, regions, called_before=False):
        def program(remat):
            rope = Rope(kind)
            if called_before:
                rope(X)

            def loss(x):
                for _ in range(regions):
                    x = remat(rope)(x)
                return x.sum()

            return STACKS[stack](loss, X)

        return program

    @pytest.mark.parametrize("regions", [1, 3])
    def test_are_right_or_a_departure_says_what_they_are(self, stack, kind, regions):
        right_or_raises(self.program(stack, kind, regions), "made at the first call and kept")

    def test_are_right_where_they_were_filled_before(self, stack, kind):
        check(self.program(stack, kind, 3, called_before=True))


class TestCapturesByPlace:
    @every_stack
    def test_another_captured_tensor_in_the_same_place(self, stack):
        def program(remat):
            def loss(x):
                ws = [Y, 5 * Y]
                y = remat(lambda x: (x * ws[0]).sin() * x)(x)
                ws.reverse()
                return y.sum()

            return STACKS[stack](loss, X)

        check(program)

    def test_two_that_trade_places_are_right_or_an_error(self):
        """Both are known to the replay by then, as other inputs."""

        def program(remat):
            ws = [numbers(3, start=i).requires_grad_() for i in (1.0, 2.0)]
            both = list(ws)
            y = remat(lambda x: (x * ws[0]).sin() * (x * ws[1]).exp() * ws[0])(X)
            ws.reverse()
            return torch.autograd.grad(y.sum(), both)

        right_or_raises(program)
