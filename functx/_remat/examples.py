"""What one example of a batch would run: policies are asked about that.

NOTE [one example]
Below vmap operations are batched, but a policy is asked about one example. So a call under vmap is
made beforehand on meta tensors of one example's shapes. The policy is asked about the operations
that this runs; what really runs is matched with them by order, kind and size. Only what is kept
depends on it, never a value.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._policies import Value
from functx._policy_kinds import is_dot
from functx._remat import levels
from functx._remat.operators import tensors_in


def expect(savers: Sequence[Any], func: Any, args: Any, kwargs: Any) -> None:
    """A call is about to be made: tell what it runs for one example, if it is batched."""
    examples = None
    if any(frame.kind is levels.VMAP for frame in levels.frames()):
        examples = _example(func, args, kwargs)
    for saver in savers:
        saver.examples = None if examples is None else [copy.copy(v) for v in examples]
        for value in saver.examples or ():
            value.memo = {}


class _Example(_torch.TorchDispatchMode):
    """Writes down what runs on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Value] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for name, value in (("device", "meta"), ("generator", None)):
            if any(a.name == name for a in func._schema.arguments):
                kwargs[name] = value  # nothing is computed, and no number drawn
        out = func(*args, **kwargs)
        self.ran.append(Value(func, args, kwargs, out))
        return out


def _example(func: Any, args: Any, kwargs: Any) -> list[Value] | None:
    """What a call runs on one example; ``None`` where only values tell."""

    def run() -> list[Value]:
        with _torch.without_dispatch_modes(), torch.no_grad(), _Example() as example:
            func(*_meta(list(args)), **_meta(kwargs))
        return example.ran

    try:
        return levels.at_depth(0, run)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def _meta(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    if isinstance(tree, dict):
        return {key: _meta(x) for key, x in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_meta(x) for x in tree])
    return tree


def same(value: Value, overload: Any, out: Any) -> bool:
    """Whether an operation on a batch is one that was run on an example."""
    one, batched = (sum(t.numel() for t in tensors_in((o,), None)) for o in (value.out, out))
    same_packet = overload.overloadpacket is value.func.overloadpacket
    if not same_packet and not (is_dot(overload) and is_dot(value.func)):
        return False
    return batched % one == 0 if one else batched == 0
