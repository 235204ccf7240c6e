"""Represent gradients that are products of two small factors by the factors.

The gradient of a weight is a product of two matrices for each example. If both are small, norms and
weighted sums can be computed from the factors (NOTE [factors] of `_sums`), and the product need not
exist. So, while the gradients of a chunk are pulled back, a dispatch mode replaces such products by
`OuterProduct`: a tensor without memory that holds the factors.

It does not matter which of these products are gradients of parameters. Views of an `OuterProduct`
and sums of two stay factored; every other operation gets the computed product. So if the gradient
of a parameter is an `OuterProduct`, it is exactly that product.

The mode runs below autograd and ``vmap``. There the products of all examples of a chunk are one
batched product. For a single example, it is one product of two matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from functx import _torch
from functx._core import tree as _tree
from functx._remat import on_replay
from functx.per_sample._sums import Factor, Factored, OneHot, Rows, Term, product, worth

aten = torch.ops.aten
_VIEWS = {
    *(aten.view.default, aten.alias.default, aten.detach.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.transpose.int, aten.permute.default, aten.t.default, aten.select.int),
    torch.ops.aten._unsafe_view.default,
}
_ZEROES = {aten.zero_.default, aten.fill_.Scalar}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MOST_TERMS = 4


class _Products:
    """Products of shape ``(c, m, n)``, one per example, which are computed when they are needed.

    Attributes:
        terms: The factors; empty once the products are computed.
        whole: A contiguous meta tensor of that shape.
    """

    def __init__(self, terms: list[Term]) -> None:
        left, right = terms[0]
        (size, _, rows), columns = left.shape, right.shape[2]
        nothing = torch.empty(0, dtype=torch.uint8, device="meta")
        self.terms = terms
        self.whole = nothing.as_strided((size, rows, columns), (rows * columns, columns, 1))
        self._dense: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        """The computed products. The first call computes them and drops the factors."""
        if self._dense is None:
            self._dense = product(self.terms).contiguous()
            self.terms = []
        return self._dense


class OuterProduct(torch.Tensor):
    """A view of products that are not computed yet.

    Attributes:
        products: The products.
        shadow: The same view of ``products.whole``; it records shape and strides.
    """

    products: _Products
    shadow: torch.Tensor

    @staticmethod
    def __new__(cls: Any, products: _Products, shadow: torch.Tensor, like: Any) -> OuterProduct:
        self = _torch.make_wrapper_subclass(
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=like.dtype,
            device=like.device,
        )
        self.products, self.shadow = products, shadow
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it by position
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def dense(self) -> torch.Tensor:
        """The computed product, in memory that all views share."""
        shadow, numbers = self.shadow, self.products.dense()
        return numbers.as_strided(shadow.shape, shadow.stride(), shadow.storage_offset())

    def terms(self) -> list[Term]:
        """The factors, if this is all of the products or their transpose; else an empty list."""
        whole = self.products.whole
        if _same_layout(self.shadow, whole):
            return [*self.products.terms]
        if _same_layout(self.shadow, whole.mT):
            return [(right, left) for left, right in self.products.terms]
        return []


def rows_of(gradient: torch.Tensor) -> Rows:
    """Gradients of a chunk, of shape ``(c, *shape)``, as `Factored` if possible."""
    if not isinstance(gradient, OuterProduct):
        return gradient
    terms = gradient.terms()
    if not terms or terms[0][0].shape[0] != len(gradient):
        return gradient.dense()
    return Factored(terms, gradient.shape)


def _same_layout(one: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a view has all elements of ``whole`` in the same order, in any shape."""
    if one.numel() != whole.numel() or one.storage_offset() != whole.storage_offset():
        return False
    try:
        other = whole.view(one.shape)
    except RuntimeError as error:
        if "view size" not in str(error):
            raise
        return False
    steps = zip(one.shape, one.stride(), other.stride())
    return all(size == 1 or a == b for size, a, b in steps)


