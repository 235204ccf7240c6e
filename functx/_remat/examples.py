"""The operations of one example of a batch, for the questions to a policy.

NOTE [one example]
Below vmap operations are batched, but a policy is asked about the operations of one example. So a
call under vmap is first made on meta tensors with the shapes of one example. The policy is asked
about the operations of that call. Then the real operations are matched with them by order, kind and
size. A wrong match changes only which values are saved, and never a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._core import tree
from functx._policies import Value, is_dot
from functx._remat import levels
from functx._remat.operators import tensors_in


def expect(savers: Sequence[Any], func: Any, args: Any, kwargs: Any) -> None:
    """Give the savers the operations of one example, before a call that is batched."""
    ran = None
    if any(frame.kind is levels.VMAP for frame in levels.frames()):
        with suppress(RuntimeError, TypeError, ValueError):  # the call may need the values
            ran = levels.at_depth(0, partial(_run_one, func, args, kwargs))
    for saver in savers:
        saver.examples = None if ran is None else [Value(*operation) for operation in ran]


class _Example(_torch.TorchDispatchMode):
    """Records operations, and runs them on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []  # functions, arguments and results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for name, value in (("device", "meta"), ("generator", None)):
            if any(a.name == name for a in func._schema.arguments):
                kwargs[name] = value  # nothing is computed, and no number drawn
        out = func(*args, **kwargs)
        self.ran.append((func, args, kwargs, out))
        return out


def _run_one(func: Any, args: Any, kwargs: Any) -> list[Any]:
    with _torch.without_dispatch_modes(), torch.no_grad(), _Example() as example:
        args, kwargs = tree.map_(_meta, (args, kwargs))
        func(*args, **kwargs)
    return example.ran


def _meta(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def is_batched_form(one: Any, batched: Any, out: Any, batched_out: Any) -> bool:
    """Whether an operation on a batch is an operation that ran on one example.

    Args:
        one: the overload that ran on one example.
        batched: the overload that ran on the batch. It may be another product of matrices, since
            vmap folds the batch into one.
        out: what the first returned, as its `Value` has it.
        batched_out: what the second returned.
    """
    same_packet = batched.overloadpacket is one.overloadpacket
    if not same_packet and not (is_dot(batched) and is_dot(one)):
        return False
    with _torch.without_proxies():  # a graph with symbols does not compute these
        size, batched_size = (
            sum(t.numel() for t in tensors_in((x,), None)) for x in (out, batched_out)
        )
        return bool(batched_size % size == 0 if size else batched_size == 0)
