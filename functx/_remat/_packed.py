"""Duals that a region gave, whose part of a second derivative can't be handed on.

NOTE [packed]
Under forward mode a region is lowered to a function of primals and tangents. What its pullback
reads of a result (``NOTE [read results]`` in `_read_results`) is two tensors of a level outside of
that of the duals, and who looks at a primal there looks at an alias of it, made when the dual was
packed. Where somebody does, in a second derivative, that is an error. So the node of such a
pullback has edges to them all, and a hook before it that looks.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from functx import _torch, _torch_nodes
from functx._errors import RematError
from functx._remat._hung_inside import OfADual
from functx._remat._partial import is_asked_for


class Packed:
    """A dual that a region gave, or a part of one, as a level with a tape knows it."""

    def __init__(self, t: Tensor) -> None:
        t.register_hook(_torch_nodes.EngineHook())
        self._hooks = weakref.ref(_torch_nodes.hooks_of(t))
        self._edge = id(t.grad_fn), t.output_nr
        self._t = weakref.ref(t)
        self.level = _torch.wrapper_level(t) if _torch.is_wrapped(t) else 0

    def primal(self) -> Tensor | None:
        """The primal, if somebody holds the dual."""
        t = self._t()
        if t is None or (id(t.grad_fn), t.output_nr) != self._edge:
            return None
        return forward_ad.unpack_dual(t).primal if _torch.forward_ad_level() >= 0 else t

    def is_looked_at(self) -> bool:
        """Whether it has a hook, its gradient is retained or asked for."""
        t = self._t()
        retained = t is not None and t.retains_grad
        return retained or _torch_nodes.has_users_hook(self._hooks()) or is_asked_for(*self._edge)


def note_packed(region: Any, dual: Tensor) -> None:
    """A region gives a dual."""
    found, t = [], dual
    while True:
        if t.grad_fn is not None:
            found.append(t)
        if not _torch.is_wrapped(t):
            break
        t = _torch.get_unwrapped(t)
    if found and torch.is_grad_enabled():
        with _torch.without_modes():
            region.packed = [*_of(region), *map(Packed, found)]
            for t in found if getattr(region.reached, "inside", None) else ():
                t.register_hook(OfADual(t, region.options.name))


def packed_by(regions: Collection[Any], level: int) -> list[Packed]:
    """The duals that some regions gave, and their tangents, as one level knows them."""
    found = [p for region in regions for p in _of(region) if p.level == level]
    results = (ref() for region in regions for ref in region.taped.get(level, {}).values())
    with _torch.without_modes():
        return found + [Packed(t) for t in results if t is not None and t.grad_fn is not None]


def _of(region: Any) -> Sequence[Packed]:
    return getattr(region, "packed", ())  # few have any


class Refusing:
    """A hook before the node of a pullback that reads duals."""

    def __init__(self, packed: Sequence[Packed], name: str) -> None:
        self._packed = packed
        self._name = name

    def __call__(self, cotangents: Any) -> None:
        if any(one.is_looked_at() for one in self._packed):
            raise RematError(
                f"remat: a second derivative flows, by way of the {self._name}, to a result "
                "of a region that has a tangent, and somebody looks at that: the result has a "
                "hook, its gradient is retained or asked for. It would be given a part. Hang the "
                "hook inside of the region, or let the region return result.clone()."
            )
