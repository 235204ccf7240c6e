"""What an ATen operator does to memory: a view, new memory, a write, a draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functx import _torch

aten = torch.ops.aten
# What an operation is to the ledger. New memory can be left out, and a write to memory that the
# region made; views make nothing; the rest always runs.
NEW, VIEW, WRITE, ALWAYS, SILENT = "new", "view", "write", "always", "silent"
# The engine's own, which may differ in number between a run and its replay.
_SILENT = {
    aten.detach.default,
    aten.alias.default,
    aten.is_same_size.default,
    aten._has_same_storage_numel.default,
}
# Read the layout of their argument, not its numbers.
_SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
}
# A zero without memory is of a kind of its own, which decides what runs next.
_NO_MEMORY = {aten._efficientzerotensor.default}
# Schemas that do not say what they write.
_HIDDEN_WRITES = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}
_TRAINING = 5  # which of their arguments says whether they do


class Operator:
    """An overload, as the ledger sees it.

    Attributes:
        kind: one of the above.
        draws: whether it takes random numbers from a generator.
        writes: positions of the arguments that it writes.
        reads: whether it reads more than the layout of its arguments.
        call: its C function.
        takes_number: whether it makes new memory of a tensor and a number.
        dropout: the position of the argument that says how much is dropped: 0 draws nothing.
    """

    __slots__ = ("call", "draws", "dropout", "kind", "overload", "reads", "takes_number", "writes")

    def __init__(self, overload: Any) -> None:
        self.overload = overload  # held, since operators are found by id
        self.draws, self.reads, self.writes, self.dropout = False, True, (), -1
        self.takes_number = False
        schema = getattr(overload, "_schema", None)
        if schema is None:  # a higher-order operator
            self.kind, self.call = ALWAYS, overload
            return
        self.call = overload._op
        self.draws = torch.Tag.nondeterministic_seeded in overload.tags
        names = [a.name for a in schema.arguments]
        self.dropout = names.index("dropout_p") if "dropout_p" in names else -1
        self.reads = overload not in _SHAPE_ONLY
        self.writes = tuple(
            i
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ) + _HIDDEN_WRITES.get(overload, ())
        self.kind = self._kind(schema)
        if self.kind is VIEW:
            self.writes = ()
        self.takes_number = self.kind is NEW and "Scalar" in _torch.overload_name(overload)

    def _kind(self, schema: Any) -> str:
        overload = self.overload
        if overload in _SILENT:
            return SILENT
        if overload in _NO_MEMORY or torch.Tag.inplace_view in overload.tags:
            return VIEW
        if self.writes:
            plain = self.writes == (0,) and len(schema.returns) == 1 and not self.draws
            return WRITE if plain and overload not in _HIDDEN_WRITES else ALWAYS
        if self.draws or not any("Tensor" in str(r.type) for r in schema.returns):
            return ALWAYS
        return VIEW if any(r.alias_info is not None for r in schema.returns) else NEW

    def draws_nothing(self, args: Any) -> bool:
        """Whether a call of attention is one without dropout."""
        return self.dropout >= 0 and (self.dropout >= len(args) or args[self.dropout] == 0)


_known: dict[int, Operator] = {}


def operator_of(overload: Any) -> Operator:
    """The operator of an overload, looked up by id: hashing an overload runs Python."""
    found = _known.get(id(overload))
    if found is None:
        found = _known[id(overload)] = Operator(overload)
    return found


def real_zeros(args: Any) -> Any:
    """Arguments with memory where forward mode has zeros without any.

    An operator of such a zero and a number, called from a dispatch mode, ends the process.
    """
    if not any(isinstance(a, Tensor) and _torch.is_zero_without_memory(a) for a in args):
        return args
    return tuple(
        torch.zeros(a.shape, dtype=a.dtype, device=a.device)
        if isinstance(a, Tensor) and _torch.is_zero_without_memory(a)
        else a
        for a in args
    )


def storage_of(t: Tensor) -> int:
    """What a tensor's memory is known by while it lives; -1 for what has none, a sparse one say."""
    try:
        return _torch.storage_address(t)
    except (RuntimeError, NotImplementedError):
        return -1


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among an operation's arguments, also those in lists."""
    found = []
    for a in args:
        if isinstance(a, Tensor):
            found.append(a)
        elif type(a) in (list, tuple):
            found += [t for t in a if isinstance(t, Tensor)]
    if kwargs:
        for a in kwargs.values():
            if isinstance(a, Tensor):
                found.append(a)
            elif type(a) in (list, tuple):
                found += [t for t in a if isinstance(t, Tensor)]
    return found


def written_by(operator: Operator, args: Any, kwargs: Any) -> list[int]:
    """The memory that an operation is about to write."""
    if operator.overload in _HIDDEN_WRITES and not args[_TRAINING]:
        return []
    written: list[Tensor] = []
    arguments = operator.overload._schema.arguments
    for i in operator.writes:
        a = args[i] if i < len(args) else (kwargs or {}).get(arguments[i].name)
        written += tensors_in((a,), None)
    return [storage_of(t) for t in written]


def tracing() -> bool:
    """Whether operations are traced, or have no memory."""
    mode = _torch.infra_mode
    return mode(_torch.PROXY) is not None or mode(_torch.FAKE) is not None
