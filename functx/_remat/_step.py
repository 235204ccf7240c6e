"""One ATen operation in the record of a region, and what is known of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch_operators

PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


_aten = torch.ops.aten
# Draws that take only a shape from what they are given; dropout multiplies by it, as it is.
DRAWS_BLINDLY = {
    *(_aten.rand_like, _aten.randn_like, _aten.randint_like, _aten.native_dropout),
    *(_aten.uniform_, _aten.normal_, _aten.random_, _aten.exponential_, _aten.cauchy_),
    *(_aten.log_normal_, _aten.geometric_),
}
# What writes running statistics, though its schema does not say so.
_WRITES_SILENTLY = {
    *(_aten.native_batch_norm, _aten.cudnn_batch_norm, _aten.miopen_batch_norm),
    *(_aten.batch_norm_update_stats),
}


# Memory nobody wrote to has no value to keep.
UNWRITTEN = {
    *(_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty),
    _aten.new_empty_strided,
}
# Namespaces whose operators say whether they draw.
KNOWN = frozenset({"aten", "prims"})


class Step:
    """One ATen operation.

    NOTE [what runs has its inputs]
    An operation that a replay can't do without (it draws, say) reads values too: on memory nobody
    wrote to, it may refuse its arguments or crash. So it is a root like any other. The exceptions
    look at no value: views, and draws that take only a shape from what they are given.

    Attributes:
        func: the overload.
        reads: the results of steps that it reads, by key.
        externals: storages it reads that the body did not make.
        layouts: of its results, if they could be handed out empty where it is dead.
        writes: whether it writes to its first argument and gives that; where it is dead, nothing
            has to be written.
        draws: whether it moves a generator on.
        rewritten: whether a later step writes to its results.
        part_of: what it is a part of: an operation of the body, a node of a tape.
    """

    __slots__ = (
        "draws",
        "externals",
        "func",
        "layouts",
        "part_of",
        "reads",
        "rewritten",
        "writes",
    )

    def __init__(self, func: Any, reads: set[int], externals: set[int], part_of: Any) -> None:
        self.func = func
        self.reads = reads
        self.externals = externals
        self.layouts: list[Layout | None] | None = None
        self.writes = False
        self.draws = False
        self.rewritten = False
        self.part_of = part_of


def writes(func: Any) -> bool:
    """Whether an operation writes to an argument, by its schema or, silently, without."""
    return _torch_operators.is_mutable(func) or func.overloadpacket in _WRITES_SILENTLY


def in_place(func: Any, args: Any, out: Any) -> bool:
    """Whether all that an operation does is to write to its first argument, shape as it was."""
    return func.overloadpacket.__name__.endswith("_") and bool(args) and out is args[0]


def skippable(func: Any, results: Sequence[Tensor], dense: bool) -> bool:
    """Whether memory can be handed out in place of the results, whatever values it would read."""
    if not results or not dense:
        return False  # Python looks at the result; or it is no tensor like others
    tags = func.tags
    return not (torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags)


def has_memory(t: Tensor) -> bool:
    """Whether ``t`` has memory that could be handed out empty: forward mode's zeros have none."""
    return t.layout is torch.strided and not _torch_operators.is_zero_tensor(t)


def layout_of(t: Tensor) -> Layout:
    """What it takes to make a tensor like ``t``."""
    return t.shape, t.stride(), t.dtype, t.device


def empty(layout: Layout) -> Tensor:
    """Memory nobody wrote to."""
    shape, stride, dtype, device = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