class KeepFactors(_torch.TorchDispatchMode):
    """Replaces products of small factors by `OuterProduct`, for a chunk of ``size`` examples."""

    _should_skip_dynamo = _torch.never_skip_dynamo
    only_observes = True

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._pauses = 0  # more than 0 in replays of regions: they compute no gradients
        # Weak references to the storages of factors. They keep the addresses from being reused.
        self.factors: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.factors and func._schema.is_mutable:
            self._check((args, kwargs))
        if OuterProduct in types:
            return _run(func, args, kwargs)
        if self._pauses or kwargs or (term := self._term(func, args)) is None:
            return func(*args, **kwargs)
        for factor in term:
            values = factor.index if isinstance(factor, OneHot) else factor
            reference = _torch.StorageWeakRef(values.untyped_storage())
            self.factors[_torch.storage_address(values)] = reference
        products = _Products([term])
        whole = products.whole
        if args[0].dim() == 2 or func is aten.embedding_dense_backward.default:
            whole = whole.flatten(0, 1)  # the products of all examples, stacked along the rows
        return OuterProduct(products, whole, args[0])

    @contextmanager
    def pulling_back(self) -> Iterator[None]:
        """Enter this around a backward pass; the mode pauses in replays of regions."""
        with on_replay(lambda name: self.paused()), self:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compute products in this context. If the mode is the innermost, it is popped."""
        top = _torch.pop_dispatch_mode(None) if _torch.dispatch_depth() else None
        if top not in (None, self):
            _torch.push_dispatch_mode(top)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if top is self:
                _torch.push_dispatch_mode(self)

    def _check(self, args: Any) -> None:
        """Raises if an operation writes to a factor, after which the product would be wrong."""
        for arg in _tree.leaves(args):
            if type(arg) is OuterProduct or not isinstance(arg, torch.Tensor):
                continue
            if _torch.storage_address(arg) in self.factors:
                # `chunk_gradients` catches this error and runs the chunk again without factors.
                raise RuntimeError("a factor of a gradient is written to in place")

    def _term(self, func: Any, args: tuple[Any, ...]) -> Term | None:
        """The factors of an operation's result, if it is a product of small factors."""
        if func is aten.embedding_dense_backward.default:
            return self._rows_of_tables(*args)
        # The pullback of ``w @ x`` with a vector multiplies a column by a row, by broadcasting.
        if func not in (aten.bmm.default, aten.mm.default, aten.mul.Tensor) or not _plain(args):
            return None
        left, right = args
        if self._size == 1 and left.dim() == 2:
            right = right.unsqueeze(0) if func is aten.mul.Tensor and right.dim() == 1 else right
            left, right = left.unsqueeze(0), right.unsqueeze(0)
        if not left.dim() == right.dim() == 3:
            return None
        (size, rows, inner), (others, _, columns) = left.shape, right.shape
        if inner != right.shape[1] or (inner != 1 and func is aten.mul.Tensor):
            return None
        if not size == others == self._size or not worth(inner, rows, columns):
            return None
        return left.mT, right

    def _rows_of_tables(
        self, gradient: torch.Tensor, index: torch.Tensor, rows: int, padding: int, by_count: bool
    ) -> Term | None:
        """The factors of the gradients of an embedding, where each example has its own table."""
        size, table = self._size, rows // self._size
        regular = not (rows % size or index.numel() % size)
        if not regular or by_count or not _plain([gradient]) or (padding >= 0 and size > 1):
            return None
        index = index.reshape(size, -1)
        if 4 * index.shape[1] >= table:
            return None
        index = index - torch.arange(size, device=index.device).unsqueeze(1) * table
        if not bool(((index >= 0) & (index < table)).all()):
            return None  # the examples do not have separate tables
        right = gradient.reshape(size, -1, gradient.shape[-1])
        if padding >= 0:
            right = right.masked_fill((index == padding).unsqueeze(2), 0)
        return OneHot(index, table), right


def _plain(args: Any) -> bool:
    """Whether all are real floating point tensors of one dtype that autograd does not record."""
    recording = torch.is_grad_enabled()
    return all(
        type(t) in _PLAIN
        and t.is_floating_point()
        and not (t.requires_grad and recording)
        and t.dtype == args[0].dtype
        for t in args
    )


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with at least one `OuterProduct` among its arguments."""
    one = args[0] if args else None
    if isinstance(one, OuterProduct):
        if func in _VIEWS:
            return OuterProduct(one.products, func(one.shadow, *args[1:], **kwargs), one)
        if func is aten.add.Tensor and isinstance(args[1], OuterProduct) and not kwargs:
            terms = _added(one, args[1])
            if terms:
                products = _Products(terms)
                return OuterProduct(products, products.whole.view(one.shape), one)
        if func in _ZEROES and args[1:] in ((), (0,)) and _leaves_out_row(one):
            return one
        if torch.Tag.inplace_view in func.tags:
            # `chunk_gradients` catches this error and runs the chunk again without factors.
            raise RuntimeError("an in-place view of a gradient")
    dense = _dense(args)
    result = func(*dense, **_dense(kwargs))
    return one if isinstance(one, OuterProduct) and result is dense[0] else result


def _leaves_out_row(one: OuterProduct) -> bool:
    """If ``one`` is one row of the products, set that row to zero in the factors.

    Under ``vmap``, the gradient of an embedding zeroes the row of its padding index this way.
    """
    products, whole = one.products, one.products.whole
    row = one.shadow.storage_offset() // whole.stride(1)
    if not products.terms or row >= whole.shape[1] or not _same_layout(one.shadow, whole[:, row]):
        return False
    products.terms = [_without_row(left, right, row) for left, right in products.terms]
    return True


def _without_row(left: Factor, right: Factor, row: int) -> Term:
    if isinstance(left, OneHot):
        assert isinstance(right, torch.Tensor)
        return left, right.masked_fill((left.index == row).unsqueeze(2), 0)
    return left.index_fill(2, torch.tensor([row], device=left.device), 0), right


def _added(one: OuterProduct, other: OuterProduct) -> list[Term]:
    """The factors of a sum of two; empty if there are too many, or if one is not factored."""
    terms, more = one.terms(), other.terms()
    if not terms or not more or one.shape != other.shape or one.dtype != other.dtype:
        return []
    sizes, others = ([factor.shape[2] for factor in found[0]] for found in (terms, more))
    return [*terms, *more] if sizes == others and len(terms + more) <= _MOST_TERMS else []


def _dense(tree: Any) -> Any:
    """Arguments in which each `OuterProduct` is replaced by the computed product."""
    return _tree.map_(lambda leaf: leaf.dense() if isinstance(leaf, OuterProduct) else leaf, tree)
