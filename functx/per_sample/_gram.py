"""`gram`: inner products of per-example gradients, block by block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from functx._core import Argnums, tree, validate
from functx._transforms import jacrev
from functx.per_sample._batch import Batch, Counted, InDims, joined, split_batches
from functx.per_sample._batched_function import BatchedFunction, Func
from functx.per_sample._chunks import Chunks, Reduction


@validate.with_options
def gram(
    func: Func,
    argnums: Argnums = 0,
    *,
    outputs: str = "full",
    in_dims: InDims = None,
    chunk_size: int | None = None,
    budget: int | float | str | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """Inner products of per-example gradients. For a network's outputs, this is the empirical NTK.

    ``K[i, j] = sum over parameters of d func(x_i) / d p * d func(x_j) / d p``.

    Jacot et al., Neural tangent kernel, 2018.

    Options in addition to those of `grads`:
        func: A function of parameters and one example without batch dimension. It returns a real
            tensor of any shape ``m``, for example a loss, or the scores of all classes. Or a
            module, or a pair ``(module, criterion)``, as for `jacobian`.
        outputs: Which elements of the output are paired: ``"full"`` for all pairs, ``"diagonal"``
            for each element with itself, ``"trace"`` for the sum of the diagonal.

    Returns:
        A function of the same arguments, for a batch, like the one that `grads` returns (with
        ``is_padding_example`` and iterators of batches). It has one more argument, ``others=None``:
        ``B2`` other examples, as a tuple of all arguments that are not differentiated (or a tensor,
        if there is only one). By default these are the same examples. It returns a tensor of shape
        ``(B, B2, *m, *m)``, of shape ``(B, B2, *m)`` for the diagonal, and ``(B, B2)`` for the
        trace, with zeros for padding.

    Raises:
        TypeError: ``func`` is not callable, or does not return a tensor.
        ValueError: ``outputs`` is unknown; there is no example; or as `grads`.
        RuntimeError: As :func:`functx.jacrev`.

    Example:
        >>> import torch, functx
        >>> kernel = functx.per_sample.gram(lambda w, x: (w * x).sum())
        >>> kernel(torch.ones(2), torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        tensor([[1., 1.],
                [1., 5.]])
    """
    api = "per_sample.gram"
    chunks = Chunks(api, chunk_size, budget, randomness)
    function = BatchedFunction(func, argnums, in_dims, chunks, outputs=True)
    if outputs not in _EQUATIONS:
        raise ValueError(f"{api}: outputs must be 'full', 'diagonal' or 'trace', got {outputs!r}")

    def with_output(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output = function.func(*args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"{api}: expected a function that returns a tensor, got {type(output).__name__}"
            )
        return output, output

    both = jacrev(with_output, argnums, has_aux=True)

    def jacobian(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        found, output = both(*args, **kwargs)
        return output, tree.leaves(found)

    @functools.wraps(function.func, updated=())
    def products(*args: Any, others: Any = None, **kwargs: Any) -> Any:
        shown = {key: arg for key, arg in kwargs.items() if key != "is_padding_example"}
        with function.arguments(args) as args:
            if batches := [function.batch(one, shown) for one in split_batches(args) or ()]:
                args = joined(batches)
            right: Batch | None = None
            if others is not None:
                rest = list(others) if isinstance(others, (tuple, list)) else [others]
                positions = function.positions(args)
                count = len(args) - len(positions)
                if len(rest) != count:
                    raise ValueError(
                        f"{api}: others needs an entry for each of the {count} arguments that are "
                        f"not differentiated, got {len(rest)}"
                    )
                mixed = [arg if at in positions else rest.pop(0) for at, arg in enumerate(args)]
                right = function.batch(tuple(mixed), shown)
            return function.run(
                lambda left: _GramMatrix(function, left, right, jacobian, outputs), args, kwargs
            )

    return products


# The products of Jacobians of shape (c, a, numel), where a is the number of output elements.
_EQUATIONS = {"full": "iap,jbp->ijab", "diagonal": "iap,jap->ija", "trace": "iap,jap->ij"}


class _GramMatrix(Reduction):
    """Computes the rows of the Gram matrix, chunk by chunk."""

    def __init__(
        self,
        function: BatchedFunction,
        left: Batch,
        others: Batch | None,
        jacobian: Callable[..., Any],
        outputs: str,
    ) -> None:
        super().__init__(jacobian, function.chunks.randomness)
        self._api, self._outputs = function.api, outputs
        self._mirror, right = others is None, left if others is None else others
        right = replace(right, call=left.call)  # examples of both sides share one check of state
        self._right = right if right.size else replace(right.zeros(), call=left.call)
        self._shape = torch.Size()

    def _jacobians(self, batch: Batch) -> list[torch.Tensor]:
        """The Jacobians of a chunk, by leaf."""
        output, *leaves = super().run(batch)
        self._shape = output.shape[1:]
        return [leaf.reshape(len(leaf), self._shape.numel(), -1) for leaf in leaves]

    def _block(self, own: list[torch.Tensor], other: Any, columns: int) -> torch.Tensor:
        pairs = zip(own, [leaf[:columns] for leaf in other or own])
        parts = (torch.einsum(_EQUATIONS[self._outputs], *pair) for pair in pairs)
        return functools.reduce(torch.add, parts)

    def run(self, batch: Batch) -> torch.Tensor:
        own, first, size = self._jacobians(batch), 0, self._right.size
        blocks: list[torch.Tensor] = []
        # The matrix is symmetric, so its lower triangle is copied. Not while memory is measured:
        # then this chunk is not a part of `_right`.
        mirror = self._mirror and batch.whole == (0, size)
        if mirror and batch.start:
            first = batch.start
            above = self.stack.before(batch)[:, first : first + batch.size].transpose(0, 1)
            blocks.append(above.mT if self._outputs == "full" else above)
        for start in range(first, size, batch.size):
            # The other Jacobians are not stored, so they are freed after the product.
            other = self._right.chunk(start, min(start + batch.size, size))
            same = (self._mirror and self.is_all) or (mirror and start == batch.start)
            blocks.append(self._block(own, None if same else self._jacobians(other), other.size))
        return torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]

    def result(self, counted: Counted) -> torch.Tensor:
        if not counted.size:
            raise ValueError(f"{self._api}: the batch has no examples")
        matrix: torch.Tensor = self.stack.close(counted)
        matrix = matrix.reshape(*matrix.shape[:2], *self._shape * (matrix.dim() - 2))
        return counted.rows(matrix, 1) if self._mirror else matrix
