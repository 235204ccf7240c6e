"""`gram`: inner products of the gradients of all pairs of examples, and the empirical NTK.

A block of the matrix needs the Jacobians of two chunks: with ``n`` chunks of ``c`` examples the
peak is that of ``2 c`` Jacobians and the matrix, and ``n (n + 1) / 2`` chunks are run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functx import _tree, _validate
from functx._transforms import jacrev
from functx._validate import Argnums
from functx.per_sample._batch import Batch, InDims, batch_of
from functx.per_sample._chunks import Chunking
from functx.per_sample._reduce import mapped
from functx.per_sample._stack import followed


def gram(
    func: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    outputs: str = "full",
    in_dims: InDims = None,
    chunk_size: int | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """Inner products of per-example gradients: for a network's outputs its empirical NTK.

    ``K[i, j] = sum over parameters of d func(x_i) / d p * d func(x_j) / d p``.

    Jacot et al., Neural tangent kernel, 2018.

    Args:
        func: A function of parameters and one example without batch dimension. It returns a real
            tensor of any shape ``m``; a loss, or the scores of all classes.
        argnums: Which positional arguments to differentiate.
        outputs: Of a function with several numbers, ``"full"``: products of all pairs;
            ``"diagonal"``: of equal numbers only; ``"trace"``: the sum of those.
        in_dims: As for `grads`: by default the differentiated arguments are shared.
        chunk_size: How many examples to run at a time; by default all.
        randomness: As for `grads`.

    Returns:
        A function of the same arguments, and ``others=None``, a tuple of all arguments but the
        differentiated ones for ``B2`` other examples (a tensor if there is only one), which by
        default are the same. It returns a tensor of shape ``(B, B2, *m, *m)``, ``(B, B2, *m)`` for
        the diagonal, ``(B, B2)`` for the trace.

    Raises:
        TypeError: ``func`` can't be called.
        ValueError: An unknown ``outputs``; or as `grads`.
        RuntimeError: As :func:`functx.jacrev`.

    Example:
        >>> import torch, functx
        >>> kernel = functx.per_sample.gram(lambda w, x: (w * x).sum())
        >>> kernel(torch.ones(2), torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        tensor([[1., 1.],
                [1., 5.]])
    """
    api = "per_sample.gram"
    _validate.check_callable(func, api)
    _validate.check_argnums(argnums, api)
    if outputs not in ("full", "diagonal", "trace"):
        raise ValueError(f"{api}: outputs must be 'full', 'diagonal' or 'trace', got {outputs!r}")
    chunking = Chunking(chunk_size, None, randomness, api)

    def with_output(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output = func(*args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"{api}: expected a function that returns a tensor, got {type(output).__name__}"
            )
        return output, output

    jacobian = jacrev(with_output, argnums, has_aux=True)

    def leaves(batch: Batch, start: int, chunk: int) -> list[torch.Tensor]:
        """Jacobians of a chunk by leaf, of shape ``(c, *m, numel)``."""
        rows = batch.rows(start, min(start + chunk, batch.size))
        found, output = mapped(jacobian, rows, randomness)
        return [leaf.reshape(*output.shape, -1) for leaf in _tree.leaves(found)]

    @functools.wraps(func, updated=())
    def products(*args: Any, others: Any = None, **kwargs: Any) -> torch.Tensor:
        positions = _validate.resolve_argnums(argnums, len(args), api)
        left = batch_of(args, kwargs, in_dims, positions, api)
        right = left
        if others is not None:
            rest = list(others) if isinstance(others, (tuple, list)) else [others]
            if len(rest) != len(args) - len(positions):
                raise ValueError(
                    f"{api}: others needs an entry for each of the {len(args) - len(positions)} "
                    f"arguments that are not differentiated, got {len(rest)}"
                )
            mixed = tuple(arg if at in positions else rest.pop(0) for at, arg in enumerate(args))
            right = batch_of(mixed, kwargs, in_dims, positions, api)
        if not left.size or not right.size:
            raise ValueError(f"{api}: no example to take products of")
        chunk = chunking.chunk_size or max(left.size, right.size)
        matrix = _Blocks(left.size, right.size, chunk)
        for start in range(0, left.size, chunk):
            own = leaves(left, start, chunk)
            for other in range(0, right.size, chunk):
                if right is left and other < start:
                    matrix.add(start, other, _mirrored(matrix.get(other, start), outputs))
                    continue
                same = right is left and other == start
                theirs = own if same else leaves(right, other, chunk)
                matrix.add(start, other, _products(own, theirs, outputs))
        return matrix.whole()

    return products


def _products(
    left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], outputs: str
) -> torch.Tensor:
    """Products of Jacobians of shape ``(c, *m, numel)``, summed over the leaves."""
    shape = left[0].shape[1:-1]
    total: torch.Tensor | None = None
    for one, other in zip(left, right):
        one, other = (part.reshape(len(part), -1, part.shape[-1]) for part in (one, other))
        if outputs == "full":
            # One product of matrices, (c1 m, n) by (n, c2 m).
            block = (one.flatten(0, 1) @ other.flatten(0, 1).mT).view(
                len(one), one.shape[1], len(other), other.shape[1]
            )
            block = block.transpose(1, 2)
        elif outputs == "trace":
            block = one.flatten(1) @ other.flatten(1).mT
        else:
            block = (one.transpose(0, 1) @ other.permute(1, 2, 0)).permute(1, 2, 0)
        total = block if total is None else total + block
    assert total is not None
    repeats = {"full": 2, "diagonal": 1, "trace": 0}[outputs]
    return total.reshape(*total.shape[:2], *shape * repeats)


def _mirrored(block: torch.Tensor, outputs: str) -> torch.Tensor:
    """The block of examples (j, i) from that of (i, j)."""
    if outputs != "full":
        return block.transpose(0, 1)
    numbers = (block.dim() - 2) // 2
    left, right = range(2, 2 + numbers), range(2 + numbers, 2 + 2 * numbers)
    return block.permute(1, 0, *right, *left)


class _Blocks:
    """A matrix of blocks, each put in its place at once unless something follows it there."""

    def __init__(self, rows: int, columns: int, chunk: int) -> None:
        self._shape, self._chunk = (rows, columns), chunk
        self._apart: dict[tuple[int, int], torch.Tensor] = {}
        self._matrix: torch.Tensor | None = None

    def add(self, row: int, column: int, block: torch.Tensor) -> None:
        """Put a block where its first entry belongs."""
        if self._apart or block.shape[:2] == self._shape or followed([block]):
            self._apart[row, column] = block
            return
        if self._matrix is None:
            self._matrix = block.new_empty(*self._shape, *block.shape[2:])
        self._matrix[row : row + len(block), column : column + block.shape[1]] = block

    def get(self, row: int, column: int) -> torch.Tensor:
        """A block that was put."""
        if self._matrix is None:
            return self._apart[row, column]
        return self._matrix[row : row + self._chunk, column : column + self._chunk]

    def whole(self) -> torch.Tensor:
        """The matrix."""
        if self._matrix is not None:
            return self._matrix
        columns = range(0, self._shape[1], self._chunk)
        rows = range(0, self._shape[0], self._chunk)
        return torch.cat(
            [torch.cat([self._apart[row, column] for column in columns], 1) for row in rows]
        )
