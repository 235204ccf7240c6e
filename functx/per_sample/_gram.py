"""`gram`: inner products of the gradients of all pairs of examples, and the empirical NTK.

A block of the matrix needs the Jacobians of two chunks: with ``n`` chunks of ``c`` examples the
peak is that of ``2 c`` Jacobians and the matrix, and ``n (n + 1) / 2`` chunks are run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functx import _tree
from functx._transforms import jacrev
from functx._validate import Argnums
from functx.per_sample._batch import Batch, InDims, joined, split_batches
from functx.per_sample._call import Func, PerSample
from functx.per_sample._reduce import mapped
from functx.per_sample._stack import Stack


def gram(
    func: Func,
    argnums: Argnums = 0,
    *,
    outputs: str = "full",
    in_dims: InDims = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """Inner products of per-example gradients: for a network's outputs its empirical NTK.

    ``K[i, j] = sum over parameters of d func(x_i) / d p * d func(x_j) / d p``.

    Jacot et al., Neural tangent kernel, 2018.

    Args:
        func: A function of parameters and one example without batch dimension. It returns a real
            tensor of any shape ``m``; a loss, or the scores of all classes. Or a module, or a pair
            ``(module, criterion)``, as for `jacobian`.
        argnums: Which positional arguments to differentiate.
        outputs: Of a function with several numbers, ``"full"``: products of all pairs;
            ``"diagonal"``: of equal numbers only; ``"trace"``: the sum of those.
        in_dims: As for `grads`: by default the differentiated arguments are shared.
        chunk_size: As for `grads`.
        memory_budget: As for `grads`.
        randomness: As for `grads`.

    Returns:
        A function of the same arguments, for a batch, as `grads` returns one (with
        ``is_padding_example`` and iterators of batches), and ``others=None``, a tuple of all
        arguments but the differentiated ones for ``B2`` other examples (a tensor if there is only
        one), which by default are the same. It returns a tensor of shape ``(B, B2, *m, *m)``,
        ``(B, B2, *m)`` for the diagonal, ``(B, B2)`` for the trace; zeros for padding.

    Raises:
        TypeError: ``func`` can't be called, or does not return a tensor.
        ValueError: An unknown ``outputs``; no example; or as `grads`.
        RuntimeError: As :func:`functx.jacrev`.

    Example:
        >>> import torch, functx
        >>> kernel = functx.per_sample.gram(lambda w, x: (w * x).sum())
        >>> kernel(torch.ones(2), torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        tensor([[1., 1.],
                [1., 5.]])
    """
    api = "per_sample.gram"
    over = PerSample.of(
        api, func, argnums, in_dims, chunk_size, memory_budget, randomness, outputs=True
    )
    if outputs not in ("full", "diagonal", "trace"):
        raise ValueError(f"{api}: outputs must be 'full', 'diagonal' or 'trace', got {outputs!r}")

    def with_output(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output = over.func(*args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"{api}: expected a function that returns a tensor, got {type(output).__name__}"
            )
        return output, output

    jacobian = jacrev(with_output, argnums, has_aux=True)

    def leaves(batch: Batch) -> list[torch.Tensor]:
        """Jacobians of a chunk by leaf, of shape ``(c, *m, numel)``."""
        found, output = mapped(jacobian, batch, randomness)
        return [leaf.reshape(*output.shape, -1) for leaf in _tree.leaves(found)]

    @functools.wraps(over.func, updated=())
    def products(*args: Any, others: Any = None, **kwargs: Any) -> torch.Tensor:
        shown = {key: arg for key, arg in kwargs.items() if key != "is_padding_example"}
        with over.arguments(args) as args:
            if batches := [over.batch(one, shown) for one in split_batches(args) or ()]:
                args = joined(batches)
            right: Batch | None = None
            if others is not None:
                rest = list(others) if isinstance(others, (tuple, list)) else [others]
                positions = over.positions(args)
                if len(rest) != len(args) - len(positions):
                    raise ValueError(
                        f"{api}: others needs an entry for each of the "
                        f"{len(args) - len(positions)} arguments that are not differentiated, got "
                        f"{len(rest)}"
                    )
                mixed = [arg if at in positions else rest.pop(0) for at, arg in enumerate(args)]
                right = over.batch(tuple(mixed), shown)
            matrix: torch.Tensor = over.run(
                lambda left: _Matrix(left, right, leaves, outputs, api), args, kwargs
            )
            return matrix

    return products


class _Matrix:
    """The job: rows of the matrix, for one chunk after the other.

    Args:
        left: The examples that chunks are cut from.
        right: The others; ``None`` if they are the same, and the matrix is its own mirror image.
        jacobians: Of a chunk, by leaf.
        outputs: As for `gram`.
        api: The name for error messages.
    """

    def __init__(
        self,
        left: Batch,
        right: Batch | None,
        jacobians: Callable[[Batch], list[torch.Tensor]],
        outputs: str,
        api: str,
    ) -> None:
        self._mirror = right is None
        right = left if right is None else right
        self._right = right if right.size else right.zeros()
        self._jacobians, self._outputs, self._api = jacobians, outputs, api
        self._rows = Stack()

    def run(self, batch: Batch) -> None:
        own, first, size = self._jacobians(batch), 0, self._right.size
        blocks: list[torch.Tensor] = []
        # While memory is measured there are other rows.
        mirror = self._mirror and batch.whole == (0, size)
        if mirror and batch.start:
            first = batch.start
            above = self._rows.before(batch)[:, first : first + batch.size]
            blocks.append(_mirrored(above, self._outputs))
        for start in range(first, size, batch.size):
            other = self._right.chunk(start, min(start + batch.size, size))
            same = mirror and start == batch.start
            blocks.append(_products(own, own if same else self._jacobians(other), self._outputs))
        self._rows.put(batch, torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0])

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> torch.Tensor:
        if not size:
            raise ValueError(f"{self._api}: no example to take products of")
        matrix: torch.Tensor = self._rows.close(kept, size, empty)
        if not self._mirror or kept is None:
            return matrix
        whole = matrix.new_zeros(size, size, *matrix.shape[2:])
        return whole.index_copy(1, kept.to(matrix.device), matrix[:, : len(kept)])


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
