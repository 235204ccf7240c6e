"""Memory that goes when it has been read, whoever still holds a tensor over it.

NOTE [let go]
While a node is pulled back, torch's engine holds its cotangents to the end: as the arguments of
the node, and as what the tape of the replay is pulled back from. Its inputs are held by leaves of
that tape, by frames and their arguments. None of these can be made to let go of a tensor. So the
node is handed cotangents without memory by a hook before it, which keeps the real ones; what goes
down is an alias made for the purpose; and when the memory has been read, the *alias* is taken off.

That is right only if nobody reads the alias later: nothing of a user's may see it (where Python is
on the tape, a hook might keep it), and no node of an outer tape may keep it. An input goes after
the last operation that its record says reads it, if no tensor has come to hold it meanwhile: no
view, and no tape.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_nodes, _torch_vmap
from functx._remat._entry import KNOWN, REWRAPPED, Entry
from functx._remat._holders import Holders, base_of
from functx._remat._ledger import Ledger
from functx._remat._tapes import nodes_of, of_ended_level, rewrap
from functx._remat._tracker import SILENT, Tracker, tracking
from functx._torch_edges import requires_grad_anywhere
from functx._torch_globals import grad_mode
from functx._torch_operators import is_zero_tensor

_WORTH = 128
"""Bytes; for less than that it is not worth the time."""


def can_go(t: Tensor, worth: int | None = None) -> bool:
    """Whether an alias of ``t`` can be let go, and is worth it, at so many bytes."""
    base = t
    while _torch.is_wrapped(base):
        if _torch.is_functional(base):
            return False
        base = _torch.get_unwrapped(base)
    return (
        type(base) is Tensor
        and not base.__dict__  # what stands for it has them: `_alike`
        and base.layout is torch.strided
        and base.nbytes >= (_WORTH if worth is None else worth)
        and not (base.is_conj() or base.is_neg() or base.is_inference() or is_zero_tensor(base))
    )


def nobody_differentiates(tensors: Sequence[Tensor]) -> bool:
    """Whether no derivative can be taken of what these go into."""
    return (
        _torch.forward_ad_level() < 0
        and not _torch_vmap.legacy_vmap_level()
        and not _torch.tracing()
        and not any(map(requires_grad_anywhere, tensors))
    )


def lent(t: Tensor) -> Tensor:
    """An alias of ``t``, at the same levels, that can be let go."""
    base = base_of(t)
    with _torch.without_modes(), _torch.cleared_interpreter_stack(), grad_mode(False):
        alias = base.detach()
    return alias if t is base else rewrap(t, 0, alias)


def let_go(t: Tensor) -> None:
    """Take an alias off its memory; it keeps its shape, and is zero for debuggers that print it."""
    base = base_of(t)
    with _torch.without_modes(), _torch.cleared_interpreter_stack():
        base.data = _nothing_like(base)


def _nothing_like(t: Tensor) -> Tensor:
    """A tensor of the same shape that has no memory to speak of."""
    key = t.shape, t.dtype, t.device
    made = _nothing.get(key)
    if made is None:
        if len(_nothing) > 1000:
            _nothing.clear()
        with (
            torch.inference_mode(False),
            _torch.without_modes(),
            _torch.cleared_interpreter_stack(),
        ):
            made = torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape)
        _nothing[key] = made
    return made


_nothing: dict[Any, Tensor] = {}


def memoryless(t: Tensor, taped: bool = True) -> Tensor | None:
    """A tensor like ``t``, at the same levels, that has no memory to speak of.

    ``None`` where it would show, or is not worth it: ``t`` is of a level that ended, or on no tape
    though it should be ``taped``.
    """
    if not (can_go(t) and (nodes_of([t]) or not taped)) or of_ended_level(t):
        return None
    base = base_of(t)
    with tracking(SILENT):
        with _torch.cleared_interpreter_stack():
            empty = _torch_nodes.tensor_over(_nothing_like(base), base.requires_grad)
        return rewrap(t, 0, empty, with_grad=True)


class _Handed(threading.local):
    of: tuple[Any, tuple[Tensor | None, ...]] | None = None


_handed = _Handed()


def hand_over(node: Any, cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What a node is given in place of cotangents, which it then takes.

    Args:
        node: whoever takes them, on this thread, next.
        cotangents: the real ones.
    """
    given, real = [*cotangents], [*cotangents]
    for i, c in enumerate(cotangents):
        if c is not None and can_go(c):
            given[i] = _nothing_like(c)
            if hasattr(c, "_functx_lent"):  # by a region around this one
                real[i] = lent(c)
                let_go(c)
    _handed.of = node, tuple(real)
    return tuple(given)


