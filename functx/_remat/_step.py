"""One ATen operation in the record of a region, and what is known of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_operators, _unwritten

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


_aten = torch.ops.aten
# Draws that take only a shape from what they are given; dropout multiplies by it, as it is.
_DRAWS_BLINDLY = {
    *(_aten.rand_like, _aten.randn_like, _aten.randint_like, _aten.native_dropout),
    *(_aten.uniform_, _aten.normal_, _aten.random_, _aten.exponential_, _aten.cauchy_),
    *(_aten.log_normal_, _aten.geometric_),
}
_RESHAPES = {
    *(_aten.squeeze_, _aten.unsqueeze_, _aten.t_, _aten.transpose_, _aten.swapaxes_),
    *(_aten.swapdims_, _aten.as_strided_, _aten.detach_),
}
# They compare how tensors lie in memory: forward mode asks before it gives one a tangent.
_LOOKS_AT_SHAPES = {_aten.is_same_size, _torch_operators.same_storage_numel}
# Memory nobody wrote to has no value to keep.
_UNWRITTEN = {
    *(_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty),
    _aten.new_empty_strided,
}


class Kind:
    """What is known of an operator.

    Attributes:
        view: whether all that it gives are views of its arguments, or it looks only at shapes.
        opaque: whether it runs functions (``scan``, ``while_loop``): what they do, nobody sees.
        writes: whether it writes to an argument, by its schema or silently.
        statistics: whether that are running statistics: what it gives may be there without them.
        in_place: whether all that it may do is to write to its first argument, shape as it was.
        draws: whether it moves a generator on. What operators of others do to them, nobody knows.
        draws_blindly: whether it then takes only a shape from what it is given.
        unwritten: whether what it gives is memory nobody wrote to.
        skippable: whether memory can be handed out in place of its results, whatever their values.
        changes_view: whether it makes another view of the tensor that it is given.
        scalar: whether it takes a number, with which forward mode's zeros crash the process.
        plain: whether it only makes tensors, for which memory can be handed out.
        run: what runs it.
    """

    __slots__ = (
        "changes_view",
        "draws",
        "draws_blindly",
        "func",
        "in_place",
        "opaque",
        "plain",
        "run",
        "scalar",
        "skippable",
        "statistics",
        "unwritten",
        "view",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        self.opaque = isinstance(func, _torch.HigherOrderOperator)
        if self.opaque:  # what counts of it is that it runs, always; no record has it
            self.run, self.view = func, True
            return
        packet, tags = func.overloadpacket, func.tags
        # What is written in place by some is shape and strides alone: they are views as well.
        self.view = _torch_operators.is_view(func) or packet in _RESHAPES
        # By its schema it makes a tensor of its own; it has the memory of what it is given.
        self.view = self.view or func is _torch_operators.unsafe_view
        self.view = self.view or packet in _LOOKS_AT_SHAPES
        self.statistics = _torch_operators.writes_statistics(func)
        self.writes = self.statistics or (_torch_operators.is_mutable(func) and not self.view)
        self.in_place = packet.__name__.endswith("_")
        self.draws = torch.Tag.nondeterministic_seeded in tags or _torch_operators.is_foreign(func)
        self.draws_blindly = packet in _DRAWS_BLINDLY
        self.unwritten = packet in _UNWRITTEN
        self.skippable = not (
            torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        )
        self.changes_view = torch.Tag.inplace_view in tags
        self.scalar = _torch_operators.takes_number(func)
        self.plain = self.skippable and not (self.writes or self.changes_view)
        self.run = _torch_operators.callable_of(func)


kinds: dict[int, Kind] = {}


def kind_of(func: Any) -> Kind:
    """What is known of an operator; found out once, as its tags and schema take microseconds."""
    kind = kinds.get(id(func))
    if kind is None:
        kind = kinds[id(func)] = Kind(func)  # which holds the operator, so that its id stays its
    return kind


class Step:
    """One ATen operation.

    NOTE [what runs has its inputs]
    An operation that a replay can't do without (it draws, say) reads values too: on memory nobody
    wrote to, it may refuse its arguments or crash. So it is a root like any other. The exceptions
    look at no value: views, and draws that take only a shape from what they are given.

    Attributes:
        kind: what is known of its operator.
        reads: the results of steps that it reads, by key.
        externals: storages it reads that the body did not make.
        layouts: of its results, if they could be handed out empty where it is dead.
        writes: whether it writes to its first argument and gives that; where it is dead, nothing
            has to be written.
        rewritten: whether a later step writes to its results.
        handed_out: whether a region inside gave what it had kept; then nobody reads its own result.
        part_of: what it is a part of: an operation of the body, a node of a tape.
    """

    writes = False
    rewritten = False
    handed_out = False

    def __init__(
        self,
        kind: Kind,
        reads: Sequence[int],
        externals: Sequence[int],
        part_of: Any,
        layouts: list[Layout | None] | None = None,
    ) -> None:
        self.kind = kind
        self.reads = reads
        self.externals = externals
        self.part_of = part_of
        self.layouts = layouts

    def agrees(self, other: Step) -> bool:
        """Whether another step is the same one of another run."""
        return (
            self.kind is other.kind
            and self.reads == other.reads
            and self.layouts == other.layouts
            and self.writes is other.writes
            and self.rewritten is other.rewritten
        )


def has_memory(t: Tensor) -> bool:
    """Whether ``t`` has memory that could be handed out empty: forward mode's zeros have none."""
    return t.layout is torch.strided and not _torch_operators.is_zero_tensor(t)


def layout_of(t: Tensor) -> Layout:
    """What it takes to make a tensor like ``t``."""
    return t.shape, t.stride(), t.dtype, t.device


def fills(t: Tensor, layout: Layout) -> bool:
    """Whether a tensor of this layout is all of the memory of ``t``, each byte once."""
    shape, stride, dtype, _ = layout
    count = 1
    for step, size in sorted((s, n) for n, s in zip(shape, stride) if n != 1):
        if step != count:
            return False
        count *= size
    return count * dtype.itemsize == t.untyped_storage().nbytes()


def laid_out(t: Tensor, layout: Layout) -> Tensor:
    """All of the memory of ``t`` as a tensor of another layout, which `fills` it; no bit moves."""
    shape, stride, dtype, _ = layout
    if t.is_conj():
        t = t.conj()
    if t.is_neg():
        t = _torch_operators.neg_view(t)
    if t.dtype != dtype:
        count = t.untyped_storage().nbytes() // t.element_size()
        t = t.as_strided((count,), (1,), 0).view(dtype)
    if (t.shape, t.stride()) != (shape, stride):
        t = t.as_strided(shape, stride, 0)
    return t.detach()  # a view would hold what it is a view of


def empty(layout: Layout, make: Any = None) -> Tensor:
    """Memory nobody wrote to, nor may: others may have it, too."""
    shape, stride, dtype, device = layout
    try:
        return (make or _unwritten.unwritten)(shape, stride, dtype=dtype, device=device)
    except RuntimeError:
        if dtype not in _QUANTIZED:
            raise
        return torch.quantize_per_tensor(torch.zeros(shape, device=device), 1.0, 0, dtype)


def to_write_to(layout: Layout) -> Tensor:
    """Memory of its own, which somebody is going to write to."""
    return empty(layout, torch.empty_strided)


_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32)
