"""The gradients of a chunk by ``torch.compile``, for those who ask for it.

A chunk of few examples is small work for each operation, and what Python and the transforms add is
paid for every chunk. Compiled, a chunk is one graph: what is elementwise is fused, and nothing is
dispatched.

NOTE [checked against eager]
The compiler is not always right: it looks into a custom ``autograd.Function`` under a transform and
differentiates its forward instead of calling its backward. So where a graph was made, the chunk
runs in eager too: a loss that calls such a Function, wherever it does, is not compiled, and what
the graph gives is compared. Where they differ, or there is no graph, all runs in eager, with a
warning that names the cause. Where eager raises as well, the error is the loss's own, and nothing
is given up. Nobody else runs a graph before its check has ended, and one whose check did not end is
made again. That a graph serves what it was made for is the compiler's to see (its guards); a loss
is a function of its arguments and of what these can see.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from functx import _torch, _tree
from functx._functions import function_classes
from functx._torch import compiler
from functx.per_sample._batch import Batch
from functx.per_sample._failure import is_out_of_memory, outside

# Examples of so many shapes are compiled for; after that it takes longer than it spares.
_SHAPES = 8
Eager = Callable[["_Kept", Callable[..., Any]], tuple[Any, Any]]


class Compiled:
    """Runs one loss over chunks of one size, compiled.

    Args:
        options: Of :func:`torch.compile`.
        chunk_size: Of the chunks; that of the first one if ``None``.
        api: The name for messages.
    """

    def __init__(self, options: Mapping[str, Any], chunk_size: int | None, api: str) -> None:
        self._options = {"dynamic": False, **options, "fullgraph": True}
        self._chunk_size, self._api = chunk_size, api
        self._sizes: dict[Any, int] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._gave_up = self._warned = False
        self._lock = threading.RLock()

    def serves(self, loss: Any, batch: Batch) -> bool:
        """Whether a chunk may run compiled; those of other sizes would each have to be compiled."""
        signature = batch.signature()
        if signature not in self._sizes and len(self._sizes) >= _SHAPES:
            self._warn(f"examples of more than {_SHAPES} shapes came; pad them")
            return False
        size = self._sizes.setdefault(signature, self._chunk_size or batch.size)
        if self._gave_up or batch.size != size or size == 1 or loss.randomness != "error":
            return False
        if _torch.transforming() or _torch.dispatch_depth() or _torch.dual_level() >= 0:
            return False
        leaves = (leaf for leaf in batch.leaves if isinstance(leaf, torch.Tensor))
        return not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in leaves)

    def rows(self, loss: Any, batch: Batch, eager: Eager) -> tuple[Any, Any, list[Any]] | None:
        """Values, auxiliary outputs and the gradients of each leaf; ``None`` if there is no graph.

        Args:
            loss: A `Loss`.
            batch: The chunk.
            eager: Runs the chunk in eager with another function, and feeds a receiver.
        """
        with self._lock, self._checking(loss, batch):
            return None if self._gave_up else self._rows(loss, batch, eager)

    def _rows(self, loss: Any, batch: Batch, eager: Eager) -> tuple[Any, Any, list[Any]] | None:
        before = compiler.graphs_compiled()
        try:
            with compiler.hooks_guarded():
                gradients, (value, aux) = self._function(loss, batch)(batch.args(), batch.kwargs)
        except Exception as error:  # whatever the compiler stumbles over
            if is_out_of_memory(error):
                raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            cause = f"{type(error).__name__}: {' '.join(lines[:3])}"
        else:
            rows = _tree.leaves(gradients)
            if compiler.graphs_compiled() == before:
                return value, aux, rows
            found = _differs(loss, (value, aux), rows, eager)
            if found is None:
                return value, aux, rows
            self._give_up(found)
            return None
        eager(_Kept(), loss.func)  # which raises what is wrong with the loss or its arguments
        self._give_up(cause)
        return None

    @contextmanager
    def _checking(self, loss: Any, batch: Batch) -> Iterator[None]:
        """Forget the graphs of a call that raised, if it made any: they were not checked."""
        key, before = self._key(loss, batch), compiler.graphs_compiled()
        new = key not in self._functions
        try:
            yield
        except BaseException:
            if new or compiler.graphs_compiled() != before:
                self._functions.pop(key, None)
                if all(signature != key[0] for signature, *_ in self._functions):
                    self._sizes.pop(key[0], None)
            raise

    def _give_up(self, cause: str) -> None:
        self._gave_up = True
        self._warn(cause)

    def _warn(self, cause: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._api}: compile=True has no effect here, chunks run in eager: {cause}",
                RuntimeWarning,
                stacklevel=outside(),
            )

    @staticmethod
    def _key(loss: Any, batch: Batch) -> tuple[Any, ...]:
        return batch.signature(), batch.spec, loss.positions

    def _function(self, loss: Any, batch: Batch) -> Callable[..., Any]:
        key = self._key(loss, batch)
        if key not in self._functions:
            self._functions[key] = torch.compile(_gradients_of(loss, batch), **self._options)
        return self._functions[key]


class _Kept:
    """A receiver that keeps all gradients, to compare with."""

    factors = committing = False
    keeps = True

    def __init__(self) -> None:
        self.rows: dict[int, Any] = {}

    def restart(self) -> None:
        raise AssertionError("asked for without factors")

    def gradient(self, leaf: int, rows: Any) -> None:
        self.rows[leaf] = rows

    def again(self) -> Sequence[int]:
        return ()

    def may_ask_again(self) -> bool:
        return False


def _differs(loss: Any, results: Any, rows: list[Any], eager: Eager) -> str | None:
    """What is other in eager, see NOTE [checked against eager]."""
    kept = _Kept()
    classes = function_classes()
    expected = eager(kept, loss.func)
    if function_classes() != classes:
        return "a custom Function in it has a backward of its own, which the compiler passes over"
    if not all(map(_alike, _tree.leaves(results), _tree.leaves(expected))):
        return "compiled, it gives other values than in eager"
    if not all(map(_alike, rows, map(kept.rows.get, range(len(rows))))):
        return "compiled, its gradients are others than in eager"
    return None


def _gradients_of(loss: Any, batch: Batch) -> Callable[..., Any]:
    """A function of positional and keyword arguments of a chunk, for the compiler to look into."""
    func, positions, has_aux = loss.func, loss.positions, loss.has_aux
    in_dims = tuple(
        dims if any(dim is not None for dim in _tree.leaves(dims)) else None
        for dims in _tree.unflatten(batch.spec, batch.dims)
    )

    def gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def of_one(*own: Any) -> Any:
            return func(*own, **kwargs)

        each = torch.func.grad_and_value(of_one, positions, has_aux)
        found, value = torch.func.vmap(each, in_dims)(*args)
        return found, value if has_aux else (value, None)

    # The compiler counts what it made of a piece of code, and stops at a few: one for each loss.
    own = types.FunctionType(
        gradients.__code__.replace(co_name="gradients"),
        gradients.__globals__,
        closure=gradients.__closure__,
    )
    return own


def _alike(one: Any, other: Any) -> bool:
    """Whether two results are the same but for rounding."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is None and other is None
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.requires_grad != other.requires_grad:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    rtol = torch.finfo(one.dtype).eps ** 0.5
    largest = other.detach().abs().nan_to_num(0, 0, 0).max() if other.numel() else 0
    return torch.allclose(one, other, rtol=rtol, atol=rtol * float(largest), equal_nan=True)


def compiled_by(
    compile: bool | Mapping[str, Any], chunk_size: int | None, memory_budget: int | None, api: str
) -> Compiled | None:
    """What the option asks for.

    Raises:
        TypeError: Neither a bool nor a mapping.
        ValueError: There is a memory budget.
    """
    if not isinstance(compile, (bool, Mapping)):
        raise TypeError(
            f"{api}: compile must be True or a dict of options of torch.compile, got {compile!r}"
        )
    if compile is False:
        return None
    if memory_budget is not None:
        raise ValueError(
            f"{api}: the memory of compiled code is not measured; give chunk_size with compile, "
            "instead of memory_budget"
        )
    return Compiled({} if compile is True else compile, chunk_size, api)
