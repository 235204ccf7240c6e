"""Detect whether one example passes data to the next through memory, if examples run one by one.

NOTE [state]
A forward may write to a buffer, for example a moving average of its inputs. If the next example
reads that buffer, its gradient depends on this example's data. It is then not the gradient of one
example, and clipping it gives no privacy. ``vmap`` refuses such a write, but an example that runs
without ``vmap`` can make it. So the first two examples of a call run in a dispatch mode:

- In the first example, all memory that depends on the example's values is marked. If no marked
  memory is left when the second example begins, the first one can't have passed anything on, and
  the other examples run without the mode. This is the usual case.
- Otherwise the second example runs on copies of its inputs, with the marks of the first example. If
  its loss or one of its gradients is marked, it has read the first example's values, and a
  ``ValueError`` is raised.

State that does not depend on the values of an example is allowed: counters, and the power iteration
of spectral normalisation. So are statistics that are written and never read.

Not detected: numbers that Python code carries over (by ``item()``), and writes that an example
after the second is the first one to make.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from functx import _torch
from functx._core import tree
from functx.per_sample._embeddings import RENORM

aten = torch.ops.aten
# These overwrite memory without reading it.
_OVERWRITES = {
    *(aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor),
    *(aten.normal_.default, aten.uniform_.default),
}
# These read only the shape of a tensor.
_SHAPES = {
    *(aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.rand_like),
    *(aten.randn_like, aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full),
    aten.new_empty_strided,
}


class Marks:
    """Memory that depends on the values of the first example."""

    def __init__(self) -> None:
        # The weak reference keeps the storage's address from being reused.
        self._of: dict[int, Any] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Mark the memory of tensors."""
        for t in tensors:
            if (key := _torch.storage_of(t)) != -1 and key not in self._of:
                self._of[key] = _torch.StorageWeakRef(_torch.memory_of(t))

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Take the mark off the memory of tensors."""
        for t in tensors:
            self._of.pop(_torch.storage_of(t), None)

    def has(self, t: Tensor) -> bool:
        """Whether the memory of a tensor is marked."""
        return _torch.storage_of(t) in self._of

    def are_alive(self) -> bool:
        """Whether any marked memory still exists."""
        return any(not reference.expired() for reference in self._of.values())


class _Watch(_torch.TorchDispatchMode):
    """Marks the results of operations that read marked memory.

    It raises an error before an embedding writes to its weight. If draws are forbidden, it also
    raises an error if an operation gets a generator, because only the states of the default
    generators are compared.
    """

    only_observes = True

    def __init__(self, marks: Marks, forbidden: str | None) -> None:
        super().__init__()
        self._marks, self._forbidden = marks, forbidden

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        values = (*args, *kwargs.values()) if kwargs else args
        if func is RENORM:
            raise RuntimeError("per_sample: embedding_renorm_ would write to the weight")
        if self._forbidden and any(isinstance(value, torch.Generator) for value in values):
            raise RuntimeError(self._forbidden)
        reads_values, is_mutable = _facts_of(func)
        depends = reads_values and any(map(self._marks.has, _tensors(values)))
        out = func(*args, **kwargs)
        if is_mutable:
            self._mark_written(func, args, kwargs, depends)
        elif depends:
            self._marks.add(_tensors(out if isinstance(out, (tuple, list)) else (out,)))
        return out

    def _mark_written(self, func: Any, args: Any, kwargs: Any, depends: bool) -> None:
        """Mark or unmark the arguments that an operation has written to."""
        arguments = func._schema.arguments
        named = {argument.name: value for argument, value in zip(arguments, args)} | kwargs
        is_written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in arguments}
        written = _tensors(value for name, value in named.items() if is_written[name])
        if func in _OVERWRITES or any(argument.is_out for argument in arguments):
            read = _tensors(value for name, value in named.items() if not is_written[name])
            depends = any(map(self._marks.has, read))
            if not depends:
                self._marks.drop(filter(_is_whole, written))
        if depends:
            self._marks.add(written)


@functools.cache
def _facts_of(func: Any) -> tuple[bool, bool]:
    """Whether an operator reads values of tensors, and whether it writes to its arguments."""
    return func.overloadpacket not in _SHAPES, func._schema.is_mutable


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results, and those in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [t for t in value if isinstance(t, Tensor)]
    return found


def _is_whole(t: Tensor) -> bool:
    """Whether a tensor uses all of its storage."""
    return t.numel() * t.element_size() == t.untyped_storage().nbytes()


class _Stage(enum.Enum):
    NEW = enum.auto()  # no example has run
    FIRST = enum.auto()  # the first example runs, or has run
    SECOND = enum.auto()  # the second example runs, on copies and with marks
    OVER = enum.auto()  # further examples run without a check


class CarriedState:
    """Checks the first two examples of one call; see NOTE [state]."""

    def __init__(self, api: str, module: nn.Module | None) -> None:
        self._api, self._module = api, module
        self._stage = _Stage.NEW
        self._marks: Marks | None = None  # of the first example, until the check is over
        self._reads = False  # whether a gradient of the second example depends on the first one

    def run(
        self,
        example: Callable[..., Any],
        leaves: list[Any],
        dims: list[Any],
        forbidden: str | None,
        is_only: bool,
    ) -> Any:
        """Run one example without ``vmap``.

        Args:
            example: the function of one example.
            leaves: the leaves of its arguments.
            dims: for each leaf, ``None`` if all examples share it.
            forbidden: the error message for a draw from an explicit generator; ``None`` if draws
                are allowed.
            is_only: whether the call has no further example.
        """
        if self._stage in (_Stage.SECOND, _Stage.OVER):
            return example(*leaves)
        if is_only:
            self._stage = _Stage.OVER
            with _Watch(Marks(), forbidden):
                return example(*leaves)
        # The example runs on copies of its slices of the batch. So if marked memory is still alive
        # later, user code has stored it. The memory of the batch itself always stays alive.
        copies = [leaf if dim is None else leaf.clone() for leaf, dim in zip(leaves, dims)]
        if self._marks is None:
            self._stage, self._marks = _Stage.FIRST, Marks()
            mapped = [leaf for leaf, dim in zip(copies, dims) if dim is not None]
            self._marks.add(tree.leaves(mapped))
            del mapped
            with _Watch(self._marks, forbidden):
                return example(*copies)
        if not self._marks.are_alive():
            self._stage, self._marks = _Stage.OVER, None
            return example(*leaves)
        self._stage = _Stage.SECOND
        shared = [leaf for leaf, dim in zip(leaves, dims) if dim is None]
        self._marks.drop(t for t in tree.leaves(shared) if isinstance(t, Tensor))
        with _Watch(self._marks, None):
            result = example(*copies)
        self.check(tree.leaves(result))
        if self._reads:
            raise ValueError(self._refusal(self._marks))
        self._stage, self._marks = _Stage.OVER, None
        return result

    def check(self, tensors: Iterable[Any]) -> None:
        """Note whether one of ``tensors``, results of the second example, is marked."""
        if self._marks is not None and self._stage is _Stage.SECOND:
            self._reads |= any(map(self._marks.has, _tensors(tensors)))

    def _refusal(self, marks: Marks) -> str:
        buffers = () if self._module is None else self._module.named_buffers()
        names = [repr(name) for name, buffer in buffers if marks.has(_torch.alive(buffer))]
        what = f"buffer {', '.join(names)}" if names else "a stored tensor"
        return (
            f"{self._api}: the forward writes the values of an example to {what}, and reads them "
            "for the next example, so the gradient of one example is not defined. If it writes "
            "only in training mode, put the module in evaluation mode. Otherwise return the values "
            "from the loss as aux, with has_aux=True, and update the statistics after the call"
        )
