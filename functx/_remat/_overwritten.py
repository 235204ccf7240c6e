"""Inputs that a region writes to though a tape knows them.

NOTE [overwritten]
Without remat, ``h.mul_(2)`` gives ``h`` a new history. The body of a region works on a stand-in
over the same memory, so the value is there at once; the history has to follow. Three things make
it right at every level of transforms:

- Before the write, a copy of ``h`` with its history takes its place among what the nodes of the
  region keep. Replays start from it, and write to a copy of that.
- The stand-in is a leaf of the throw-away tape, and torch lets nobody write to a leaf. So it is
  made to follow from a leaf, in place: the body may hold it, and views of it. So is its tangent,
  to which forward mode writes.
- What the stand-in has become is one more result of the region; when the nodes are there, it is
  written back to ``h``, which changes its history and no memory.

Writes that torch does not record (under ``no_grad``, through ``detach()``) change no history; they
only need the copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from functx import _torch, _torch_nodes
from functx._errors import RematError
from functx._remat._holders import base_of
from functx._remat._levels import at_level
from functx._remat._region import Region
from functx._remat._tracker import SILENT, tracking
from functx._remat._watch import Watcher, watching
from functx._torch_edges import requires_grad_anywhere
from functx._torch_memory import not_counted


class Writes:
    """What the first run of a region writes to, of what it did not make.

    Args:
        region: whose first run it is.
        ledger: of that run, if it has one.
        leaves: stand-ins that are leaves of the throw-away tape, by id.

    Attributes:
        plain: whether these were constants, which have no history.
    """

    plain = True

    def __init__(self, region: Region, ledger: Watcher | None, leaves: dict[int, Tensor]) -> None:
        self._region = region
        self._ledger = ledger
        self._leaves = leaves
        self._storages: list[int | None] = []
        self._written: set[int] = set()
        # Those that no tape knew at the first write.
        self._valued: set[int] = set()
        self._owners: dict[int, Tensor] = {}
        # Those whose history the body changed.
        self._standins: dict[int, Tensor] = {}

    def about_to(
        self,
        tensors: Sequence[Tensor],
        origins: Sequence[tuple[str, int]],
        standins: Sequence[Tensor],
        originals: Sequence[Tensor],
    ) -> None:
        """Some of ``tensors`` are about to be written to.

        Args:
            tensors: arguments of an operation, or of a region inside this one.
            origins: kind and number of each external.
            standins: what the body sees of each.
            originals: what they stand for.
        """
        storages = {storage_of(t) for t in tensors} - {None}
        region = self._region
        if region.options.replay:
            self._in_a_pullback(tensors, standins)
        self._storages += map(storage_of, standins[len(self._storages) :])
        for position, storage in enumerate(self._storages):
            standin = standins[position]
            if storage not in storages and not any(t is standin for t in tensors):
                continue
            if storage is not None:
                self._written.add(storage)
            kind, number = origins[position]
            self.plain = self.plain and kind == "constant"
            caller = region.constants[number].value if kind == "constant" else None
            if caller is None:
                caller = self._owners.get(position, _inputs(region.frames[-1], kind)[number])
            if region.outer is not None:  # first: it may make a leaf of its tape writable
                with region.outer_levels():
                    region.outer.written([originals[position], standin, caller])
            if kind == "constant":
                with self._unrecorded():
                    region.constants[number].about_to_be_written()
            elif position in self._valued or not requires_grad_anywhere(standin):
                self._keep_value(position, standin)
            elif not _torch.tracing():  # where torch says what it allows
                self._keep_history(position, kind, number)
                seen = any(is_view_of(t, standin) for t in tensors)
                if seen and torch.is_grad_enabled() and may_be_written(caller):
                    self._change_history(position, standin)

    def _in_a_pullback(self, tensors: Sequence[Tensor], standins: Sequence[Tensor]) -> None:
        """Hooks may write to tensors from outside, which is like what the engine hands them."""
        others = [t for t in tensors if all(t is not standin for standin in standins)]
        whole = [t for t in map(_whole, others) if all(t is not one for one in others)]
        region = self._region
        region.written_unseen = [*region.written_unseen, *map(weakref.ref, (*others, *whole))]
        if region.outer is not None:
            region.outer.written(others)

    def _unrecorded(self) -> watching:
        """What is kept for a region is recorded by those around it, not by itself."""
        return watching(True, but=self._ledger)

    def _keep_value(self, position: int, standin: Tensor) -> None:
        region = self._region
        self._valued.add(position)
        base = base_of(standin)
        if id(base) not in region.before:
            with self._unrecorded(), _torch.cleared_interpreter_stack():
                region.before[id(base)] = (base, base.detach().clone())
        region.rewritten.add(position)

    def _keep_history(self, position: int, kind: str, number: int) -> None:
        if position not in self._owners:
            self._owners[position] = keep(self._region, kind, number, self._unrecorded)
        self._region.rewritten.add(position)

    def _change_history(self, position: int, standin: Tensor) -> None:
        if position not in self._standins:
            let_write(standin, self._leaves)
            self._standins[position] = standin

    def further_results(
        self, origins: Sequence[tuple[str, int]], standins: Sequence[Tensor]
    ) -> list[Tensor]:
        """What stand-ins have become whose history the body changed; the region is told."""
        if not self._written and not self._standins:
            return []
        region = self._region
        for position, storage in enumerate(self._storages):
            if storage in self._written and position not in self._standins:
                self._give_history(position, *origins[position], standins[position])
        self.plain = self.plain and not self._standins
        region.overwritten = list(self._standins)
        region.owners = [self._owners[position] for position in self._standins]
        return list(self._standins.values())

    def _give_history(self, position: int, kind: str, number: int, standin: Tensor) -> None:
        """No tape knew it before the body wrote to it; now one does, or it has a tangent."""
        region = self._region
        if len(region.frames) > 1:
            if position in self._owners:
                return  # its history is what it was
            owner = None if kind == "constant" else _inputs(region.frames[-1], kind)[number]
            known = requires_grad_anywhere(standin) or any(f.dual() for f in region.frames)
            if owner is not None and owner is not standin and known:
                self._standins[position], self._owners[position] = standin, owner
            return
        # It is the caller's tensor itself.
        lenient = region.options.replay or region.options.determinism_check == "none"
        if lenient or standin.grad_fn is None or not _torch.detachable(standin):
            return
        if kind != "constant":
            inputs = _inputs(region.frames[0], kind)
            inputs[number] = region.as_it_was(inputs[number])
        self._standins[position] = self._owners[position] = standin

    def refuse_aliases(self, standins: Sequence[Tensor]) -> None:
        """Refuse writes to memory that a region knows by several tensors: copies would differ."""
        if not self._written:
            return
        seen: set[int] = set()
        for storage in map(storage_of, standins):
            if storage in self._written and storage in seen:
                raise RematError(
                    f"remat: the region {self._region.options.name!r} writes in place to memory "
                    "that it reaches as several tensors (a tensor and a view of it, most likely), "
                    "so a replay could not give it the same again. Pass one of them, and make the "
                    "others inside."
                )
            if storage is not None:
                seen.add(storage)


def storage_of(t: Tensor) -> int | None:
    """The key of the memory inside all wrappers, if there is one."""
    try:
        return _torch.storage_key(base_of(t))
    except (RuntimeError, NotImplementedError):
        return None


def keep(region: Region, kind: str, number: int, unrecorded: Callable[[], Any]) -> Tensor:
    """Let nodes keep a copy, with its history, of an input that is about to be written to.

    Args:
        region: which is in its first run.
        kind: of the external: ``"input"`` or ``"capture"``.
        number: which one.
        unrecorded: a context that hides what runs from the region's own ledger.

    Returns:
        The caller's tensor.
    """
    frames = region.frames[::-1]
    values = _inputs(frames[0], kind)[number : number + 1]
    (caller,) = values
    with _levels(region)(), tracking(SILENT), unrecorded(), torch.enable_grad():
        values = [caller.clone()]
    with _levels(region)(), tracking(SILENT):
        for frame in frames:
            _inputs(frame, kind)[number : number + len(values)] = values
            first = 0 if kind == "input" else len(frame.inputs)
            slots = frame.slots[first + number : first + number + len(values)]
            following = sum(frame.width(s) for s in frame.slots[first : first + number])
            known = len(frame.slots)
            with at_level(frame.level):
                values = frame.lower_all(values)
            if frame.slots[known:] != slots:
                raise RematError(
                    f"remat: the region {region.options.name!r} writes in place to a tensor of "
                    f"shape {tuple(caller.shape)} that it did not make, and a copy of it has "
                    "another layout. Write to a .clone() of it and return that."
                )
            del frame.slots[known:]
            number = following
    return caller


def _inputs(frame: Any, kind: str) -> list[Tensor]:
    inputs: list[Tensor] = frame.inputs if kind == "input" else frame.captured
    return inputs


def _levels(region: Region) -> Callable[[], AbstractContextManager[Any]]:
    return region.outer_levels or _torch.cleared_interpreter_stack


def is_view_of(t: Tensor, whole: Tensor) -> bool:
    """Whether ``t`` is ``whole``, or a view of it that the tape of some level knows."""
    while t is not whole and _whole(t) is not _whole(whole):
        if not (_torch.is_wrapped(t) and _torch.is_wrapped(whole)):
            return False
        t, whole = _torch.get_unwrapped(t), _torch.get_unwrapped(whole)
    return True


def _whole(t: Tensor) -> Tensor:
    """What ``t`` is a view of: a dual is one of what it was made of."""
    base = _torch.view_base(t)
    return t if base is None else base


def may_be_written(t: Tensor) -> bool:
    """Whether torch would let its owner write to ``t``: no leaf, at any level."""
    while True:
        if t.requires_grad and t.grad_fn is None and not _torch.is_batched(t):
            return False
        if not _torch.is_wrapped(t):
            return True
        t = _torch.get_unwrapped(t)


class _Following(_torch.SingleLevelFunction):
    """Gives a tensor that has no history that of another, in place."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, leaf: Tensor) -> Tensor:
        ctx.mark_dirty(t)
        return t

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Tensor]:
        return None, cotangent


