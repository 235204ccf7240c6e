"""`map_reduce`, `jacobian` and `gram`: any function of one example, over a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from functx import _torch, _tree, _validate
from functx._jacobians import jacfwd, jacrev
from functx._validate import Argnums
from functx.per_sample._batch import Batch, InDims, joined, split_batches
from functx.per_sample._options import Func, PerSample
from functx.per_sample._sums import Stack

Reduce = Callable[[Any], Any]
Combine = Callable[[Any, Any], Any]


def map_reduce(
    func: Callable[..., Any],
    reduce: str | Reduce = "sum",
    combine: Combine | None = None,
    *,
    in_dims: InDims = 0,
    accumulation_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """Anything computed for each example, reduced chunk by chunk.

    Options that are not those of `grads`:
        func: A function of one example, without batch dimension, that returns a pytree of tensors:
            a gradient and its square, say.
        reduce: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` over the examples; or a function of a
            chunk's results, the pytree with a leading dimension ``c``, that returns a pytree.
        combine: A function of what `reduce` made of the examples so far and of the next ones, that
            returns the two in one; by default they are added. Only with a function for ``reduce``.
        in_dims: Where the examples are, as for :func:`torch.func.vmap`.
        accumulation_dtype: For ``"sum"`` and ``"mean"``, the dtype to add up in, and that of the
            result; by default that of the leaf.

    Returns:
        A function of the same arguments, for a batch, as `grads` returns one (with
        ``is_padding_example`` and iterators of batches): a pytree like that of ``func``, or what
        ``reduce`` makes of it.

    Raises:
        TypeError: ``func``, ``reduce`` or ``combine`` can't be called.
        ValueError: An unknown ``reduce``; ``combine`` without a function for it; ``in_dims`` or
            sizes don't fit; no example to reduce, where there is no neutral element.

    Example:
        >>> import torch, functx
        >>> square_of_gradient = lambda w, x: functx.grad(lambda w: (w * x).sum())(w) ** 2
        >>> diagonal = functx.per_sample.map_reduce(square_of_gradient, "mean", in_dims=(None, 0))
        >>> diagonal(torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([ 5., 10.])
    """
    api = "per_sample.map_reduce"
    _validate.check_callable(func, api)
    if combine is not None:
        _validate.check_callable(combine, api)
    if not isinstance(reduce, str):
        _validate.check_callable(reduce, api)
    else:
        if reduce not in ("sum", "mean", "min", "max"):
            raise ValueError(
                f"{api}: reduce must be 'sum', 'mean', 'min', 'max' or a function, got {reduce!r}"
            )
        if combine is not None:
            raise ValueError(f"{api}: combine goes with a function for reduce, not with {reduce!r}")
    over = PerSample(api, func, (), in_dims, chunk_size, memory_budget, randomness)
    return over.over_batch(lambda batch: _Reduction(over, reduce, combine, accumulation_dtype))


def jacobian(
    func: Func,
    argnums: Argnums = 0,
    *,
    mode: str = "reverse",
    in_dims: InDims = None,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """The Jacobian of a function for each example.

    Options that are not those of `grads`:
        func: A function of one example, without batch dimension, that returns a pytree of real
            floating point tensors (with ``has_aux`` a pair of that and a pytree of tensors). Or a
            module, or a pair ``(module, criterion)``, as for `grads`: what the module, or the
            criterion, returns for a batch of one, which is taken off, is differentiated with
            respect to the parameters that require grad.
        argnums: Which positional arguments to differentiate.
        mode: ``"reverse"``, a pullback for each number of the output, or ``"forward"``, a
            pushforward for each number of the input.
        in_dims: As for `grads`: by default the differentiated arguments are shared.
        has_aux: Whether ``func`` returns ``(output, aux)``.

    Returns:
        A function of the same arguments, for a batch, as `grads` returns one: for each output of
        shape ``m`` and each leaf of shape ``n`` a tensor of shape ``(B, *m, *n)``, in pytrees as
        :func:`functx.jacrev` makes them; with ``has_aux`` the pair of that and ``aux``.

    Raises:
        TypeError: ``func`` can't be called.
        ValueError: An unknown ``mode``; or as `grads`.
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
    over = PerSample(
        api, func, argnums, in_dims, chunk_size, memory_budget, randomness, outputs=True
    )
    transform: Any = jacrev if mode == "reverse" else jacfwd
    _validate.check_argnums(argnums, api)
    of_one = transform(over.func, argnums, has_aux=has_aux)
    return over.over_batch(lambda batch: _Mapping(of_one, randomness))


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

    Options that are not those of `grads`:
        func: A function of parameters and one example without batch dimension. It returns a real
            tensor of any shape ``m``; a loss, or the scores of all classes. Or a module, or a pair
            ``(module, criterion)``, as for `jacobian`.
        argnums: Which positional arguments to differentiate.
        outputs: Of a function with several numbers, ``"full"``: products of all pairs;
            ``"diagonal"``: of equal numbers only; ``"trace"``: the sum of those.
        in_dims: As for `grads`: by default the differentiated arguments are shared.

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
    over = PerSample(
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

    _validate.check_argnums(argnums, api)
    jacobian = jacrev(with_output, argnums, has_aux=True)

    @functools.wraps(over.func, updated=())
    def products(*args: Any, others: Any = None, **kwargs: Any) -> Any:
        shown = {key: arg for key, arg in kwargs.items() if key != "is_padding_example"}
        with over.arguments(args) as args:
            if batches := [over.batch(one, shown) for one in split_batches(args) or ()]:
                args = joined(batches)
            right: Batch | None = None
            if others is not None:
                rest = list(others) if isinstance(others, (tuple, list)) else [others]
                positions = over.positions(args)
                count = len(args) - len(positions)
                if len(rest) != count:
                    raise ValueError(
                        f"{api}: others needs an entry for each of the {count} arguments that are "
                        f"not differentiated, got {len(rest)}"
                    )
                mixed = [arg if at in positions else rest.pop(0) for at, arg in enumerate(args)]
                right = over.batch(tuple(mixed), shown)
            return over.run(
                lambda left: _Matrix(over, left, right, jacobian, outputs), args, kwargs
            )

    return products


def mapped(func: Callable[..., Any], batch: Batch, randomness: str) -> Any:
    """``func`` of each example of a chunk, leaves of shape ``(c, ...)``; of one as it is."""
    if batch.size > 1 or _torch.transforming():
        return batch.map(func, randomness)
    return _tree.map_(lambda leaf: leaf.unsqueeze(0), batch.alone(func, randomness))


class _Mapping:
    """The job of `jacobian`: results of all examples, side by side."""

    def __init__(self, func: Callable[..., Any], randomness: str) -> None:
        self._func, self._randomness, self._stack = func, randomness, Stack()

    def run(self, batch: Batch) -> None:
        self._stack.put(batch, mapped(self._func, batch, self._randomness))

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> Any:
        return self._stack.close(kept, size, empty)


class _Reduction:
    """The job of `map_reduce`: results of all examples, in one."""

    def __init__(
        self,
        over: PerSample,
        reduce: str | Reduce,
        combine: Combine | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._over, self._reduce, self._combine, self._dtype = over, reduce, combine, dtype
        self._total: Any = None
        self._count = 0

    def run(self, batch: Batch) -> None:
        rows = mapped(self._over.func, batch, self._over.randomness)
        part = self._reduced(rows)
        if self._count:
            part = self._combined(self._total, part)
        self._total, self._count = part, self._count + batch.size

    def _reduced(self, rows: Any) -> Any:
        if callable(self._reduce):
            return self._reduce(rows)
        if self._reduce in ("min", "max"):
            return _tree.map_(lambda leaf: getattr(leaf, f"a{self._reduce}")(0), rows)
        return _tree.map_(lambda leaf: leaf.sum(0, dtype=self._dtype), rows)

    def _combined(self, before: Any, part: Any) -> Any:
        if self._combine is not None:
            return self._combine(before, part)
        how = {"min": torch.minimum, "max": torch.maximum}.get(str(self._reduce), torch.add)
        (flat, spec), (parts, part_spec) = _tree.flatten(before), _tree.flatten(part)
        if spec != part_spec:
            raise ValueError(
                f"{self._over.api}: reduce returned another structure for another chunk, "
                f"{_tree.shown(part_spec)} after {_tree.shown(spec)}; give combine"
            )
        for one, other in zip(flat, parts):
            if one.shape != other.shape:
                raise ValueError(
                    f"{self._over.api}: reduce returned shape {tuple(other.shape)} after "
                    f"{tuple(one.shape)} for another chunk, which can't be added; give combine"
                )
        return _tree.unflatten(spec, map(how, flat, parts))

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> Any:
        if empty and self._reduce != "sum":
            raise ValueError(f"{self._over.api}: no example to reduce")
        if empty:
            return _tree.map_(torch.zeros_like, self._total)
        if self._reduce == "mean":
            return _tree.map_(lambda leaf: leaf / self._count, self._total)
        return self._total


# The products of Jacobians of shape (c, a, numel), a for all numbers of the output.
_EQUATIONS = {"full": "iap,jbp->ijab", "diagonal": "iap,jap->ija", "trace": "iap,jap->ij"}


class _Matrix:
    """The job of `gram`: rows of the matrix, for one chunk after the other."""

    def __init__(
        self,
        over: PerSample,
        left: Batch,
        others: Batch | None,
        jacobian: Callable[..., Any],
        outputs: str,
    ) -> None:
        self._over, self._jacobian, self._outputs = over, jacobian, outputs
        self._mirror, right = others is None, left if others is None else others
        self._right = right if right.size else right.zeros()
        self._rows = Stack()
        self._shape = torch.Size()

    def _jacobians(self, batch: Batch) -> list[torch.Tensor]:
        """The Jacobians of a chunk by leaf."""
        found, output = mapped(self._jacobian, batch, self._over.randomness)
        self._shape = output.shape[1:]
        numbers = self._shape.numel()
        return [leaf.reshape(len(leaf), numbers, -1) for leaf in _tree.leaves(found)]

    def _block(self, own: list[torch.Tensor], other: list[torch.Tensor]) -> torch.Tensor:
        equation = _EQUATIONS[self._outputs]
        parts = (torch.einsum(equation, *pair) for pair in zip(own, other))
        return functools.reduce(torch.add, parts)

    def run(self, batch: Batch) -> None:
        own, first, size = self._jacobians(batch), 0, self._right.size
        blocks: list[torch.Tensor] = []
        # While memory is measured there are other rows.
        mirror = self._mirror and batch.whole == (0, size)
        if mirror and batch.start:
            first = batch.start
            above = self._rows.before(batch)[:, first : first + batch.size].transpose(0, 1)
            blocks.append(above.mT if self._outputs == "full" else above)
        for start in range(first, size, batch.size):
            # Where the product has been taken, nothing holds the other Jacobians.
            other = self._right.chunk(start, min(start + batch.size, size))
            same = mirror and start == batch.start
            blocks.append(self._block(own, own if same else self._jacobians(other)))
        self._rows.put(batch, torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0])

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> torch.Tensor:
        if not size:
            raise ValueError(f"{self._over.api}: no example to take products of")
        matrix: torch.Tensor = self._rows.close(kept, size, empty)
        matrix = matrix.reshape(*matrix.shape[:2], *self._shape * (matrix.dim() - 2))
        if not self._mirror or kept is None:
            return matrix
        whole = matrix.new_zeros(size, size, *matrix.shape[2:])
        return whole.index_copy(1, kept.to(matrix.device), matrix[:, : len(kept)])
