"""Products of matrices that are not computed until somebody needs more than their norm.

While the gradients of a chunk are pulled back, products over few terms (see `_factors`) are made
`Outer`: tensors without memory that know their factors. Which of them are gradients of parameters
need not be known beforehand: every operation but those that turn such a gradient into the shape of
its parameter, and sums of two, gets the product itself. So a gradient that arrives as `Outer` is
known to be that product and nothing else, whatever the code was.

The mode sits below autograd and ``vmap`` and sees what they run on the whole chunk: a product of
one example is a batch of products there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from functx import _torch
from functx._remat import on_replay
from functx.per_sample._factors import Dense, OneHot, Term, product, without, worth

aten = torch.ops.aten
_RESHAPES = {
    aten.view.default,
    _torch.unsafe_view,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PERMUTES = {aten.transpose.int, aten.permute.default, aten.t.default}


class WrittenTo(RuntimeError):
    """Code writes to what a product that was not computed has to be computed from."""


class _Value:
    """What several views share: the factors, or the product once it was needed."""

    __slots__ = ("dense", "terms")

    def __init__(self, terms: list[Term]) -> None:
        self.terms = terms
        self.dense: torch.Tensor | None = None

    def product(self) -> torch.Tensor:
        """The products, of shape ``(c, m, n)``."""
        if self.dense is None:
            self.dense = product(self.terms)
            self.terms = []
        return self.dense


class Outer(torch.Tensor):
    """``(product.mT if swapped else product).reshape(shape)``, not computed.

    Attributes:
        value: The product.
        swapped: Whether rows and columns have changed places.
    """

    value: _Value
    swapped: bool

    @staticmethod
    def __new__(cls: Any, value: _Value, swapped: bool, shape: Sequence[int], like: Any) -> Outer:
        self = _torch.make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self.value, self.swapped = value, swapped
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it by position
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def terms(self) -> list[Term] | None:
        """The factors, as rows and columns of what this is; ``None`` if there is a product."""
        if self.value.dense is not None:
            return None
        if not self.swapped:
            return self.value.terms
        return [(right, left) for left, right in self.value.terms]

    def dense(self) -> torch.Tensor:
        """The product itself, the same memory at each call."""
        found = self.value.product()
        found = (found.mT if self.swapped else found).reshape(self.shape)
        if found.untyped_storage() != self.value.product().untyped_storage():
            # A copy: from now on this is what views of it see, and writes go to.
            self.value, self.swapped = _Value([]), False
            self.value.dense = found
        return found

    def sizes(self) -> list[int]:
        """``[c, m, n]``, of the product as it lies under this shape."""
        left, right = self.value.terms[0]
        first = left.values if isinstance(left, Dense) else left.index
        both = (right.size, left.size) if self.swapped else (left.size, right.size)
        return [len(first), *both]


class Row(torch.Tensor):
    """A row of each example's product, which `Outer` stands for: what is padding is zeroed so.

    Attributes:
        whole: The product.
        at: The row.
    """

    whole: Outer
    at: int

    @staticmethod
    def __new__(cls: Any, whole: Outer, at: int) -> Row:
        shape = (whole.shape[0], whole.shape[2])
        self = _torch.make_wrapper_subclass(cls, shape, dtype=whole.dtype, device=whole.device)
        self.whole, self.at = whole, at
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it by position
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    @staticmethod
    def of(whole: Outer, dim: int, at: int) -> Row | None:
        """``whole.select(dim, at)``, where it is a row of a table that indices look up."""
        if dim % whole.dim() != 1 or whole.swapped or whole.sizes() != list(whole.shape):
            return None
        if not all(isinstance(left, OneHot) for left, _ in whole.value.terms):
            return None
        return Row(whole, at % whole.shape[1])

    def zero(self) -> bool:
        """Make it zero, in the factors; not if there is a product already."""
        if self.whole.value.dense is not None:
            return False
        self.whole.value.terms = [
            (left, without(left, right, self.at)) for left, right in self.whole.value.terms
        ]
        return True

    def dense(self) -> torch.Tensor:
        """The row itself, a view of the product."""
        return self.whole.dense().select(1, self.at)


class KeepFactors(_torch.TorchDispatchMode):
    """Inside, products of few terms are `Outer`.

    Args:
        size: How many examples the chunk has.
    """

    _should_skip_dynamo = _torch.never_skip_dynamo
    only_observes = True

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.paused = False
        self._replays = 0  # regions that run again: these compute activations, no gradients
        self.made = 0  # products not computed
        # The memory of their factors; as long as there is such a reference, no other has its key.
        self._factors: dict[int, Any] = {}
        self.taken = self.spared = 0  # numbers of gradients that arrived, and by their factors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._factors and _writes(func) and not self.paused:
            self._check(args)
        if Outer in types or Row in types:
            return _run(func, args, kwargs or {})
        if self.paused or self._replays:
            return func(*args, **(kwargs or {}))
        if func is aten.bmm.default:
            found = self._product(*args)
        elif func is aten.mm.default and self._size == 1 and _plain(*args):
            # (Views that are made here are followed by nobody.)
            found = self._product(*(one.unsqueeze(0) for one in args))
            if found is not None:
                found = Outer(found.value, False, found.shape[1:], found)
        elif func is aten.mul.Tensor:
            found = self._outer(*args)
        elif func is aten.embedding_dense_backward.default:
            found = self._rows(*args)
        else:
            return func(*args, **(kwargs or {}))
        if found is None:
            return func(*args, **(kwargs or {}))
        self.made += 1
        for factor in found.value.terms[0]:
            values = factor.values if isinstance(factor, Dense) else factor.index
            reference = _torch.StorageWeakRef(values.untyped_storage())
            self._factors[_torch.storage_address(values)] = reference
        return found

    @contextmanager
    def pulling_back(self) -> Iterator[None]:
        """The mode, around a backward pass."""
        with on_replay(self._replaying), self:
            yield

    @contextmanager
    def _replaying(self, name: str) -> Iterator[None]:
        self._replays += 1
        try:
            yield
        finally:
            self._replays -= 1

    def _check(self, args: tuple[Any, ...]) -> None:
        """Raises if an operation in place has a factor: the product should have been taken."""
        for arg in args:
            if type(arg) in (Outer, Row) or not isinstance(arg, torch.Tensor):
                continue
            if _torch.storage_address(arg) in self._factors:
                raise WrittenTo("a factor of a gradient is written to in place")

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> Outer | None:
        size, rows, inner = left.shape
        columns = right.shape[2]
        if size != self._size or not worth(inner, rows, columns) or not _plain(left, right):
            return None
        if left.dtype != right.dtype:
            return None
        return Outer(_Value([(Dense(left.mT), Dense(right))]), False, (size, rows, columns), left)

    def _outer(self, left: Any, right: Any) -> Outer | None:
        """A column times a row, which broadcast, as in the pullback of ``w @ x`` with a vector."""
        if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
            return None
        if left.dim() == 3 and left.shape[2] == 1 and right.dim() == 3 and right.shape[1] == 1:
            # A size that is 1 on one side only would be broadcast.
            return self._product(left, right) if len(left) == len(right) else None
        of_one = self._size == 1 and left.dim() == 2 and left.shape[1] == 1 and right.dim() == 1
        if of_one and _plain(left, right):
            found = self._product(left.unsqueeze(0), right.view(1, 1, -1))
            return None if found is None else Outer(found.value, False, found.shape[1:], found)
        return None

    def _rows(
        self, gradient: torch.Tensor, index: torch.Tensor, rows: int, padding: int, by_count: bool
    ) -> Outer | None:
        """Gradients of an embedding: the tables of all examples, one below the other."""
        size, table = self._size, rows // self._size
        if by_count or rows % size or index.numel() % size or not _plain(gradient):
            return None
        if padding >= 0 and size > 1:
            return None  # of one table; under vmap torch takes rows of padding out afterwards
        index, columns = index.reshape(size, -1), gradient.shape[-1]
        # A row is indices here: the table is all that the product has and the factors have not.
        if 4 * index.shape[1] >= table:
            return None
        index = index - torch.arange(size, device=index.device).unsqueeze(1) * table
        if not bool(((index >= 0) & (index < table)).all()):
            return None  # not one table for each example
        left, right = OneHot(index, table), Dense(gradient.reshape(size, -1, columns))
        terms: list[Term] = [(left, without(left, right, padding) if padding >= 0 else right)]
        return Outer(_Value(terms), False, (rows, columns), gradient)


@functools.cache
def _writes(func: Any) -> bool:
    return _torch.is_mutable(func)


def _plain(*tensors: torch.Tensor) -> bool:
    """Whether nothing else follows these tensors, and their numbers are real."""
    return all(type(t) in _PLAIN and t.is_floating_point() and not t.requires_grad for t in tensors)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation of which at least one argument is `Outer`, or a `Row` of it."""
    one = args[0] if args else None
    if isinstance(one, Row):
        zeroes = func is aten.zero_.default or (func is aten.fill_.Scalar and args[1] == 0)
        if zeroes and one.zero():
            return one
        if _torch.is_mutable(func):
            func(one.dense(), *_products(args[1:]), **_products(kwargs))
            return one
    if isinstance(one, Outer):
        if one.value.dense is None and not kwargs:
            found = _followed(func, one, args)
            if found is not None:
                return found
        if _torch.is_mutable(func):
            return _written(func, one, args, kwargs)
    return func(*_products(args), **_products(kwargs))


