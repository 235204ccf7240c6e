"""Which results of a body have what on their tapes.

NOTE [read by]
A pullback of some results reads what the tapes of those have saved. A node that torch generates
shows that, and so does a region's; what any other one below a result keeps is not known, and then
nothing is left out for that result that some tape holds. What no node shows (a value before an
in-place operation, a leaf) belongs to whatever comes after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from functx import _torch, _torch_nodes
from functx._remat._follows import made_by
from functx._remat._step import has_memory
from functx._remat._tangents import tangent_of

_LARGE = 4096


class Readers:
    """Which results read what, as bits of numbers: bit ``i`` is for the result at place ``i``.

    Args:
        results: of a body, while their tapes are there.

    Attributes:
        of: by the key of memory.
        untold: the results whose tapes do not tell all.
    """

    def __init__(self, results: Sequence[Tensor | None]) -> None:
        self.of: dict[int, int] = {}
        self.untold = 0
        # Looking for a tangent takes a view, also of the numbers that nodes keep as tensors.
        with _torch.without_modes() if _torch.forward_ad_level() >= 0 else nullcontext():
            try:
                self._find(results)
            except (RuntimeError, NotImplementedError):  # written to since, or without memory
                self.untold = -1

    def _find(self, results: Sequence[Tensor | None]) -> None:
        masks: dict[Any, int] = {}
        memory: dict[Any, list[int]] = {}
        below: dict[Any, list[Any]] = {}
        stack: list[tuple[Any, int]] = []
        for place, t in enumerate(results):
            if t is not None:
                stack += ((node, 1 << place) for node in _parts([t])[0])
        while stack:
            node, mask = stack.pop()
            known = masks.get(node, 0)
            if mask & ~known == 0:
                continue
            masks[node] = mask | known
            if node not in below:
                if len(below) == _LARGE:
                    self.untold = -1
                    return
                nodes = [each for each, _ in node.next_functions if each is not None]
                saved = _saved(node)
                if saved is None:
                    memory[node] = [-1]
                else:
                    # A tape of another level begins at what is saved at this one.
                    others, memory[node] = _parts(saved)
                    nodes += others
                below[node] = nodes
            stack += ((each, mask) for each in below[node])
        for node, mask in masks.items():
            for key in memory[node]:
                if key == -1:
                    self.untold |= mask
                else:
                    self.of[key] = self.of.get(key, 0) | mask


def _saved(node: Any) -> Sequence[Tensor] | None:
    """What a node keeps; ``None`` if that is not known."""
    saved = _torch_nodes.saved_by(node)
    if saved is None and made_by((node, 0))[0] is not node:
        return []
    if saved is None and hasattr(node, "payload"):
        beside = node.payload.keeps_beside()
        return None if beside is None else [*node.saved_tensors, *beside]
    return saved


def _parts(tensors: Iterable[Tensor]) -> tuple[list[Any], list[int]]:
    """The nodes and the memory of tensors, of what they wrap, and of their tangents."""
    dual = _torch.forward_ad_level() >= 0
    nodes, memory, stack = [], [], [*tensors]
    for t in stack:  # which grows
        if t.grad_fn is not None:
            nodes.append(t.grad_fn)
        if _torch.is_wrapped(t):
            stack.append(_torch.get_unwrapped(t))
        elif has_memory(t):
            memory.append(_torch.storage_key(t))
        tangent = tangent_of(t) if dual else None
        if tangent is not None:
            stack.append(tangent)
    return nodes, memory
