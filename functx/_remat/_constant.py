"""What a body reads that no derivative flows to: a replay must find what the forward found.

NOTE [readers]
A region that writes to a constant keeps what it found there. So do, then, the regions that read it
before and did not write (a key-value cache, a step counter), at no cost: it is the same copy. What
is written outside of regions nobody sees beforehand.

NOTE [memory of others]
What is in memory that is not torch's own (`_past_torch`) changes without a version. So its bits are
compared (pages of it, where there is much), of what a region is given as well (`_node`). Those of
parameters are not. A tensor of such memory that the body has come by itself
(`torch.from_numpy(h.numpy())`) is no constant: a replay comes by it, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set

from torch import Tensor

from functx import _torch
from functx._errors import RematError, ReplayError
from functx._remat._holders import Holders
from functx._remat._ledger import Ledger
from functx._remat._letting_go import can_go, is_held
from functx._remat._past_torch import foreign_bits
from functx._remat._prune import placeholder
from functx._torch_memory import Places, memory_of


class Constant:
    """A tensor the body read that no derivative flows to.

    If the body writes to it (a running mean, a step counter), a replay must start from what the
    forward found and must not write again: it gets a copy of the value from before.

    Args:
        value: what it is.
        holders: who holds that, where it is found out whether a pullback reads it.
    """

    __slots__ = (
        *("__weakref__", "_absent", "_bits", "_memory", "_readers"),
        *("before", "holders", "value", "version"),
    )

    def __init__(self, value: Tensor, holders: Holders | None = None) -> None:
        self.value = value
        self.holders = holders
        self.version = _torch.version(value)
        self._bits = foreign_bits(value)
        self._memory = Places((value,))
        self.before: Tensor | None = None
        self._absent: Absent | None = None
        # Held by constants that hold the tensor, so that its id stays its.
        self._readers = _readers.get(id(value))
        if self._readers is None:
            self._readers = _readers[id(value)] = _Readers()
        self._readers.add(self)

    def about_to_be_written(self) -> None:
        """Keep the value that a replay must start from. ``NOTE [readers]``."""
        if self.before is None:
            with _torch.cleared_interpreter_stack():
                self.before = self.value.detach().clone()
            for reader in [*(self._readers or ())]:
                if reader.before is None and reader.version == _torch.version(self.value):
                    reader.before = self.before

    def is_rewritten(self) -> bool:
        """Whether the first run wrote to it."""
        return self.before is not None

    def seal(self, name: str) -> None:
        """The first run ended: a write nobody announced can't be undone for a replay."""
        self.holders = None
        if self.before is not None:
            self.value = self.before
            self._readers = None
        elif _torch.version(self.value) != self.version:
            raise self._written_unseen(name)

    def _written_unseen(self, name: str) -> RematError:
        return RematError(
            f"remat: the region {name!r} wrote to a tensor of shape {tuple(self.value.shape)} "
            "that it did not make, in a way functx can't see beforehand, so a replay could "
            "not start from the same value. Write to it outside of the region."
        )

    def _is_as_it_was(self) -> bool:
        return _torch.version(self.value) == self.version and (
            self._bits is None or self._bits == foreign_bits(self.value)
        )

    def unread(self, ledger: Ledger, leaves: Set[int]) -> bool:
        """Whether no pullback reads it, of a body that has run; then it may change, too."""
        holders = self.holders
        if holders is None or self.before is not None or not can_go(self.value, 0):
            return False
        return not (ledger.needs(holders) or is_held(holders, ledger.viewed, leaves))

    def let_go(self) -> None:
        """No pullback reads the value: it is not kept, as an input is not; its shape is."""
        self._absent = Absent(self.value)
        del self.value
        if self._readers is not None:
            self._readers.discard(self)
            self._readers = None

    def is_absent(self) -> bool:
        """Whether it is not kept."""
        return self._absent is not None

    def held(self) -> list[Tensor]:
        """The tensors that it keeps."""
        both = (None if self._absent is not None else self.value), self.before
        return [t for t in both if t is not None]

    def for_replay(self, name: str) -> Tensor:
        """The value that the forward found; or memory nobody wrote to, if no pullback reads it."""
        if self._absent is not None:
            return self._absent()
        value = self.found(name)
        if self.before is None:
            return value
        with _torch.cleared_interpreter_stack():
            return value.clone()

    def found(self, name: str) -> Tensor:
        """The value that the forward found, to which nobody may write."""
        if self.before is not None:
            return self.before
        if not self._is_as_it_was() or memory_of((self.value,)) != self._memory.keys:
            raise ReplayError(
                f"remat: a tensor of shape {tuple(self.value.shape)} that the region {name!r} "
                "reads was modified in place between its forward and its replay. Modify it after "
                "the backward, or pass a clone."
            )
        return self.value

    def still(self, name: str) -> None:
        """What a replay reads is as it was, when it has run."""
        if self._absent is None and self.before is None and not self._is_as_it_was():
            raise self._written_unseen(name)


def still(constants: Sequence[Constant], name: str) -> None:
    """A replay has run, which may have written unseen, as the forward may before it read."""
    for constant in constants:
        constant.still(name)


def unread(constants: Sequence[Constant], ledger: Ledger, leaves: Set[int]) -> Sequence[bool]:
    """Which constants no pullback reads; empty if there is none."""
    found = [c.unread(ledger, leaves) for c in constants]
    return found if True in found else ()


def without(constants: Sequence[Constant], unread: Sequence[bool]) -> Sequence[Constant]:
    """Those that a pullback reads."""
    return [c for c, none in zip(constants, unread) if not none] if unread else constants


def let_go(constants: Sequence[Constant], unread: Sequence[bool]) -> None:
    """Keep those only that a pullback reads."""
    for constant, none in zip(constants, unread):
        if none:
            constant.let_go()


class Absent:
    """Memory nobody wrote to, like a tensor: the same for as long as anybody holds it."""

    __slots__ = ("_made", "_make")

    def __init__(self, t: Tensor) -> None:
        self._make = placeholder(t)
        self._made: weakref.ref[Tensor] | None = None

    def __call__(self) -> Tensor:
        t = None if self._made is None else self._made()
        if t is None:
            t = self._make()
            self._made = weakref.ref(t)
        return t


class _Readers(weakref.WeakSet["Constant"]):
    """The constants of all regions that are one tensor."""


_readers: weakref.WeakValueDictionary[int, _Readers] = weakref.WeakValueDictionary()
