"""What tests share: a backend that compiles nothing, a gradient from outside, two functions."""

import torch
from cases import numbers
from references import gradients
from torch import nn

WEIGHTS = numbers(3, 4, 4)
LAYER = nn.LayerNorm(4).double()


def as_traced(module, _):
    """A backend that compiles nothing."""
    return module


def backward(f):
    return lambda x: gradients(f, x)[0]


def writes(region):
    def f(x):
        y = (x @ WEIGHTS[0]).clone()
        y.mul_(2).add_(1)
        y[0].sin_()
        return torch.cos(y).sum()

    return region(f)


def norm(region):
    return region(lambda x: LAYER(torch.tanh(x @ WEIGHTS[0])).cos().sum())
