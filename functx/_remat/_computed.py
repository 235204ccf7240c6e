"""Which memory a body wrote, whoever holds what tensor over it.

Transforms hand tensors over in C++, where no mode sees it. So whether something comes from the body
is told by its memory: by storages, which are kept from being another's by weak references.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import Tensor

from functx import _torch, _torch_memory
from functx._remat._holders import base_of
from functx._remat._step import has_memory
from functx._remat._tapes import tensors_of
from functx._remat._watch import Watcher
from functx._torch import is_wrapped
from functx._torch_memory import key_of_storage


class Computed(Watcher):
    """Knows the memory that operations gave, and what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self._writers: dict[int, int] = {}  # storage -> key of what wrote to it last
        self._external: dict[int, int] = {}  # storage from outside -> what it is a copy of
        self._made = _torch_memory.Memories()
        self.viewed: set[int] = set()  # storages that views were taken of

    def computed(self, t: Tensor) -> bool:
        """Whether what is in the memory of ``t`` comes from operations of the body."""
        try:
            storage = key_of_storage((base_of(t) if is_wrapped(t) else t).untyped_storage())
        except (RuntimeError, NotImplementedError):  # no storage: sparse, opaque, ...
            return False
        return storage in self._writers and storage not in self._external

    def was_there(self, t: Tensor) -> bool:
        """Whether the memory of a plain tensor was there before the body began."""
        if not (self.reliable and has_memory(t)):
            return False
        return (storage := _torch.storage_key(t)) not in self._writers or storage in self._external

    def take_view(self, t: Any) -> None:
        """An operation gives a view of ``t``, a tensor or what torch shows as a number of one."""
        if not isinstance(t, Tensor):
            return
        with suppress(RuntimeError, NotImplementedError):  # no storage: sparse, opaque, ...
            self.viewed.add(_torch.storage_key(t))

    def copied_unseen(self, source: Tensor, copy: Tensor) -> None:
        """Who reads the copy reads the source."""
        old, new = _torch.storage_key(source), _torch.storage_key(copy)
        if (writer := self._writers.get(old)) is not None:
            self._writers[new] = writer
            self._made.add(copy.untyped_storage(), new)
        if writer is None or old in self._external:
            self._external[new] = self._external.setdefault(old, old)

    def ran_unrecorded(self, args: Any, kwargs: Any, out: Any) -> None:
        """An operation ran that is not on the record, which is incomplete: it gave some memory."""
        given = set()
        for t in tensors_of(args, kwargs):
            try:
                given.add(_torch.storage_key(t))
            except (RuntimeError, NotImplementedError):
                continue
        for t in tensors_of(out):
            try:
                memory, storage = _torch_memory.storage_and_key(t)
            except (RuntimeError, NotImplementedError):
                continue
            if storage not in given:
                self._writers[storage] = 0
                self._external.pop(storage, None)
                self._made.add(memory, storage)
