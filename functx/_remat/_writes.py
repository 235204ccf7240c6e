"""What an operation writes to, of what it is given.

Needed beforehand: what a region is about to write to is copied first, for replays to start from.
What this misses is noticed by its version counter afterwards, and refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import Tensor

from functx import _torch_operators
from functx._remat._watch import watching

# Where kernels and their Python wrappers take running statistics.
_STATISTICS = {FunctionType: slice(1, 3), None: slice(3, 5)}


_BY_VALUE = frozenset({"batch_norm", "instance_norm", "embedding", "embedding_bag"})
"""What writes to some arguments or none, by the values of others."""

_TO_THE_FIRST = frozenset({"__setitem__", "__set__", "__idiv__"}).union(
    name for name in dir(operator) if name.startswith("__i") and hasattr(operator, f"__{name[3:]}")
)
"""Those without a name that ends in ``_``: ``t += 1``, not ``~t``, ``int(t)`` or ``iter(t)``."""

ASKS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""What makes a tensor require grad; transforms call it, and it writes nothing."""


def to_the_first(name: str) -> bool:
    """Whether what is called so writes in place, to its first argument."""
    if name.endswith("_") and not name.startswith("_"):
        return name != "requires_grad_"
    return name in _TO_THE_FIRST


def _to_lists(name: str) -> bool:
    """Whether what is called so writes in place, to tensors in lists: ``torch._foreach_add_``."""
    return name.startswith(("_foreach", "_fused")) and name.endswith("_")


def only_reads(func: Any, name: str) -> bool:
    """Whether what is written in C and called so writes to no argument given by position."""
    if name in _BY_VALUE or _to_lists(name) or to_the_first(name):
        return False
    packet = _torch_operators.packet_of(func)
    return packet is None or not any(_torch_operators.packet_writes(packet))


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments (tensors, and containers of them) that an operation may write to."""
    name = getattr(func, "__name__", "")
    if func in ASKS:
        return []
    if to_the_first(name):
        return [*args[:1]] or [*kwargs.values()]  # by name, as torch.nn.init calls itself
    if name in ("batch_norm", "instance_norm"):
        training = (
            args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
        )
        if training is False:
            return []
        where = _STATISTICS[FunctionType if isinstance(func, FunctionType) else None]
        return [*args[where], kwargs.get("running_mean"), kwargs.get("running_var")]
    if name in ("embedding", "embedding_bag"):
        return [*args, *kwargs.values()] if _renormalizes(func, args, kwargs) else []
    if kwargs.get("out") is not None:
        return [kwargs["out"]]
    if kwargs.get("inplace") is True:
        return [*args, *kwargs.values()]
    if isinstance(func, FunctionType) and any(a is True for a in args):
        return [args[0]]  # `inplace`, perhaps, of a function in torch.nn.functional
    if _torch_operators.is_mutable(func) or _to_lists(name):
        return [*args, *kwargs.values()]
    if isinstance(func, FunctionType) or (packet := _torch_operators.packet_of(func)) is None:
        return []
    places, names = _torch_operators.packet_writes(packet)
    written = [a for i, a in enumerate(args) if i in places]
    return written + [a for key, a in kwargs.items() if key in names]


def _renormalizes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an embedding scales rows of its weight down to ``max_norm``."""
    if not isinstance(func, FunctionType):
        return False  # the wrapper has done it before the kernel runs
    given = args[3] if len(args) > 3 else kwargs.get("max_norm")
    return given is not None


def to_be_written(t: Tensor) -> Tensor:
    """A copy with the same history, made by every level: each lets it be written to."""
    with watching(True):
        return t.clone()