def _followed(func: Any, one: Outer, args: tuple[Any, ...]) -> Outer | Row | None:
    """What the factors can follow, else ``None``."""
    if func in (aten.detach.default, aten.alias.default):
        return Outer(one.value, one.swapped, one.shape, one)
    if func is aten.select.int:
        return Row.of(one, *args[1:])
    if func in _RESHAPES:
        return Outer(one.value, one.swapped, _reshaped(func, one.shape, args[1:]), one)
    if func in _PERMUTES:
        return _permuted(one, _permutation(func, one.dim(), args))
    if func is aten.add.Tensor and isinstance(args[1], Outer):
        return _added(one, args[1])
    return None


def _reshaped(func: Any, shape: torch.Size, args: tuple[Any, ...]) -> list[int]:
    """The shape that one of ``_RESHAPES`` gives."""
    sizes = list(shape)
    if func is aten.unsqueeze.default:
        at = args[0]
        sizes.insert(at if at >= 0 else at + len(sizes) + 1, 1)
    elif func is aten.squeeze.default:
        sizes = [size for size in sizes if size != 1]
    elif func in (aten.squeeze.dim, aten.squeeze.dims):
        dims = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        gone = {dim % len(sizes) for dim in dims}
        sizes = [size for dim, size in enumerate(sizes) if dim not in gone or size != 1]
    else:
        sizes = list(args[0])
        if -1 in sizes:
            known = math.prod(size for size in sizes if size != -1)
            sizes[sizes.index(-1)] = shape.numel() // known
    return sizes


