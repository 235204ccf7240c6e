"""Private names of memory, for many tensors at a time: beside `_torch`."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

# Of a storage: what `_torch.storage_key` is of its tensors; and a weak reference, to be freed.
key_of_storage = operator.attrgetter("_cdata")
weak_reference: Any = torch.UntypedStorage._weak_ref
_free = torch.UntypedStorage._free_weak_ref


def storage_keys(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`_torch.storage_key` of each."""
    return [key_of_storage(t.untyped_storage()) for t in tensors]


_memory: Any = torch.Tensor.untyped_storage


def memory_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`storage_keys`, in C; of nothing, where one of the tensors has no storage.

    Modes are not told: to those of regions, it would be that all of the memory is read.
    """
    return [*map(key_of_storage, _memories(tensors))]


def _memories(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    try:
        if not _function_mode_depth():
            return [*map(_memory, tensors)]
        with torch._C.DisableTorchFunction():
            return [*map(_memory, tensors)]
    except (RuntimeError, NotImplementedError):  # sparse, opaque, ...
        return []


_function_mode_depth = torch._C._len_torch_function_stack


class Places:
    """The memory of some tensors by keys, which are no others' as long as this is there.

    Attributes:
        keys: as of `memory_of`.
    """

    __slots__ = ("keys",)

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.keys: list[int] = [*map(weak_reference, _memories(tensors))]

    def __del__(self) -> None:
        deque(map(_free, self.keys), 0)


def storage_and_key(t: torch.Tensor) -> tuple[torch.UntypedStorage, int]:
    """The storage of a plain tensor, and its `_torch.storage_key`."""
    memory = t.untyped_storage()
    return memory, key_of_storage(memory)


def shares_memory(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the storage of a plain tensor begins in that of another one."""
    try:
        memory, start = other.untyped_storage(), t.untyped_storage().data_ptr()
        return 0 <= start - memory.data_ptr() < memory.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse, opaque, ...
        return False


def place_of(t: torch.Tensor) -> Any:
    """Where and how a plain tensor lies in memory: the same for all aliases of it."""
    storage = key_of_storage(t.untyped_storage())
    return storage, t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


class Memories:
    """Weak references to pieces of memory: `_torch.StorageWeakRef`, many at a time."""

    __slots__ = ("refs",)

    def __init__(self) -> None:
        self.refs: list[tuple[Any, int]] = []

    def add(self, memory: torch.UntypedStorage, key: int) -> None:
        """Refer to a piece of memory."""
        self.refs.append((weak_reference(memory), key))

    def alive(self) -> list[int]:
        """The keys of those that are still there, in the order in which they were added."""
        expired = torch.UntypedStorage._expired
        return [key for ref, key in self.refs if not expired(ref)]

    def clear(self, free: Any = _free) -> None:
        """Refer to none."""
        refs, self.refs = self.refs, []
        for ref, _ in refs:
            free(ref)

    __del__ = clear


def not_counted(t: torch.Tensor) -> Any:
    """A context in which writes to ``t`` leave its ``_version`` as it is."""
    return torch.autograd._unsafe_preserve_version_counter(t)
