"""OuterProduct products that are not computed until more than their norm is needed.

While the gradients of a chunk are pulled back, products over few terms (see `_sums`) are made
`OuterProduct`: tensors without memory that know their factors. Which of them are gradients of
parameters need not be known beforehand: every operation but views and sums of two gets the product
itself. So a gradient that arrives as `OuterProduct` is known to be that product and nothing else,
whatever the code was.

The mode sits below autograd and ``vmap`` and sees what they run on the whole chunk: a product of
one example is a batch of products there. Of one example alone it is a product of two matrices.
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
    """Products of shape ``(c, m, n)``: the factors, or the numbers once they were needed.

    Attributes:
        whole: A contiguous tensor of that shape that takes no memory.
    """

    def __init__(self, terms: list[Term]) -> None:
        (left, right), nothing = terms[0], torch.empty(0, dtype=torch.uint8, device="meta")
        (size, _, rows), columns = left.shape, right.shape[2]
        self.terms = terms
        self.whole = nothing.as_strided((size, rows, columns), (rows * columns, columns, 1))
        self._dense: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        """The numbers, the same memory at each call; after the first the factors are gone."""
        if self._dense is None:
            self._dense = product(self.terms).contiguous()
            self.terms = []
        return self._dense


class OuterProduct(torch.Tensor):
    """A view of products that are not computed.

    Attributes:
        products: What it is a view of.
        shadow: A view of their ``whole``, laid out as this one.
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
        """The numbers, in memory that all views share."""
        shadow, numbers = self.shadow, self.products.dense()
        return numbers.as_strided(shadow.shape, shadow.stride(), shadow.storage_offset())

    def terms(self) -> list[Term]:
        """The factors of what this is, as rows and columns; none if it is anything else."""
        whole = self.products.whole
        if _same_layout(self.shadow, whole):
            return [*self.products.terms]
        if _same_layout(self.shadow, whole.mT):
            return [(right, left) for left, right in self.products.terms]
        return []


def rows_of(gradient: torch.Tensor) -> Rows:
    """Gradients of a chunk, ``(c, *shape)``: by their factors, if these are known."""
    if not isinstance(gradient, OuterProduct):
        return gradient
    terms = gradient.terms()
    if not terms or terms[0][0].shape[0] != len(gradient):
        return gradient.dense()
    return Factored(terms, gradient.shape)


def _same_layout(one: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a view is all of another, in order, in any shape."""
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
    """Inside, products of few terms are `OuterProduct`, in a chunk of ``size`` examples."""

    _should_skip_dynamo = _torch.never_skip_dynamo
    only_observes = True

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._pauses = 0  # regions that run again, for one: these compute activations, no gradients
        # The memory of factors; as long as there is such a reference, no other has its key.
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
            whole = whole.flatten(0, 1)  # one below the other
        return OuterProduct(products, whole, args[0])

    @contextmanager
    def pulling_back(self) -> Iterator[None]:
        """The mode, around a backward pass."""
        with on_replay(lambda name: self.paused()), self:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No product is left out inside, nor is an operation looked at if the mode is on top."""
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
        """Raises if an operation in place has a factor: the product should have been taken."""
        for arg in _tree.leaves(args):
            if type(arg) is OuterProduct or not isinstance(arg, torch.Tensor):
                continue
            if _torch.storage_address(arg) in self.factors:
                raise RuntimeError("a factor of a gradient is written to in place")

    def _term(self, func: Any, args: tuple[Any, ...]) -> Term | None:
        """The factors of what an operation returns, if there are some."""
        if func is aten.embedding_dense_backward.default:
            return self._rows_of_tables(*args)
        # A column times a row, which broadcast, is in the pullback of ``w @ x`` with a vector.
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
        """The factors of an embedding's gradients: a table for each example, by its indices."""
        size, table = self._size, rows // self._size
        regular = not (rows % size or index.numel() % size)
        if not regular or by_count or not _plain([gradient]) or (padding >= 0 and size > 1):
            return None
        index = index.reshape(size, -1)
        if 4 * index.shape[1] >= table:
            return None
        index = index - torch.arange(size, device=index.device).unsqueeze(1) * table
        if not bool(((index >= 0) & (index < table)).all()):
            return None  # not one table for each example
        right = gradient.reshape(size, -1, gradient.shape[-1])
        if padding >= 0:
            right = right.masked_fill((index == padding).unsqueeze(2), 0)
        return OneHot(index, table), right


def _plain(args: Any) -> bool:
    """Whether all are tensors of real numbers of one dtype, which nothing else follows."""
    recording = torch.is_grad_enabled()
    return all(
        type(t) in _PLAIN
        and t.is_floating_point()
        and not (t.requires_grad and recording)
        and t.dtype == args[0].dtype
        for t in args
    )


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation of which at least one argument is `OuterProduct`."""
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
            raise RuntimeError("a gradient is laid out in another way, in place")
    dense = _dense(args)
    result = func(*dense, **_dense(kwargs))
    return one if isinstance(one, OuterProduct) and result is dense[0] else result


def _leaves_out_row(one: OuterProduct) -> bool:
    """Take a row out of the factors, where ``one`` is that row: vmap zeroes that of padding."""
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
    """The factors of a sum, where there are some, and few."""
    terms, more = one.terms(), other.terms()
    if not terms or not more or one.shape != other.shape or one.dtype != other.dtype:
        return []
    sizes, others = ([factor.shape[2] for factor in found[0]] for found in (terms, more))
    return [*terms, *more] if sizes == others and len(terms + more) <= _MOST_TERMS else []


def _dense(tree: Any) -> Any:
    """Arguments with products in the place of `OuterProduct`."""
    return _tree.map_(lambda leaf: leaf.dense() if isinstance(leaf, OuterProduct) else leaf, tree)
