"""Exact counters: what runs below autograd and functorch, and the bytes that it leaves alive.

No functx in here, so that a fault there can't hide itself.
"""

import contextlib
import gc
import weakref
from collections import Counter

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts ATen operations, and follows the storages that they make by weak references.

    Attributes:
        counts: An operation's name, such as ``"mm"``, to the number of times it ran.
        live: Bytes of the storages made in the context that still exist.
        peak: The highest ``live`` so far.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.live = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name != "lift_fresh":  # its argument was made by torch.tensor, seen by nobody
            self._known.update(_storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        self.counts[name] += 1
        for storage in _storages(result):
            if storage not in self._known:
                self._known.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, storage.nbytes())
        return result

    def _forget(self, nbytes):
        self.live -= nbytes


def _storages(tree):
    return [t.untyped_storage() for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


@contextlib.contextmanager
def followed():
    """`Operations` while the garbage collector is off: a reference cycle shows as bytes kept."""
    gc.disable()
    try:
        with Operations() as operations:
            yield operations
    finally:
        gc.enable()


def op_counts(f, *args):
    """How often each ATen operation runs in ``f(*args)``."""
    with Operations() as operations:
        f(*args)
    return operations.counts


def peak_bytes(f, *args):
    """The most bytes that operations of ``f(*args)`` keep alive at once."""
    with followed() as operations:
        f(*args)
    return operations.peak


def kept_bytes(f, *args):
    """Bytes that live as long as what ``f(*args)`` returns, and those that outlive it."""
    with followed() as operations:
        result = f(*args)
        held = operations.live
        del result
        return held, operations.live
