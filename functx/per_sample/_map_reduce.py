"""`map_reduce` and `jacobian`: apply any function of one example to a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functx._core import Argnums, tree, validate
from functx._transforms import jacfwd, jacrev
from functx.per_sample._batch import Batch, Counted, InDims, stacked
from functx.per_sample._batched_function import BatchedFunction, Func
from functx.per_sample._chunks import Chunks, Reduction

Reduce = Callable[[Any], Any]
Combine = Callable[[Any, Any], Any]


@validate.with_options
def map_reduce(
    func: Callable[..., Any],
    reduce: str | Reduce = "sum",
    combine: Combine | None = None,
    *,
    in_dims: InDims = 0,
    accumulation_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    budget: int | float | str | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """Apply a function to each example, and reduce the results chunk by chunk.

    Options in addition to those of `grads`:
        func: A function of one example, without batch dimension, that returns a pytree of tensors,
            for example a gradient and its square.
        reduce: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"`` over the examples. Or a function that
            takes the results of a chunk, the pytree with a leading dimension ``c``, and returns a
            pytree.
        combine: A function of two results of ``reduce``, for the earlier examples and for the next
            ones, which returns the result for both. By default they are added. It can only be used
            if ``reduce`` is a function.
        in_dims: The dimensions of the examples, as for :func:`torch.func.vmap`.
        accumulation_dtype: For ``"sum"`` and ``"mean"``, the dtype of the sum and of the result; by
            default that of the leaf.

    Returns:
        A function of the same arguments, for a batch, like the one that `grads` returns (with
        ``is_padding_example`` and iterators of batches). It returns a pytree like that of ``func``,
        or the combined results of ``reduce``.

    Raises:
        TypeError: ``func``, ``reduce`` or ``combine`` is not callable.
        ValueError: ``reduce`` is unknown; ``combine`` is used and ``reduce`` is not a function;
            ``in_dims`` or sizes don't fit; or there are no examples and ``reduce`` is not
            ``"sum"``.

    Example:
        >>> import torch, functx
        >>> square_of_gradient = lambda w, x: functx.grad(lambda w: (w * x).sum())(w) ** 2
        >>> diagonal = functx.per_sample.map_reduce(square_of_gradient, "mean", in_dims=(None, 0))
        >>> diagonal(torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([ 5., 10.])
    """
    api = "per_sample.map_reduce"
    validate.check_callable(func, api)
    if combine is not None:
        validate.check_callable(combine, api)
    if not isinstance(reduce, str):
        validate.check_callable(reduce, api)
    else:
        if reduce not in ("sum", "mean", "min", "max"):
            raise ValueError(
                f"{api}: reduce must be 'sum', 'mean', 'min', 'max' or a function, got {reduce!r}"
            )
        if combine is not None:
            raise ValueError(
                f"{api}: combine can be used only if reduce is a function, not with {reduce!r}"
            )
    chunks = Chunks(api, chunk_size, budget, randomness)
    function = BatchedFunction(func, None, in_dims, chunks)
    return function.over_batch(
        lambda batch: _Reduced(function, reduce, combine, accumulation_dtype)
    )


@validate.with_options
def jacobian(
    func: Func,
    argnums: Argnums = 0,
    *,
    mode: str = "reverse",
    in_dims: InDims = None,
    has_aux: bool = False,
    chunk_size: int | None = None,
    budget: int | float | str | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """The Jacobian of a function for each example.

    Options in addition to those of `grads`:
        func: A function of one example, without batch dimension, that returns a pytree of real
            floating point tensors (with ``has_aux``, a pair of that and a pytree of tensors). Or a
            module, or a pair ``(module, criterion)``, as for `grads`. The module, or the criterion,
            is called with a batch of one, whose dimension is removed from the result. The result is
            differentiated with respect to the parameters that require grad.
        mode: ``"reverse"``, with a pullback for each element of the output, or ``"forward"``, with
            a pushforward for each element of the input.

    Returns:
        A function of the same arguments, for a batch, like the one that `grads` returns. It
        returns, for each output of shape ``m`` and each leaf of shape ``n``, a tensor of shape
        ``(B, *m, *n)``, in pytrees like those of :func:`functx.jacrev`; with ``has_aux``, the pair
        of that and ``aux``.

    Raises:
        TypeError: ``func`` is not callable.
        ValueError: ``mode`` is unknown; or as `grads`.
        RuntimeError: As :func:`functx.jacrev`.

    Example:
        >>> import torch, functx
        >>> scores = lambda w, x: torch.stack([w * x, w + x])
        >>> jacobian = functx.per_sample.jacobian(scores)
        >>> jacobian(torch.tensor(2.0), torch.tensor([3.0, 5.0]))
        tensor([[3., 1.],
                [5., 1.]])
    """
    api = "per_sample.jacobian"
    if mode not in ("reverse", "forward"):
        raise ValueError(f"{api}: mode must be 'reverse' or 'forward', got {mode!r}")
    chunks = Chunks(api, chunk_size, budget, randomness)
    function = BatchedFunction(func, argnums, in_dims, chunks, outputs=True)
    transform: Any = jacrev if mode == "reverse" else _jacfwd
    of_one = transform(function.func, argnums, has_aux=has_aux)
    return function.over_batch(lambda batch: Reduction(of_one, randomness))


def _jacfwd(func: Callable[..., Any], argnums: Argnums, has_aux: bool) -> Callable[..., Any]:
    """`jacfwd`, called with the leaves of the differentiated arguments as separate arguments.

    torch's ``jacfwd`` rebuilds pytrees of arguments and aux with ints as leaves, and a class of the
    user may raise an error for these.
    """

    def of_one(*args: Any, **kwargs: Any) -> Any:
        positions = validate.resolve_argnums(argnums, len(args), "jacfwd")
        validate.check_inputs(args, positions, "jacfwd(f)(*args)")
        trees = [tree.flatten(args[position]) for position in positions]
        structures: list[tree.TreeSpec] = []

        def rebuilt(each: Sequence[Any]) -> list[Any]:
            it = iter(each)
            return [tree.unflatten(spec, itertools.islice(it, len(own))) for own, spec in trees]

        def of_leaves(*leaves: torch.Tensor) -> Any:
            given = dict(enumerate(args)) | dict(zip(positions, rebuilt(leaves)))
            output, aux = func(*given.values(), **kwargs), None
            if has_aux:
                output, aux = validate.split_aux(output, "jacfwd")
            parts = [tree.flatten(part) for part in (output, aux)]
            structures[:] = [spec for _, spec in parts]
            return (parts[0][0], parts[1][0]) if has_aux else parts[0][0]

        leaves = [leaf for own, _ in trees for leaf in own]
        found: Any = jacfwd(of_leaves, tuple(range(len(leaves))), has_aux)(*leaves)
        rows, aux = found if has_aux else (found, [])
        parts = [rebuilt(row) for row in rows]
        one = isinstance(argnums, int)
        jacobian = tree.unflatten(structures[0], [p[0] if one else tuple(p) for p in parts])
        return (jacobian, tree.unflatten(structures[1], aux)) if has_aux else jacobian

    return of_one


class _Reduced(Reduction):
    """Reduces the results of all examples, chunk by chunk."""

    def __init__(
        self,
        function: BatchedFunction,
        reduce: str | Reduce,
        combine: Combine | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(function.func, function.chunks.randomness)
        self._api, self._reduce, self._combine, self._dtype = function.api, reduce, combine, dtype
        self._total: Any = None
        self._count = 0

    def run(self, batch: Batch) -> tuple[()]:
        rows = super().run(batch)
        if callable(self._reduce):
            part = self._reduce(stacked(self.structure, rows))
        elif self._reduce in ("min", "max"):
            part = [getattr(leaf, f"a{self._reduce}")(0) for leaf in rows]
        else:
            part = [leaf.sum(0, dtype=self._dtype) for leaf in rows]
        if self._count:
            part = self._combined(self._total, part)
        self._total, self._count = part, self._count + batch.size
        return ()

    def _combined(self, before: Any, part: Any) -> Any:
        if self._combine is not None:
            return self._combine(before, part)
        how = {"min": torch.minimum, "max": torch.maximum}.get(str(self._reduce), torch.add)
        (flat, spec), (parts, part_spec) = tree.flatten(before), tree.flatten(part)
        if spec != part_spec:
            raise ValueError(
                f"{self._api}: reduce returned different structures for two chunks, "
                f"{tree.shown(part_spec)} after {tree.shown(spec)}, which can't be added; pass "
                "combine"
            )
        for one, other in zip(flat, parts):
            if one.shape != other.shape:
                raise ValueError(
                    f"{self._api}: reduce returned different shapes for two chunks, "
                    f"{tuple(other.shape)} after {tuple(one.shape)}, which can't be added; pass "
                    "combine"
                )
        return tree.unflatten(spec, map(how, flat, parts))

    def result(self, counted: Counted) -> Any:
        if counted.empty and self._reduce != "sum":
            raise ValueError(f"{self._api}: there are no examples to reduce")
        if callable(self._reduce):
            return self._total
        total = self._total
        if counted.empty:
            total = [torch.zeros_like(leaf) for leaf in total]
        if self._reduce == "mean":
            total = [leaf / self._count for leaf in total]
        return tree.unflatten(self.structure, total)
