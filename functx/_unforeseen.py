"""Pullbacks of budgeted functions that are called as could not be known when the function ran.

NOTE [unforeseen pullbacks]
A plan is measured as the levels around a call will be pulled back. But whoever holds a tape of
plain autograd, a pullback, or a level of torch's own, may ask for several rows at once
(`torch.func.jacrev`, ``is_grads_batched``), for ``create_graph`` or ``retain_graph``, or for a
derivative of the pullback. A hook before the nodes of the results sees that before the memory is
taken. The plan is measured as it is called now, once for each way; if that is over the budget (of a
share: over that share of what the function takes called so without regions), a warning says it.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_nodes, _torch_vmap
from functx._costs import pull_back
from functx._errors import BudgetWarning
from functx._pullback import INSIDE
from functx._rows import Chunks
from functx._surroundings import Level, Slots, Surroundings, number_of
from functx._torch_edges import requires_grad_anywhere


@dataclass(frozen=True)
class How:
    """A way to pull back a tape.

    Attributes:
        level: of the tape; 0 for plain autograd.
        rows: at once.
        keeps: whether the tape is to be read again.
        records: whether the pullback is itself recorded, by plain autograd.
        later: whether a transform that began later differentiates it.
    """

    level: int
    rows: int = 1
    keeps: bool = False
    records: bool = False
    later: bool = False

    def __str__(self) -> str:
        ways = []
        if self.rows > 1:
            ways.append(f"for {self.rows} rows at once")
        if self.records:
            ways.append("with create_graph=True")
        elif self.keeps:
            ways.append("with retain_graph=True")
        if self.later:
            ways.append("under a transform that began later")
        return ", ".join(ways)

    def way_out(self) -> str:
        """What is known when the function is called."""
        if self.rows > 1:
            return "Use functx.jacrev, whose number of rows is known, or pull back one at a time"
        if self.records or self.later:
            return "Take the inner derivative with functx.grad, which is known"
        return "Call functx.vjp, whose pullback is known to be called again"

    def around(self, around: Surroundings) -> Surroundings:
        """Transforms that pull back like this."""
        levels = [
            replace(level, pulled_back=Chunks(self.rows, self.rows, True, level.pulled_back))
            if level.number == self.level and self.rows > 1
            else level
            for level in around.levels
        ]
        return replace(around, levels=tuple(levels))

    def pull(self, outs: Any, inputs: Any) -> Any:
        """Gradients of the outermost results, got like this if it is plain autograd who asks."""
        if self.level:
            return pull_back(outs, inputs)
        found = pull_back(outs, inputs, rows=self.rows, keeps=self.keeps, records=self.records)
        numbers = [t for t in found if t is not None and t.requires_grad]
        return found, pull_back(number_of(numbers), inputs) if numbers else ()


Bytes = Callable[[How], tuple[int, int]]
"""What a plan takes if it is pulled back in some way, and what it is allowed then."""

_PLAIN = Level(kind=None, number=0)

_known: OrderedDict[Any, tuple[int, int]] = OrderedDict()
REMEMBERED = 256


def watch(
    outs: Sequence[Any],
    around: Surroundings,
    taped: Sequence[tuple[Slots, bool]],
    key: Any,
    name: str,
    measure: Bytes,
) -> None:
    """Hang a hook before each node of some results. ``NOTE [unforeseen pullbacks]``.

    Args:
        outs: results, at the levels of ``around``.
        around: the active levels.
        taped: what the inputs are to the levels, and whether they are on plain autograd's tape.
        key: of the plan.
        name: of the function.
        measure: what it takes.
    """
    seen = set()
    reverse = [i for i, v in enumerate(around.levels) if v.kind == _torch.TransformType.Grad]
    known = {around.levels[i].number for i in reverse if any(slots[i] for slots, _ in taped)}
    known |= {0 for _, plain in taped if plain}
    for out in outs:
        for level, node in _nodes(out, around) if isinstance(out, Tensor) else ():
            if (level.number, node) not in seen:
                seen.add((level.number, node))
                _torch_nodes.hang_before(
                    node, _Watch(level, min(known) < level.number, key, name, measure)
                )


def _nodes(t: Tensor, around: Surroundings) -> Iterator[tuple[Any, Any]]:
    """The nodes that made a tensor, one for each level that differentiates it."""
    t = _torch.unwrap_if_dead(t)
    with ExitStack() as below:
        for level in reversed(around.levels):
            if _torch.is_wrapped(t) and _torch.wrapper_level(t) == level.number:
                if level.kind == _torch.TransformType.Grad and t.grad_fn is not None:
                    yield level, t.grad_fn
                t = _torch.get_unwrapped(t)
            below.enter_context(_torch.current_interpreter().lower())
        if not _torch.is_wrapped(t) and t.grad_fn is not None:
            yield _PLAIN, t.grad_fn


class _Watch:
    """Warns if a node is pulled back as its plan was not measured for, and that takes too much."""

    __slots__ = ("_key", "_level", "_measure", "_name", "_read")

    def __init__(self, level: Level, read: bool, key: Any, name: str, measure: Bytes) -> None:
        self._level = level
        self._read = read  # by levels around it
        self._key = key
        self._name = name
        self._measure = measure

    def __call__(self, cotangents: Sequence[Tensor | None]) -> None:
        """A hook: the node is going to be pulled back."""
        how = self._how(cotangents)
        if not str(how):
            return
        if how.later:
            self._warn(how, "is not known beforehand, and was not measured")
            return
        key = (self._key, how)
        if key not in _known:
            _known[key] = self._measure(how)
            if len(_known) > REMEMBERED:
                _known.popitem(last=False)
        takes, allowed = _known[key]
        if takes > allowed:
            self._warn(how, f"takes {takes:,} bytes, more than the budget, {allowed:,} bytes")

    def _warn(self, how: How, what: str) -> None:
        warnings.warn(
            f"remat: the pullback of {self._name!r} is called {how}, which {what}. "
            f"{how.way_out()}; or give a larger budget.",
            BudgetWarning,
            stacklevel=2,
        )

    def _how(self, cotangents: Sequence[Tensor | None]) -> How:
        """How it is called, as far as that was not foreseen."""
        own, rows, later = self._level, 1, False
        for interpreter in _torch.interpreters():
            number, kind = interpreter.level(), interpreter.key()
            if number < own.number:
                continue
            if kind == _torch.TransformType.Vmap:
                known: Any = _torch.coerced(interpreter)
                rows *= known.batch_size()
            elif not (number == own.number and kind == own.kind and own.pulled_back == INSIDE):
                later = True
        if isinstance(own.pulled_back, Chunks) and rows <= own.pulled_back.size:
            rows = 1
        given = [c for c in cotangents if c is not None]
        if own.number:
            later = later or (not self._read and any(map(requires_grad_anywhere, given)))
            return How(own.number, rows, later=later)
        if older := _torch_vmap.legacy_vmap_level():
            batched = filter(_torch_vmap.is_legacy_batched, given)
            rows *= max((_torch_vmap.legacy_batch_size(c, older) for c in batched), default=1)
        records = torch.is_grad_enabled()
        keeps = records or _torch_nodes.graph_is_kept()
        return How(0, rows, keeps, records, later)
