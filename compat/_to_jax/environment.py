"""What a function's trace depends on besides its arguments: closures, modules, torch's settings.

Invariant: two calls with equal environments would trace to the same graph, as far as can be seen
from outside the function: its cells, defaults, bound object, partial arguments and the globals
that its code names; of modules the training flags and the identity of every parameter and buffer.
Values of tensors are not part of it: they are read again at every call.  State that hides deeper
(in an attribute of an arbitrary object) is compared by identity only.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from functx._errors import LoweringError
from functx.compat._torch import has_backward_hooks, own_tensors

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NAMED = (torch.Tensor, torch.nn.Module, types.FunctionType, *_PLAIN)
_DEPTH = 6


class _Same:
    """Hashes and compares by identity, and keeps the object alive so that its id stays its own."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing


def environment_of(f: Callable[..., Any]) -> tuple[Hashable, ...]:
    """A hashable summary of what a trace of ``f`` depends on besides its arguments."""
    settings = (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
    return settings, *_summary(f, set(), _DEPTH)


def device_of(environment: tuple[Hashable, ...]) -> str:
    """The device of what is closed over; inputs are traced as if they were there."""
    things = (found.thing for found in environment if isinstance(found, _Same))
    return next((str(x.device) for x in things if isinstance(x, torch.Tensor)), "cpu")


def _summary(thing: Any, seen: set[int], depth: int) -> Iterator[Hashable]:
    if isinstance(thing, _PLAIN):
        yield (type(thing), repr(thing)) if isinstance(thing, float) else (type(thing), thing)
        return
    if isinstance(thing, types.ModuleType | type) or id(thing) in seen:
        return
    seen.add(id(thing))
    yield _Same(thing)
    if depth == 0:
        return
    for part in _parts(thing):
        yield from _summary(part, seen, depth - 1)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, torch.nn.Module):
        for module in thing.modules():
            if has_backward_hooks(module):
                raise LoweringError(
                    f"{type(module).__name__} or a parameter of it has backward hooks, which JAX's"
                    " derivatives would leave out silently: remove them (handle.remove()), or put"
                    " what they do to gradients into an autograd.Function"
                )
            yield module.training
            yield from own_tensors(module)
    elif isinstance(thing, types.FunctionType):
        yield from _function_parts(thing)
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, list | tuple):
        yield from thing
    elif isinstance(thing, dict):
        yield from itertools.chain.from_iterable(thing.items())
    elif callable(thing) and hasattr(thing, "__dict__"):
        yield from vars(thing).values()


def _function_parts(f: types.FunctionType) -> Iterator[Any]:
    for cell in f.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is bound later
            yield None
    yield from f.__defaults__ or ()
    yield from (f.__kwdefaults__ or {}).values()
    yield getattr(f, "__wrapped__", None)
    named = (f.__globals__.get(name) for name in f.__code__.co_names)
    yield from (value for value in named if isinstance(value, _NAMED))
