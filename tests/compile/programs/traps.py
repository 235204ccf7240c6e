"""What a trace could get wrong silently: errors that are caught, classes, sizes."""

import contextlib
import types

import torch
from torch import nn

from .collected import Programs, gradients, values

PROGRAMS = Programs()
program, refused, in_eager = PROGRAMS.right, PROGRAMS.refused, PROGRAMS.in_eager


@refused("reads the value of a tensor")
def swallowed_item(jit):

    def g(x):
        try:
            k = x[0].item()
        except Exception:
            k = 7.0
        return x * k

    return [jit(g)(values(3))]


@refused("reads the value of a tensor")
def swallowed_numpy(jit):

    def g(x):
        try:
            k = float(x.numpy()[0])
        except Exception:
            k = 7.0
        return x * k

    return [jit(g)(values(3))]


@refused("reads the value of a tensor")
def swallowed_bool(jit):

    def g(x):
        try:
            if x.sum() > 0:
                return x
        except Exception:
            pass
        return -x

    return [jit(g)(values(3))]


@refused("seeds a generator")
def swallowed_seed(jit):
    gen = torch.Generator()

    def g(x):
        try:
            gen.manual_seed(1)
            return x * torch.rand(3, generator=gen)
        except Exception:
            return x

    return [jit(g)(values(3)) for _ in range(2)]


@refused("registers a hook on")
def swallowed_hook(jit):
    w = values(3).requires_grad_()

    def g(x):
        with contextlib.suppress(Exception):
            w.register_hook(lambda g: g * 2)
        return x * w

    return gradients(jit(g)(values(3)), w)


@refused("compares type(x)")
def type_is(jit):
    f = jit(lambda x: x * 2 if type(x) is torch.Tensor else x * 3)
    return [f(values(3))]


@refused("compares type(x)")
def type_in(jit):
    f = jit(lambda x: x * 2 if type(x) in (torch.Tensor, nn.Parameter) else x * 3)
    return [f(values(3))]


@refused("compares type(x)")
def type_eq_captured(jit):
    w = nn.Parameter(values(3))
    f = jit(lambda x: x * 2 if type(w) == nn.Parameter else x * 3)
    return [f(values(3))]


@program
def dynamic_strides(jit):
    f = jit(lambda x: x * 2 if x.is_contiguous() else x * 3, dynamic=True)
    return [f(values(3, 4)), f(values(4, 3).t()), f(values(5, 4)), f(values(6, 3).t())]


@program
def dynamic_shapes_state(jit):
    o = types.SimpleNamespace(w=values(3))
    f = jit(lambda x: x.sum(0) * o.w, dynamic=True)
    r = [f(values(4, 3)), f(values(5, 3))]
    o.w = values(3, start=2)
    r.append(f(values(7, 3)))
    return r


@program
def dynamic_view_result(jit):
    f = jit(lambda x: (x.t(), x[1:], x), dynamic=True)
    r = []
    for n in (3, 5):
        x = values(n, 2)
        a, b, c = f(x)
        a.mul_(2)
        r += [a, b, c is x, x]
    return r


@program
def dynamic_write(jit):
    f = jit(lambda x: x.add_(1).sum(), dynamic=True)
    r = []
    for n in (3, 5, 4):
        x = values(n)
        r += [f(x), x]
    return r


@program
def dynamic_grad_history(jit):
    w = values(2).requires_grad_()
    f = jit(lambda x: (x.mul_(w), x.sum())[1], dynamic=True)
    r = []
    for n in (3, 5):
        x = values(n, 2)
        o = f(x)
        r += [o, *gradients(x.sin(), w)]
    return r


@program
def dynamic_branch_zero_one(jit):
    f = jit(lambda x: x * 2 if x.shape[0] > 1 else x * 3, dynamic=True)
    return [f(values(3)), f(values(1)), f(values(0)), f(values(2))]


@program
def dynamic_same_args(jit):
    f = jit(lambda a, b: a * 2 if a is b else a * b, dynamic=True)
    x = values(3)
    return [f(x, x), f(values(4), values(4)), f(values(5), values(5))]


@program
def dynamic_equal_sizes(jit):
    f = jit(lambda a, b: (a.sum() + b.sum()) * (2 if a.shape == b.shape else 3), dynamic=True)
    return [
        f(values(3), values(3)),
        f(values(3), values(4)),
        f(values(5), values(5)),
        f(values(6), values(5)),
    ]
