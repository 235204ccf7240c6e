"""Collects programs, and says what is expected of each.

A program is a function of ``jit``, which makes functions of its own, calls them several times with
state changed in between, and returns all that can be seen. With ``jit`` that does nothing it is the
eager program.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Program:
    run: object
    outcome: str
    words: str = ""


class Programs(list):
    """The programs of a file."""

    def right(self, run):
        """It gives what it gives in eager, compiled and without a warning."""
        self.append(Program(run, "right"))
        return run

    def refused(self, words):
        """A `functx.TracingError` with these words."""
        return lambda run: self.append(Program(run, "refused", words)) or run

    def in_eager(self, words):
        """It gives what it gives in eager, and a warning has these words."""
        return lambda run: self.append(Program(run, "in eager", words)) or run


def values(*shape, start=0.0):
    count = torch.arange(float(math.prod(shape)), dtype=torch.float64)
    return (count + 1 + start).reshape(shape).sin()


def gradients(result, *tensors):
    return [*torch.autograd.grad(result.sum(), tensors, allow_unused=True)]


def linear(inputs=3, outputs=2, bias=True, start=0):
    layer = nn.Linear(inputs, outputs, bias=bias).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(values(*p.shape, start=start))
    return layer