def _permutation(func: Any, dims: int, args: tuple[Any, ...]) -> list[int]:
    order = list(range(dims))
    if func is aten.permute.default:
        return [dim % dims for dim in args[1]]
    first, second = (0, 1) if func is aten.t.default else args[1:3]
    if dims == 2 or func is not aten.t.default:
        order[first], order[second] = order[second], order[first]
    return order


def _permuted(one: Outer, order: list[int]) -> Outer | None:
    """A permutation that moves dimensions of size 1, or lets rows and columns change places."""
    shape = [one.shape[dim] for dim in order]
    moved = [dim for dim in order if one.shape[dim] != 1]
    if moved == sorted(moved):
        return Outer(one.value, one.swapped, shape, one)
    size, rows, columns = one.sizes()
    if rows == 1 or columns == 1:
        return None
    old = sorted(moved)
    head = 1 if size != 1 else 0
    for cut in range(head + 1, len(old)):
        if math.prod(one.shape[dim] for dim in old[head:cut]) != rows:
            continue
        if math.prod(one.shape[dim] for dim in old[:head]) != size:
            continue
        if moved == [*old[:head], *old[cut:], *old[head:cut]]:
            return Outer(one.value, not one.swapped, shape, one)
    return None


def _added(one: Outer, other: Outer) -> Outer | None:
    """The sum, where both are the same kind of product and the factors of both are still few."""
    terms, more = one.terms(), other.terms()
    if terms is None or more is None or one.shape != other.shape or one.sizes() != other.sizes():
        return None
    if one.dtype != other.dtype or len(terms) + len(more) > 4:
        return None
    return Outer(_Value([*terms, *more]), False, one.shape, one)


def _written(func: Any, one: Outer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation in place: on the product, which all views of it share."""
    dense = one.dense()
    result = func(dense, *_products(args[1:]), **_products(kwargs))
    return one if result is dense else result


def _products(value: Any) -> Any:
    """Arguments with products in the place of `Outer`."""
    if isinstance(value, (Outer, Row)):
        return value.dense()
    if isinstance(value, (list, tuple)):
        return type(value)([_products(x) for x in value])
    if isinstance(value, dict):
        return {key: _products(x) for key, x in value.items()}
    return value
