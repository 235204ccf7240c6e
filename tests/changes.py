"""Bodies that do something else where a flag is set: ``CHANGES``, by what changes."""

import contextlib

import torch
from cases import numbers
from torch.utils._python_dispatch import TorchDispatchMode

import functx

W = numbers(4, 4, start=0.3)


def both(x):
    a, b = torch.sin(x), torch.cos(x)
    return a, b


CONSTANTS = [numbers(3, 4, start=1.0), numbers(3, 4, start=2.0)]


def of_constants(x, flag):
    """What is chosen is on no tape."""
    a, b = torch.sin(CONSTANTS[0]), torch.exp(CONSTANTS[1])
    return x * (a, b)[flag] + x.exp() * 0 * (a.sum() + b.sum())


def without_grad(x, flag):
    with torch.set_grad_enabled(not flag):
        h = torch.sin(x * 2)
    return h * x


def in_place(x, flag):
    h = x * 2
    return (h.sin_() if flag else h.sin()) * x


def kept(x, flag, log=[]):  # noqa: B006
    log.clear()
    h = torch.exp(x * 2)
    if flag:
        log.append(h)
    return torch.sin(x)


def cast(x, flag):
    with torch.autocast("cpu", enabled=flag):
        h = x.float() @ W.float()
    return h.double() * x


def hooked(x, flag):
    h = torch.sin(x)
    if flag:
        h.register_hook(lambda g: g * 2)
    return h * x


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


def unseen(x, flag):
    """What the derivative of the operation reads is dead where that does not run."""
    h = torch.sin(x * 2)
    if flag:
        with torch._C.DisableTorchFunction():
            h.sin_()
    return h + x


def compressed(x, flag):
    """What the tape holds is rounded."""
    h = torch.sin(x * 2)
    if flag:
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.float, torch.Tensor.double):
            return h.exp() * x
    return h.exp() * x


class Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.mul(64).round().div(64) if func is torch.ops.aten.sin.default else out


def under_a_mode(x, flag):
    with Rounding() if flag else contextlib.nullcontext():
        return torch.sin(x * 2) * x


CHANGES = {
    "another of two results": lambda x, flag: torch.mul(*(both(x)[flag], x)) + sum(both(x)),
    "another of two results with one tape": lambda x, flag: (
        (torch.sin(x * 1), torch.sin(x * 2))[flag].exp() * x
    ),
    "another of two results on no tape": of_constants,
    "another branch": lambda x, flag: torch.exp(x) * x if flag else torch.sin(x) * x,
    "one operation more": lambda x, flag: torch.exp(torch.sin(x) if flag else x) * x,
    "one operation less": lambda x, flag: torch.exp(x if flag else torch.sin(x)) * x,
    "another number": lambda x, flag: torch.exp(x * (3 if flag else 2)) * x,
    "a number of another type": lambda x, flag: torch.exp(x * (2.0 if flag else 2)) * x,
    "numbers in another order": lambda x, flag: (
        torch.where(x > 0.5, *((2.0, x) if flag else (x, 2.0))) * x
    ),
    "a number to the power of": lambda x, flag: torch.pow(*((2, x) if flag else (x, 2))) * x,
    "the sign of a zero": lambda x, flag: torch.copysign(x, -0.0 if flag else 0.0) * x,
    "a bound of the other kind": lambda x, flag: x.clamp(**{"min" if flag else "max": 0.5}) * x,
    "a list in place of a tuple": lambda x, flag: x.exp()[[0, 1] if flag else (0, 1)].sum() * x,
    "another keyword": lambda x, flag: x.exp().sum(**{"dim" if flag else "axis": 0}) * x,
    "another value of a keyword": lambda x, flag: torch.add(x.exp(), x, alpha=3 if flag else 2) * x,
    "the same by keyword": lambda x, flag: (
        torch.mul(x.exp(), **{"other": x}) if flag else x.exp() * x
    ),
    "another constant by keyword": lambda x, flag: (
        torch.nn.functional.layer_norm(x.exp(), (4,), weight=CONSTANTS[flag][0]) * x
    ),
    "another constant": lambda x, flag: torch.exp(x * CONSTANTS[flag]) * x,
    "a capture that requires grad": lambda x, flag: (
        torch.exp(x * (CONSTANTS[0].clone().requires_grad_() if flag else CONSTANTS[0])) * x
    ),
    "no grad": without_grad,
    "in place": in_place,
    "unseen": unseen,
    "left behind": kept,
    "autocast": cast,
    "a hook": hooked,
    "a custom function": lambda x, flag: torch.exp(Cubed.apply(x) if flag else x**3) * x,
    "a region inside": lambda x, flag: (
        torch.exp(functx.remat(torch.sin)(x) if flag else torch.sin(x)) * x
    ),
    "handed back": lambda x, flag: x if flag else torch.exp(x),
    "looked at": lambda x, flag: torch.exp(x) * (x.exp().sum().item() if flag else 2.0),
    "a shape": lambda x, flag: torch.exp(x[: 2 if flag else 3]).sum(0) * x,
    "a shape that values decide": lambda x, flag: torch.exp(x[x > (0.5 if flag else 0)]).sum() * x,
    "hooks on what is saved": compressed,
    "a dispatch mode": under_a_mode,
    "a dtype": lambda x, flag: torch.exp(x.float() if flag else x) * x,
}
