"""Values that are known while a function is traced, before it has data; Python may read them.

Known is what the function closes over, and what it computes of that and of numbers alone. What is
closed over and was read is compared at each later call, and another value traces again.
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

_LARGEST = 4096  # entries; larger ones are nobody's sizes
_T: Any = Tensor
READS = {_T.item, _T.tolist, _T.numpy, _T.__bool__, _T.__float__, _T.__int__, _T.__index__}

Reads = dict[int, tuple[Tensor, Tensor]]
"""By id: what is closed over, and its value."""
_UNSET: Reads = {0: (torch.empty(0), torch.empty(0))}  # what memory has that nobody has written
_aten = torch.ops.aten
_WRITES_ALL = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.copy_.default}


class KnownValues:
    """The values that one trace knows, and what is closed over and was read."""

    def __init__(self) -> None:
        self.reads: Reads = {}
        # By id: the tensor, which is not held (a region lets go of what is on its tape), its
        # value, and what is closed over that it depends on.
        self._known: dict[int, tuple[ref[Tensor], Tensor, Reads]] = {}

    def read(self, t: Tensor) -> Tensor | None:
        """A value that is known, for Python to read."""
        found = self._find(t)
        return None if found is None or 0 in found[2] else self._noted(found[1], found[2])

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives whose result depends on values, if they are known."""
        found = self._compute(func, args, kwargs)
        return None if found is None else self._noted(*found)

    def places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Indices with the places that masks choose in place of masks, if these are known."""
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
        """An operation has run in the trace."""
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
        if 0 in sources and not func.is_view:  # unset memory may be no index, say
            return None
        args, kwargs = tree.unflatten(spec, leaves)
        try:
            with engine.without_dispatch_modes():
                return func(*args, **kwargs), sources
        except RuntimeError:  # of an operation that can't be made for real
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
        """Something unknown was written: what shares the memory is not known any more."""
        for t in filter(tree.is_tensor, tree.leaves(args)):
            if (found := self._known.get(id(t))) is not None:
                memory = engine.storage_of(found[1])
                for key, (_, value, _) in [*self._known.items()]:
                    if engine.storage_of(value) == memory:
                        del self._known[key]


def unchanged(reads: Reads) -> bool:
    """Whether what was read has its value still."""
    return all(t.shape == v.shape and torch.equal(t, v) for t, v in reads.values())
