"""Values that Python code may read while a function is traced.

The values of tensors that the function closes over are known during the trace, and so are results
that depend only on these and on numbers. If Python code reads such a value, the captured tensors
behind it are compared at each later call, and a changed value triggers a new trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from functx import _torch as engine
from functx._core import tree
from functx._torch.lowering import FakeTensor, is_functorch_wrapped, is_mutable
from functx.compat._to_jax.nodes import draws

_LARGEST = 4096  # elements; Python code does not read sizes or indices from larger tensors
_T: Any = Tensor
READS = {_T.item, _T.tolist, _T.numpy, _T.__bool__, _T.__float__, _T.__int__, _T.__index__}

Reads = dict[int, tuple[Tensor, Tensor]]
"""By id: a captured tensor, and its value."""
# The source of values that come from uninitialized memory. They must not be read.
_UNSET: Reads = {0: (torch.empty(0), torch.empty(0))}
_aten = torch.ops.aten
_WRITES_ALL = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.copy_.default}


class KnownValues:
    """The known values of one trace. ``reads`` has the captured tensors that were read."""

    def __init__(self) -> None:
        self.reads: Reads = {}
        # By id: a weak reference to the tensor (a region must be able to free it), its value, and
        # the captured tensors that it depends on.
        self._known: dict[int, tuple[ref[Tensor], Tensor, Reads]] = {}

    def read(self, t: Tensor) -> Tensor | None:
        """The value of a tensor for Python code to read; ``None`` if it is not known."""
        found = self._find(t)
        return None if found is None or 0 in found[2] else self._noted(found[1], found[2])

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that depends on values; ``None`` if they are not known."""
        found = self._compute(func, args, kwargs)
        return None if found is None else self._noted(*found)

    def places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Replace each mask among some indices by positions; ``None`` if a mask is not known."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            elif (mask := self.read(index)) is None:
                return None
            else:
                with engine.without_dispatch_modes():
                    found += mask.nonzero().unbind(1)
        return found

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note the values of the results of an operation that has run in the trace."""
        outs = [t for t in tree.leaves(out) if tree.is_tensor(t)]
        known = all(t.numel() <= _LARGEST for t in outs)
        found = self._compute(func, args, kwargs) if known and not draws(func, args) else None
        if found is None:
            if is_mutable(func):
                self._forget(args)
            return
        values = [t for t in tree.leaves(found[0]) if tree.is_tensor(t)]
        sources = found[1] | (_UNSET if "empty" in func._schema.name else {})
        self._known |= {id(t): (ref(t), value, sources) for t, value in zip(outs, values)}

    def _compute(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Reads] | None:
        leaves, spec = tree.flatten((args, kwargs))
        sources: Reads = {}
        for i, leaf in enumerate(leaves):
            if tree.is_tensor(leaf):
                if (found := self._find(leaf)) is None:
                    return None
                leaves[i] = found[1]
                sources |= found[2] if i or func not in _WRITES_ALL else {}
        if 0 in sources and not func.is_view:  # uninitialized memory is not a valid index
            return None
        args, kwargs = tree.unflatten(spec, leaves)
        try:
            with engine.without_dispatch_modes():
                return func(*args, **kwargs), sources
        except RuntimeError:  # the operation can't run on real tensors
            return None

    def _find(self, t: Tensor) -> tuple[ref[Tensor], Tensor, Reads] | None:
        plain = not isinstance(t, FakeTensor) and type(t) in (Tensor, torch.nn.Parameter)
        found = self._known.get(id(t))
        found = found if found and found[0]() is t else None
        if plain and not found and t.numel() <= _LARGEST and t.device.type != "meta":
            with engine.without_dispatch_modes(), torch.no_grad():
                if not is_functorch_wrapped(t):
                    value = t.detach().clone()
                    found = self._known[id(t)] = ref(t), value.clone(), {id(t): (t, value)}
        return found

    def _noted(self, result: Any, sources: Reads) -> Any:
        self.reads |= sources
        return result

    def _forget(self, args: Any) -> None:
        """Forget the values of all tensors that share memory with one of ``args``."""
        for t in filter(tree.is_tensor, tree.leaves(args)):
            if (found := self._known.get(id(t))) is not None:
                memory = engine.storage_of(found[1])
                for key, (_, value, _) in [*self._known.items()]:
                    if engine.storage_of(value) == memory:
                        del self._known[key]


def unchanged(reads: Reads) -> bool:
    """Whether all captured tensors that were read still have the same values."""
    return all(t.shape == v.shape and torch.equal(t, v) for t, v in reads.values())
