"""Arguments that a body stores: what is stored is the caller's own tensor.

NOTE [stored arguments]
A body computes with stand-ins for its arguments. Without remat ``self.last = x`` stores the very
tensor that the caller has: all of its gradient comes there, also what flows by the region's result;
its hooks, its ``.grad`` and ``torch.autograd.grad`` with respect to it are the caller's. So, when
the first run has ended, the caller's tensor takes the place of its stand-in in the attributes and
containers that the run has changed, and in what was put there: nothing has left the region then. In
a nest each region does so, the innermost first. A stand-in that was written to, and one that is
where it is not found (in a frozen set, in an object of C's), is for `_leaving`.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from functx._remat._arguments import SIMPLE
from functx._remat._parts_of_given import is_object, parts_of, remade, set_part
from functx._remat._slots import slots_of

Own = Callable[[Tensor], Tensor]
"""The caller's tensor for what stands for it in a run; any other one as it is."""

_MANY = 8192  # things are looked at
_DEEP = 50


def put_back(changed: Iterable[tuple[Any, Any]], own: Own) -> set[int]:
    """Put the caller's tensors where a run has stored what stands for them.

    Args:
        changed: what the run has changed: a dict, or what is like one, and the key; a container,
            and ``None``.
        own: of the run.

    Returns:
        Ids of the tensors that were found.
    """
    putting = _Putting(own)
    for c, key in changed:
        if key == "_flat_weights":  # in which a recurrent module has what it was lent
            continue
        if key is None:
            putting.of(c)
        elif (new := putting.of(x := c.get(key, None))) is not x:
            c[key] = new
    return putting.found


class _Putting:
    def __init__(self, own: Own) -> None:
        self._own = own
        self.found: set[int] = set()
        # With what is in its place, and itself: another could have the id of what has gone.
        self._seen: dict[int, tuple[Any, Any]] = {}
        self._left = _MANY
        self._depth = 0

    def of(self, x: Any) -> Any:
        """What is in the place of ``x``, in which the same was done."""
        if isinstance(x, Tensor):
            self.found.add(id(x))
            return self._own(x)
        if type(x) in SIMPLE:
            return x
        if (known := self._seen.get(id(x))) is not None:
            return known[0]
        if self._depth > _DEEP or self._left < 0:
            return x
        self._seen[id(x)] = x, x
        self._depth += 1
        try:
            new = self._within(x)
        finally:
            self._depth -= 1
        self._seen[id(x)] = new, x
        return new

    def _within(self, c: Any) -> Any:
        if isinstance(c, tuple):
            parts = [*map(self.of, self._some(c))]
            same = len(parts) < len(c) or all(a is b for a, b in zip(parts, c))
            return c if same else remade(c, parts)
        if isinstance(c, dict):
            for key, x in self._some(dict.items(c)):
                if (new := self.of(x)) is not x:
                    dict.__setitem__(c, key, new)
        elif isinstance(c, (list, deque)):
            kind: Any = list if isinstance(c, list) else deque
            for i, x in enumerate(self._some(c)):
                if (new := self.of(x)) is not x:
                    kind.__setitem__(c, i, new)
        elif isinstance(c, set):
            for x in self._some(c):
                if (new := self.of(x)) is not x:
                    set.discard(c, x)
                    set.add(c, new)
        elif type(c) is types.FunctionType:
            for cell in self._some(c.__closure__ or ()):
                try:
                    x = cell.cell_contents
                except ValueError:  # not bound yet
                    continue
                if (new := self.of(x)) is not x:
                    cell.cell_contents = new
        elif _has_attributes(c):
            for name, x in self._some(parts_of(c)):
                if (new := self.of(x)) is not x:
                    set_part(c, name, new)
        return c

    def _some(self, those: Iterable[Any]) -> list[Any]:
        found = [*those]
        self._left -= len(found)
        return found if self._left >= 0 else []


def _has_attributes(x: Any) -> bool:
    if isinstance(x, (type, types.ModuleType)) or callable(x):
        return False
    return is_object(x) or bool(slots_of(type(x)))
