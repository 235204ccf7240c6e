"""The programs whose counts and residuals JAX gives too: three layers, and two named sines."""

import torch
from cases import numbers

import functx

WEIGHTS = [numbers(5, 5, start=float(i)) / 2 for i in range(3)]
X = numbers(4, 5)


def layers(weights, x):
    for w in weights:
        x = torch.sin(x @ w)
    return x


def named(x):
    inner = functx.checkpoint_name(torch.sin(x), "a")
    return functx.checkpoint_name(torch.sin(inner), "b")
