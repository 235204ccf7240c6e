"""Finds what a function reads besides its arguments, for `to_jax`, plans and `functx.memory`.

`functx.jit` does not use this module: its own search (`search`) also leaves guards for later calls.

The walk follows cells of functions, globals that their code names, defaults, partials, methods,
modules, and containers and objects that hold such things. Tensors become inputs of the graph.
Plain values and small arrays are compared by value, other objects by identity. Anything that the
walk does not reach is a constant of the graph.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import Logger
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from functx import _torch
from functx._compile.intact import KeptByModules, in_words, is_traced, refused_changes
from functx._core import (
    PLAIN,
    TracingError,
    attributes,
    contents,
    is_internal,
    is_of,
    name_of,
    variables,
)

_SMALL = 4096  # bytes; larger arrays are compared by identity
_BUILT_IN = {list, tuple, dict, OrderedDict, set, frozenset}


class State:
    """The tensors that a function reads, each once, and the key of everything else it reads."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.key: list[Any] = []
        # Objects that the key has by id. They must stay alive: Python reuses ids of dead objects.
        self.known: list[Any] = []
        self.held: list[Any] = []  # all objects that the walk visited
        seen: dict[int, int] = {}
        todo = [*roots][::-1]
        while todo:
            x = todo.pop()
            kind = type(x)
            if type(kind) is type and kind in PLAIN:  # a metaclass may have no hash
                self.key += kind, repr(x) if kind in (float, complex) else x  # 0.0 == -0.0
                continue
            number = seen.setdefault(id(x), len(seen))
            if number < len(self.held):
                self.key.append(number)
                continue
            self.held.append(x)
            if issubclass(kind, Tensor):
                self.tensors.append(x)
            inside = _inside(x)
            if inside is None:
                self.known.append(x)
            self.key += kind, id(x) if inside is None else len(inside)
            todo += reversed(inside or ())

    def differs_from(self, other: State) -> bool:
        """Whether anything differs between two walks."""
        ids = [[id(t) for t in state.tensors] for state in (self, other)]
        return self.key != other.key or ids[0] != ids[1]


def refuse_second_trace(
    error: BaseException, name: str, why: str, kind: type[Exception] = TracingError
) -> None:
    """Raise if a failed trace left objects changed: a second trace would start from the changes."""
    if getattr(error, "functx_changed", False):
        raise kind(
            f"{name} is traced once more, because {why}, but the first run has changed something "
            "that it reads (a list, a counter, a flag). Keep that in local variables."
        ) from error


def _inside(x: Any) -> Sequence[Any] | None:
    """The parts of an object that the walk visits; ``None`` if identity stands for the object."""
    kind: Any = type(x)
    if issubclass(kind, Tensor):
        return ()
    if kind is types.FunctionType:
        if is_internal(x.__code__.co_filename) and not x.__closure__:
            return (x.__code__,)
        return x.__code__, *(value for _, value in variables(x))
    if kind is types.MethodType:
        return x.__func__, x.__self__
    if kind is functools.partial:
        return x.func, x.args, x.keywords
    if issubclass(kind, (list, tuple, set, frozenset)):
        return _contents(x)
    if kind.__name__ == "ndarray" and kind.__module__ == "numpy" and x.nbytes <= _SMALL:
        return id(x), x.tobytes(), x.shape, str(x.dtype)
    if issubclass(kind, dict):  # but not functx's own notes about a function, such as `Cache`
        return () if kind.__module__.startswith("functx.") else _contents(x)
    if issubclass(kind, (type, types.ModuleType, Logger)) or (found := attributes(x)) is None:
        return None
    # The hooks of a module lead to FSDP's state, and from there to the parameters of all other
    # modules. As inputs of the graph these would get their gradients after FSDP has reduced them.
    if kind.__module__.startswith("torch.distributed.") and not is_of(x, torch.nn.Module):
        return None
    # Skip empty dicts of hooks, and the list of parameters that a recurrent layer rebuilds at each
    # call: neither is state that the function depends on.
    try:
        names = " ".join(found)
    except TypeError:  # code can't read a key that is not a str as an attribute
        found = {n: v for n, v in found.items() if type(n) is str}
        names = " ".join(found)
    values: list[Any] = [names]
    for n, v in found.items():
        is_empty = (type(v) is dict or type(v) is OrderedDict) and not v
        if not is_empty and not n.startswith("_flat_weight"):
            values.append(v)
    return values


