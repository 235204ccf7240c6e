"""The effect of an ATen operator on memory: a view, new memory, a write, a draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functx import _torch

# Kinds of operators for the ledger. A replay may leave out NEW, and WRITE if the region made the
# memory. A VIEW makes no memory. The results of DRAWN, random numbers in a graph, are saved.
NEW, VIEW, WRITE, ALWAYS, SILENT, DRAWN = "new", "view", "write", "always", "silent", "drawn"


def _overloads(names: str) -> set[Any]:
    return {getattr(torch.ops.aten, name).default for name in names.split()}


# Operators of the engine. Their number may differ between a run and its replay.
_SILENT = _overloads("detach alias is_same_size _has_same_storage_numel") | _torch.LOOKS
# These read the layout of their argument, and not its values.
_SHAPE_ONLY = _overloads(
    "zeros_like ones_like empty_like full_like rand_like randn_like "
    "new_empty new_zeros new_ones new_full new_empty_strided _new_zeros_with_same_feature_meta"
)
# A replay never leaves these out. `empty_strided` may be a placeholder from an inner replay. The
# kinds of zeros decide which operations run next, by a property that a placeholder does not have:
# that they have no memory, or that their storage is as large as another one.
_ALWAYS = _overloads("empty_strided _efficientzerotensor _new_zeros_with_same_feature_meta")
# These allocate memory that other operations fill.
_BLANK = "aten.empty", "aten.zeros", "aten.new_empty", "aten.new_zeros"
_RUNNING, _TRAINING = (3, 4), 5  # positions of these arguments of batch norms


# Operators of other namespaces are extensions'.
_NAMESPACES_OF_TORCH = {
    *("aten", "prims", "prim", "profiler", "functx", "quantized", "mkldnn", "mkl", "onednn"),
    *("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem"),
    *("inductor", "inductor_prims", "rngprims", "higher_order"),
}


class Operator:
    """An overload, as the ledger sees it."""

    def __init__(self, overload: Any) -> None:
        self.overload = overload  # held, since operators are found by id
        self.kind = ALWAYS
        self.call = _torch.ANSWERS.get(overload) or getattr(overload, "_op", overload)  # in C
        self.draws = False  # random numbers
        self.is_foreign = False  # an extension's: it may draw without saying so
        self.dropout = -1  # where the argument is that says how much is dropped: 0 draws nothing
        self.reads = overload not in _SHAPE_ONLY
        self.writes: tuple[int, ...] = ()  # which arguments
        self.is_blank = str(overload).startswith(_BLANK)
        self.takes_number = False  # and a tensor, and makes new memory of them
        if (schema := getattr(overload, "_schema", None)) is None:  # a higher-order operator
            return
        self.draws = torch.Tag.nondeterministic_seeded in overload.tags
        self.is_foreign = overload.namespace not in _NAMESPACES_OF_TORCH
        names = [a.name for a in schema.arguments]
        self.dropout = names.index("dropout_p") if "dropout_p" in names else -1
        self.writes = tuple(i for i, a in enumerate(schema.arguments) if a.is_write)
        if overload in _torch.HIDDEN_WRITES:
            self.writes = _RUNNING
        self.kind = self._kind(overload, schema)
        if self.kind is VIEW:
            self.writes = ()
        self.takes_number = self.kind is NEW and "Scalar" in str(overload).rpartition(".")[2]

    def _kind(self, overload: Any, schema: Any) -> str:
        if overload in _SILENT:
            return SILENT
        if torch.Tag.inplace_view in overload.tags:
            return VIEW
        if self.writes:
            plain = self.writes == (0,) and len(schema.returns) == 1 and not self.draws
            return WRITE if plain and overload not in _torch.HIDDEN_WRITES else ALWAYS
        no_tensors = not any("Tensor" in str(r.type) for r in schema.returns)
        if no_tensors or self.draws or overload in _ALWAYS:
            return ALWAYS
        return VIEW if any(r.alias_info is not None for r in schema.returns) else NEW

    def draws_nothing(self, args: Any) -> bool:
        """Whether a call of attention is one without dropout."""
        return self.dropout >= 0 and (self.dropout >= len(args) or args[self.dropout] == 0)


_known: dict[int, Operator] = {}


def operator_of(overload: Any) -> Operator:
    """The operator of an overload, looked up by id: hashing an overload runs Python."""
    return _known.get(id(overload)) or _known.setdefault(id(overload), Operator(overload))


def real_zeros(args: Any) -> Any:
    """Materialize efficient zero tensors; passing them to these kernels crashes the process."""
    return tuple(
        torch.zeros(a.shape, dtype=a.dtype, device=a.device)
        if isinstance(a, Tensor) and _torch.is_zero_without_memory(a)
        else a
        for a in args
    )


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among an operation's arguments, also those in lists."""
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            found.append(a)
        elif type(a) in (list, tuple):
            found += [t for t in a if isinstance(t, Tensor)]
    return found


def written_by(operator: Operator, args: Any, kwargs: Any) -> list[int]:
    """The memory that an operation is about to write."""
    if operator.overload in _torch.HIDDEN_WRITES and not args[_TRAINING]:
        return []
    schema = operator.overload._schema.arguments
    written = [
        args[i] if i < len(args) else (kwargs or {}).get(schema[i].name) for i in operator.writes
    ]
    return [_torch.storage_of(t) for t in tensors_in(written, None)]
