"""The loops that `remat_loop` and `remat_scan` stand for."""

import torch

import functx


def scan(body, carry, xs=None, length=None, reverse=False, **_):
    steps = range(len(xs)) if length is None else range(length)
    ys = {}
    for i in reversed(steps) if reverse else steps:
        carry, ys[i] = body(carry, None if xs is None else xs[i])
    return carry, None if ys[0] is None else torch.stack([ys[i] for i in steps])


def of_steps(body, x, n):
    for _ in range(n):
        x = body(x)
    return x


def while_it_holds(body, state, cond, **_):
    while bool(cond(state)):
        state = body(state)
    return state


def counted(body, x, n):
    """`of_steps` by a loop of so many steps."""
    return functx.remat_loop(body, x, n, slots=3)


def until(body, x, n):
    """`of_steps` by a loop that goes on while a condition holds."""
    return functx.remat_loop(lambda s: (s[0] + 1, body(s[1])), (0, x), lambda s: s[0] < n)[1]
