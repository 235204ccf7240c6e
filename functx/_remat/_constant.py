"""What a body reads that no derivative flows to: a replay must find what the forward found.

NOTE [readers]
A region that writes to a constant keeps what it found there. So do, then, the regions that read it
before and did not write (a key-value cache, a step counter), at no cost: it is the same copy. What
is written outside of regions nobody sees beforehand.

NOTE [memory of others]
What is in memory that is not torch's own (of a NumPy array, a buffer, another library) changes
without a version. So where there is little of it, the bits are compared, of what a region is given
as well (`_node`). Those of parameters are not.
"""

from __future__ import annotations

import ctypes
import weakref

from torch import Tensor

from functx import _torch
from functx._errors import RematError, ReplayError

_LITTLE = 1 << 20
"""So many bytes are compared."""


class Constant:
    """A tensor the body read that no derivative flows to.

    If the body writes to it (a running mean, a step counter), a replay must start from what the
    forward found and must not write again: it gets a copy of the value from before.
    """

    __slots__ = ("__weakref__", "_bits", "_readers", "before", "value", "version")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.version = _torch.version(value)
        self._bits = foreign_bits(value)
        self.before: Tensor | None = None
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

    def seal(self, name: str) -> None:
        """The first run ended: a write nobody announced can't be undone for a replay."""
        if self.before is not None:
            self.value = self.before
            self._readers = None
        elif _torch.version(self.value) != self.version:
            raise RematError(
                f"remat: the region {name!r} wrote to a tensor of shape {tuple(self.value.shape)} "
                "that it did not make, in a way functx can't see beforehand, so a replay could "
                "not start from the same value. Write to it outside of the region."
            )

    def for_replay(self, name: str) -> Tensor:
        """The value that the forward found."""
        if self.before is not None:
            with _torch.cleared_interpreter_stack():
                return self.before.clone()
        if _torch.version(self.value) != self.version or (
            self._bits is not None and self._bits != foreign_bits(self.value)
        ):
            raise ReplayError(
                f"remat: a tensor of shape {tuple(self.value.shape)} that the region {name!r} "
                "reads was modified in place between its forward and its replay. Modify it after "
                "the backward, or pass a clone."
            )
        return self.value


def foreign_bits(t: Tensor) -> int | None:
    """A hash of memory that is not torch's own. ``NOTE [memory of others]``."""
    if type(t) is not Tensor or t.grad_fn is not None:  # what was computed is torch's
        return None
    try:
        if t.untyped_storage().resizable() or not t.is_cpu or not t.numel():
            return None
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
        size = (last + 1) * t.element_size()
        return hash(ctypes.string_at(t.data_ptr(), size)) if size <= _LITTLE else None
    except (RuntimeError, NotImplementedError):  # no memory: sparse, fake, a wrapper
        return None


class _Readers(weakref.WeakSet["Constant"]):
    """The constants of all regions that are one tensor."""


_readers: weakref.WeakValueDictionary[int, _Readers] = weakref.WeakValueDictionary()
