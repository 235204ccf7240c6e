"""Calls that are as expected, made without writing them down anew.

A log that is followed says of each call whether it is `quick`: given nothing but tensors and plain
values, and making one tensor of them, no leaf, which writes and draws nothing. Such a call is
compared in one pass, before it is made; the log of this run has the entry of the other one.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from functx._remat.calls import ATOMS, Call, in_a_row, is_plain


def as_due(listener: Any, due: Call, args: Any) -> Any:
    """The arguments of a call that is as expected, foreign ones replaced; else ``None``."""
    if len(args) != len(due.given) or due.grad is not torch.is_grad_enabled():
        return None
    known, operands = listener.known, args
    for i, wanted in enumerate(due.given):
        a = args[i]
        kind = type(a)
        if type(wanted) is int:
            k = known.get(id(a))
            if k is not None and k[0]() is a:
                if k[1] != wanted:
                    return None
            elif wanted < 0 and isinstance(a, Tensor):
                t = listener.standin_for(a, wanted)
                if t is None:
                    return None
                if operands is args:
                    operands = [*args]
                operands[i] = t
            else:
                return None
        elif kind in ATOMS:
            if kind is not type(wanted[0]) or a != wanted[0]:
                return None
        elif not is_plain(a) or tuple(a) != wanted[0]:
            return None
    return operands


def call(listener: Any, due: Call, operands: Any, args: Any, kwargs: Any) -> Any:
    """Make a call that is as expected; ``args`` and ``kwargs`` are as the program gave them."""
    listener.advance(due)
    if kwargs:
        n = len(args)
        out = due.func(*operands[:n], **dict(zip(operands[n::2], operands[n + 1 :: 2])))
    else:
        out = due.func(*operands)
    number, shape, dtype = due.results[0]
    if out.shape == shape and out.dtype is dtype and id(out) not in map(id, operands):
        listener.known[id(out)] = ref(out), number
        if number in listener.wanted:
            listener.wanted[number] = out
        return out
    call = listener.calls[-1] = Call(due.func, due.given)  # it returns something else
    listener.last = call, due
    return listener.returned(out, in_a_row(args, kwargs or {}), operands)