def _contents(x: Any) -> tuple[Any, ...]:
    """The items of a container, and for a derived class also its attributes."""
    inside = contents(x) or ()
    if type(x) in _BUILT_IN:
        return inside
    return *inside, len(inside), *(attributes(x) or {}).values()


@contextmanager
def leaving_nothing(roots: Iterable[Any]) -> Iterator[None]:
    """Around a traced function: raise if objects that it reads hold tensors of the trace later.

    Modules that it reads are restored.

    Raises:
        TracingError: an object holds a tensor of the trace, or the function has set ``.grad``,
            which is restored.
    """
    if not _torch.tracing():  # in eager
        yield
        return
    before = State(roots)
    with _leaving_nothing(roots, before), in_words(), refused_changes():
        yield


def kept_by(state: State) -> KeptByModules:
    """A note of the contents of all visited modules (see NOTE [intact])."""
    return KeptByModules(state.held, state.tensors, lambda objects: State(objects).tensors)


@contextmanager
def _leaving_nothing(roots: Iterable[Any], before: State) -> Iterator[None]:
    kept = kept_by(before)
    gradients = [(t, t.grad) for t in before.tensors if t.is_leaf]
    hook = register_optimizer_step_pre_hook(_refuse_step)
    try:
        yield
    except BaseException as error:  # a caller may trace again; see `refuse_second_trace`
        kept.put_back()
        error.functx_changed = State(roots).differs_from(before)  # type: ignore[attr-defined]
        raise
    finally:
        hook.remove()
        changed = [(t, gradient) for t, gradient in gradients if t.grad is not gradient]
        for t, gradient in changed:
            t.grad = gradient
    try:
        if changed:
            raise TracingError(
                "functx.jit: the function sets .grad of a tensor that it reads, for example by "
                ".backward() or zero_grad(). A graph can't do that. Take gradients by functx.grad "
                "or torch.autograd.grad, or call these methods outside."
            )
        after = State(roots)
        refuse_traced(after.tensors, after.held)
    finally:
        kept.put_back()


def _refuse_step(optimizer: Any, *_: Any) -> None:
    """Runs before each optimizer step of the process, in any thread."""
    if _torch.tracing():
        raise TracingError(
            f"functx.jit: the function calls {name_of(optimizer)}.step(), which reads .grad and "
            "keeps its state outside of the graph. Call step() outside, or compute the update in "
            "the function."
        )


def refuse_traced(tensors: Iterable[Tensor], held: Sequence[Any] = ()) -> None:
    """Raise if a tensor belongs to this or an earlier trace; the error names its holder."""
    for t in filter(is_traced, tensors):
        raise TracingError(
            f"functx.jit: a tensor that the function makes, {t.dtype} of shape {(*t.shape,)}, "
            f"is kept{_owner(t, held)}, but a tensor of a trace has no values. Return it; or, if "
            "it is in a table that a first call fills: clear that, and call the function once "
            "before, in eager. Use weight_norm and spectral_norm of "
            "torch.nn.utils.parametrizations in place of those of torch.nn.utils."
        )


def _owner(x: Any, held: Sequence[Any]) -> str:
    """Words for the object that holds ``x``, skipping containers."""
    for _ in range(9):  # a limit, since containers may hold each other in a cycle
        x = next((h for h in held if any(v is x for v in _inside(h) or ())), x)
        if not is_of(x, (Tensor, dict, list, tuple, set)):
            return f" by {name_of(x)}"
    return ""
