"""Slow, obvious references that tests compare with: counters, and equality up to rounding.

Nothing here imports functx, so that a fault there can't hide itself.
"""

import contextlib
import gc
import weakref
from collections import Counter

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts ATen operations below functorch, and follows the bytes they leave alive.

    ``live`` are the bytes of storages that operations made here and that exist; ``peak`` the most.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.live = self.peak = 0
        self._known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in _tensors((args, kwargs)):
            self._known.setdefault(tensor.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known[storage] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, storage.nbytes())
        return result

    def _forget(self, nbytes):
        self.live -= nbytes


def count(f, *args, **kwargs):
    """How often each ATen operation runs in ``f(*args, **kwargs)``."""
    with Operations() as operations:
        f(*args, **kwargs)
    return operations.counts


def peak(f, *args, **kwargs):
    """The most bytes that operations of ``f(*args, **kwargs)`` keep alive at once."""
    with no_garbage_collection(), Operations() as operations:
        f(*args, **kwargs)
    return operations.peak


@contextlib.contextmanager
def no_garbage_collection():
    """What only the garbage collector can free stays: a reference cycle shows as bytes kept."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def total(tree):
    """The sum of all numbers in a pytree of tensors."""
    return sum(leaf.sum() for leaf in pytree.tree_leaves(tree))


def gradients(f, *args):
    """Those of the sum of what ``f`` returns by all tensors in its arguments, on plain autograd."""
    leaves, spec = pytree.tree_flatten(args)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(total(f(*pytree.tree_unflatten(leaves, spec))), leaves)


def assert_same(actual, expected, eps=0.0):
    """Two pytrees of tensors are equal bit by bit; or a number is off by ``eps`` units of rounding.

    These are relative to the largest absolute number of its tensor, or to 1 if that is larger.
    """
    actual_leaves, actual_spec = pytree.tree_flatten(actual)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert actual_spec == expected_spec
    for a, b in zip(actual_leaves, expected_leaves, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        a, b = a.detach(), b.detach()
        if torch.equal(a, b):
            continue
        assert eps, f"not bitwise equal, off by {(a - b).abs().max():.3g}"
        scale = max(1.0, b.abs().max().item())
        error = (a - b).abs().max().item()
        assert error <= eps * torch.finfo(b.dtype).eps * scale, f"off by {error:.3g} of {scale:.3g}"


def _tensors(tree):
    """Tensors with memory: what torch computes on the meta device, to learn a shape, has none."""
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return (t for t in leaves if t.device.type != "meta")
