"""A module, and hooks of each kind for it."""

from collections import OrderedDict

import torch
from cases import DTYPE
from torch import nn


def after(k):
    return lambda module, gi, go: (gi[0] * k,)


def before(k):
    return lambda module, go: (go[0] * k,)


def forward(k):
    return lambda module, args, y: y * k


def pre(k):
    return lambda module, args: (args[0] * k,)


REGISTER = {
    "register_full_backward_hook": after,
    "register_full_backward_pre_hook": before,
    "register_forward_hook": forward,
    "register_forward_pre_hook": pre,
}
BACKWARD = [*REGISTER][:2]


def net():
    torch.manual_seed(0)
    return nn.Linear(3, 3, dtype=DTYPE)


def ones():
    return torch.ones(2, 3, dtype=DTYPE, requires_grad=True)


def count(module):
    """How many hooks there are, of each kind."""
    return torch.tensor([len(d) for d in dicts(module)])


def dicts(module):
    return [d for name, d in vars(module).items() if "_hooks" in name and type(d) is OrderedDict]
