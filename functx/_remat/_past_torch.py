"""Memory that is not torch's own: of a NumPy array, a buffer, another library.

It has no version, and nothing that function modes are shown makes tensors of it: each run of a body
that calls ``torch.from_numpy`` has other ones, which only their contents tell from those of before.
What an operation reads is compared as a constant; `Held` is for what a hook closes over, and what a
custom Function keeps for its backward, which a replay's pullback reads as the replay has it.
"""

from __future__ import annotations

import ctypes
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from functx import _torch

LITTLE = 1 << 20
"""So many bytes are compared of what operations read."""

_MANY = 256
_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes})


def ways_of(array: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to read what is in a NumPy array, and to write it."""
    return array.copy, functools.partial(array.__setitem__, ...)


def is_foreign(t: Tensor) -> bool:
    """Whether memory is not torch's own."""
    if type(t) is not Tensor or t.grad_fn is not None:  # what was computed is torch's
        return False
    try:
        return not t.untyped_storage().resizable() and t.numel() > 0
    except (RuntimeError, NotImplementedError):  # no memory: sparse, fake, a wrapper
        return False


def may_be_unseen(t: Tensor) -> bool:
    """Whether a body may have made ``t`` by what modes are not shown: NumPy, or a parameter."""
    return isinstance(t, Parameter) or is_foreign(t)


def foreign_bits(t: Tensor, most: int | None = LITTLE) -> int | None:
    """A hash of memory that is not torch's own; ``None`` where it is, or there is too much."""
    if type(t) is not Tensor or t.grad_fn is not None:  # what was computed is torch's
        return None
    try:
        if t.untyped_storage().resizable() or not t.is_cpu or not t.numel():
            return None
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
        size = (last + 1) * t.element_size()
        if most is not None and size > most:
            return None
        return hash(ctypes.string_at(t.data_ptr(), size))
    except (RuntimeError, NotImplementedError):  # no memory: sparse, fake, a wrapper
        return None


class Held:
    """A tensor or array over such memory: equal to itself, and to what holds the same.

    What is there in both runs is the program's own, which may change it between them.
    """

    __slots__ = ("_bits", "_kind", "_of")

    def __init__(self, x: Any, kind: str, bits: int) -> None:
        self._of, self._kind, self._bits = weakref.ref(x), kind, bits

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held):
            return NotImplemented
        mine = self._of()
        if mine is not None and mine is other._of():
            return True
        return (self._kind, self._bits) == (other._kind, other._bits)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self._kind} of memory that is not torch's ({self._bits & 0xFFFFFFFF:08x})"


class AllHeld(tuple[Held, ...]):
    """Those that a function holds."""

    __slots__ = ()


def held(x: Any) -> Held | None:
    """Such a tensor or array; ``None`` for anything else."""
    if isinstance(x, Tensor):
        bits = foreign_bits(_inside(x), None)
        return None if bits is None else Held(x, f"a tensor {_kind_of(x)}", bits)
    if hasattr(type(x), "__array_interface__") and hasattr(x, "tobytes"):
        return Held(x, f"an array {_kind_of(x)}", hash(x.tobytes())) if _referable(x) else None
    return None


def _inside(t: Tensor) -> Tensor:
    while _torch.is_wrapped(t):
        t = _torch.get_unwrapped(t)
    return t


def _address(t: Tensor) -> int | None:
    t = _inside(t)
    return t.data_ptr() if is_foreign(t) else None


def _kind_of(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}"


def _referable(x: Any) -> bool:
    return bool(type(x).__weakrefoffset__)


def held_by(parts: Iterable[Any], given: Iterable[Tensor] = ()) -> AllHeld:
    """Those that functions and other objects lead to: by cells, defaults, and what they hold.

    Args:
        parts: where to begin.
        given: tensors that are compared as such, of whose memory none are told.
    """
    addresses = {*map(_address, given)} - {None}
    found: list[Held] = []
    stack, seen = [*parts], set[int]()
    while stack and len(seen) < _MANY:
        x = stack.pop()
        if type(x) in _LEAVES or id(x) in seen:
            continue
        seen.add(id(x))
        if addresses and isinstance(x, Tensor) and _address(x) in addresses:
            continue
        if (one := held(x)) is not None:
            found.append(one)
        elif isinstance(x, types.FunctionType):
            stack += x.__defaults__ or ()
            stack += (x.__kwdefaults__ or {}).values()
            for cell in x.__closure__ or ():
                try:
                    stack.append(cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
        elif isinstance(x, types.MethodType):
            stack += (x.__func__, x.__self__)
        elif isinstance(x, functools.partial):
            stack += (x.func, *x.args, *x.keywords.values())
        elif isinstance(x, (list, tuple)):
            stack += x
        elif isinstance(x, dict):
            stack += x.values()
        elif not isinstance(x, (Tensor, type, types.ModuleType, torch.nn.Module)):
            stack += (getattr(x, "__dict__", None) or {}).values()
    return AllHeld(found)