def take(node: Any, given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The cotangents that were handed over to a node, or else those it was given."""
    of, _handed.of = _handed.of, None
    return of[1] if of is not None and of[0] is node else given


def lend(edge: Any, cotangent: Tensor) -> None:
    """The memory of a cotangent, an alias of ours, goes when the node at an edge has read it.

    Args:
        edge: where a backward pass begins.
        cotangent: with what.
    """
    node = getattr(edge, "node", None)
    if node is None or not can_go(cotangent):
        return
    if hasattr(node, "payload"):  # another region, which takes it over
        cotangent._functx_lent = True  # type: ignore[attr-defined]
    else:
        _torch_nodes.hang_before(node, _Lender(cotangent, edge.output_nr))


class _Lender:
    """A hook before a node: its cotangent becomes the engine's alone, to free as it goes."""

    __slots__ = ("_cotangent", "_place")

    def __init__(self, cotangent: Tensor, place: int) -> None:
        self._cotangent: Tensor | None = cotangent
        self._place = place

    def __call__(self, cotangents: tuple[Tensor | None, ...]) -> Any:
        ours, self._cotangent = self._cotangent, None
        if ours is None:
            return None
        alone = cotangents[self._place] is ours  # else it has been added to others
        given = lent(ours) if alone else None
        let_go(ours)
        if not alone:
            return None
        return (*cotangents[: self._place], given, *cotangents[self._place + 1 :])


def may_pass(ledger: Ledger, environment: Any, first: Tracker) -> bool:
    """Whether inputs of a replay may go with their last use: nothing else could read them later.

    A replay whose inputs are gone can't begin again, so it must not be one that may run otherwise
    than the forward did: that writes in place, or under autocast, whose casts are cached. A region
    inside holds constants that nobody counts, and so does Python on the tape; and some of what runs
    may not be on the record that says which operation is the last. Nor may the body look at how
    tensors lie in memory, as what is gone lies otherwise; or wrap them in a transform of its own,
    as the record is of the wrappers then.
    """
    return not (
        first.looks
        or ledger.python_on_tape
        or ledger.holds_regions
        or ledger.writes
        or environment.casts()
        or ledger.sections() is None
    )


def unread(
    holders: Sequence[Holders],
    needs: Sequence[bool],
    may_go: bool,
    viewed: Set[int],
    leaves: Set[int],
    needed: list[bool],
) -> Sequence[bool]:
    """Find the inputs that no pullback reads, and those that a replay reads but no tape of it.

    Args:
        holders: of each input.
        needs: for each, whether a live step reads it.
        may_go: whether inputs may go with their last use.
        viewed: memory that views were taken of.
        leaves: ids of the leaves that the tapes end in.
        needed: for each input, whether it is kept; those that need not be are crossed out.

    Returns:
        For each input, whether it goes with its last use.
    """
    passing = [False] * len(needed)
    for i, (holder, need) in enumerate(zip(holders, needs, strict=True)):
        if need and not may_go:
            continue
        if not is_held(holder, viewed, leaves):
            needed[i] = passing[i] = need
    return passing if may_go else ()


def is_held(holders: Holders, viewed: Set[int], leaves: Set[int]) -> bool:
    """Whether a tape holds what a body was given, or it can't be told.

    Args:
        holders: of it.
        viewed: memory that views were taken of.
        leaves: ids of the leaves that the tapes end in.
    """
    return (holders.shared and holders.storage in viewed) or holders.grown(leaves)


class Passing:
    """Inputs of a replay that go with their last use.

    Args:
        entries: the operations of the forward.
        origins: kind and number of each external that they read.
        tensors: the inputs, captured ones last.
        which: of them may go, aliases of ours.

    Attributes:
        gone: whether any has.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        origins: Sequence[tuple[str, int]],
        tensors: Sequence[Tensor],
        which: Sequence[int],
    ) -> None:
        explicit = len(tensors) - sum(kind == "capture" for kind, _ in origins)
        first = {"input": 0, "capture": explicit}
        inputs = {p: first[kind] + i for p, (kind, i) in enumerate(origins) if kind in first}
        last: dict[int, int] = {}
        for at, entry in enumerate(entries):
            for source in entry.sources:
                if KNOWN < source <= REWRAPPED:
                    source = REWRAPPED - source
                if source in inputs:
                    last[inputs[source]] = at
        self.gone = False
        self._waiting = [(last[i], tensors[i], Holders(tensors[i])) for i in which if i in last]

    def after(self, operation: int) -> None:
        """An operation has run."""
        for one in [*self._waiting]:
            last, t, holders = one
            if last <= operation and _can_go_now(t, holders):
                let_go(t)
                self.gone = True
                # Not by `remove`, which compares tensors.
                self._waiting = [other for other in self._waiting if other is not one]


def _can_go_now(t: Tensor, holders: Holders) -> bool:
    # Memory that is shared with numpy, say, can't be resized.
    return not holders.grown(_leaves(t)) and base_of(t).untyped_storage().resizable()


def _leaves(t: Tensor) -> set[int]:
    """Of a tensor and what it wraps, those that a tape ends in."""
    found = set()
    while True:
        if t.requires_grad and t.grad_fn is None:
            found.add(id(t))
        if not _torch.is_wrapped(t):
            return found
        t = _torch.get_unwrapped(t)
