"""Modules that a region reaches through objects of the user's: what they count, they count once."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPE, numbers
from programs import identity
from references import assert_same
from torch import nn

import functx


class PowerIteration(nn.Module):
    """Rebinds a buffer and a number at each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 3))
        self.register_buffer("u", torch.ones(3, dtype=DTYPE))
        self.calls = 0

    def forward(self, x):
        with torch.no_grad():
            u = self.weight @ self.u
            self.u = u / u.norm()
        self.calls += 1
        return (x @ self.weight / (self.u @ self.weight @ self.u)).tanh()


@dataclasses.dataclass
class Holder:
    model: object


class Slots:
    __slots__ = ("model",)

    def __init__(self, model):
        self.model = model


class Callable:
    def __init__(self, model):
        self.parts = SimpleNamespace(models=[{"a": model}])

    def __call__(self, x):
        return self.parts.models[0]["a"](x)


def of_an_object(model):
    holder = Holder(model)
    return lambda x: holder.model(x)


def of_slots(model):
    holder = Slots(model)
    return lambda x: holder.model(x)


def in_a_closure(model):
    function = Callable(model)
    return lambda x: function(x)


def by_default(model):
    made = Holder(model)
    return lambda x, holder=made: holder.model(x)


@pytest.mark.parametrize("reach", [of_an_object, of_slots, Callable, in_a_closure, by_default])
@pytest.mark.parametrize("calls", [1, 2])
def test_counts_once(reach, calls):
    """With two calls before the backward, the first replay must not bring back what it found."""

    def program(remat):
        model = PowerIteration()
        region = remat(reach(model))
        x = numbers(2, 3, start=1.0).requires_grad_()
        y = [region(x * i) for i in range(1, calls + 1)]
        gradients = torch.autograd.grad(sum(y).sum(), [x, model.weight])
        assert model.calls == calls
        return y, gradients, model.u

    assert_same(program(functx.remat), program(identity), eps=16)