_torch_nodes.let_compiled_autograd_see(_Following)


def let_write(standin: Tensor, leaves: dict[int, Tensor]) -> None:
    """Make a stand-in that is a leaf, at any level, follow from a leaf."""
    allowed = _torch.get_single_level_function_allowed()
    _torch.set_single_level_function_allowed(True)
    try:
        with tracking(SILENT), torch.enable_grad():
            _follow(standin, leaves)
    finally:
        _torch.set_single_level_function_allowed(allowed)


def _follow(t: Tensor, leaves: dict[int, Tensor]) -> None:
    wrapped, tangent = _torch.is_wrapped(t), None
    with at_level(_torch.wrapper_level(t) if wrapped else 0):
        whole = _whole(t)
        if id(whole) in leaves and whole.requires_grad and whole.grad_fn is None:
            leaf = _torch.require_grad(whole.detach())
            _torch.require_grad(whole, False)
            # Past the `apply` that regions observe: it is no operation of the body.
            # And it is no write of the body's, which may ask for their number.
            with not_counted(whole):
                super(_torch.SingleLevelFunction, _Following).apply(whole, leaf)  # type: ignore[misc]
            leaves[id(leaf)] = leaf
        if _torch.forward_ad_level() >= 0 and not _torch.is_batched(t):
            tangent = forward_ad.unpack_dual(t).tangent
    if tangent is not None:  # which is written to as well
        _follow(tangent, leaves)
    if wrapped:
        _follow(_torch.get_unwrapped(t), leaves)
