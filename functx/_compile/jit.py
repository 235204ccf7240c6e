"""`jit`: what users call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from functx import _torch
from functx._compile.operation import Code, call
from functx._compile.state import Cache, State, leaving_nothing
from functx._core import (
    TracingError,
    attributes,
    contents,
    describe,
    is_of,
    name_of,
    refuse_options,
    tell,
    tree,
    uncompiled,
)
from functx._remat import called, settings_now, sharding
from functx._torch import graphs

_WAY_OUT = "Give a tensor in its place, or keep it (a counter, say) out of the function's reach"
P = ParamSpec("P")
R = TypeVar("R")


@overload
def jit(
    f: Callable[P, R], *, backend: Any = "inductor", dynamic: bool | None = None
) -> Callable[P, R]: ...


@overload
def jit(
    f: None = None, *, backend: Any = "inductor", dynamic: bool | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def jit(
    f: Any = None, *, backend: Any = "inductor", dynamic: bool | None = None, **_others: Any
) -> Any:
    """Compile ``f``, any stack of transforms and regions, as one graph.

    A call is traced once for each signature: the structure of the arguments, shapes, dtypes and
    devices of tensors, and the values of everything else. What ``f`` reads otherwise than through
    its arguments (closures, modules, globals) is read at each call. The graph recomputes what
    regions recompute, and where they do: its peak is that of eager. Random numbers advance torch's
    generators as in eager, and writes to buffers and arguments happen once a call. What ``f`` does
    to Python's objects happens once, in the trace, which has no values to leave there.

    Gradients flow through it (``.backward()``, `functx.grad`, any order), and are compiled in turn.
    Inside of vmap and jvp it runs in eager, and warns. The stack inside of ``jit`` is one graph, so
    put it around all.

    Args:
        f: a function or ``nn.Module`` of pytrees of tensors. ``None`` gives a decorator.
        backend: ``"inductor"``, the name of another one of ``torch.compile``, or a function that is
            given a graph and example inputs.
        dynamic: ``True``: sizes of arguments are symbols, and a graph serves all that it holds for;
            sizes of 0 and 1, and those that the function compares, have graphs of their own. What
            is read otherwise than by arguments keeps its shape. ``None`` or ``False``: each shape
            is a graph of its own.

    Returns:
        A function that does what ``f`` does; of a module it has the attributes, too.

    Raises:
        TypeError: ``f`` is not callable, or an argument that is no tensor can't be hashed.
        functx.TracingError: when called, where Python reads the value of a tensor, or keeps one
            that the function makes.

    Example:
        >>> import torch, functx
        >>> loss = functx.remat(lambda w, x: torch.sin(x @ w).sum())
        >>> step = functx.jit(functx.vmap(functx.grad(loss), (None, 0)), backend="aot_eager")
        >>> step(torch.zeros(2), torch.ones(3, 2))
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])
    """
    refuse_options("functx.jit", _others)
    if f is None:
        return functools.partial(jit, backend=backend, dynamic=dynamic)
    if not callable(f):
        raise TypeError(f"functx.jit: expected a callable, got {type(f).__name__}.")
    return Jitted(f, backend, bool(dynamic))


class Jitted:
    """A function that runs as graphs, one for each signature."""

    def __init__(self, function: Any, backend: Any, dynamic: bool) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.backend, self.dynamic = function, backend, dynamic
        self._codes = Cache()

    @uncompiled  # by torch.compile around it
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _torch.tracing():  # a part of that graph
            return self.function(*args, **kwargs)
        tensors, how = tree.partition((args, kwargs))
        spec, others = how
        statics = tuple(other[0] if other else None for other in others)
        state, settings = State((self.function, *statics)), settings_now()
        # The state has the items of containers, so their __hash__ and __eq__ are not called.
        hashed = (o if o is None or contents(o[0]) is None else () for o in others)
        key = (
            *(spec, tuple(hashed), tuple(map(type, statics)), tuple(state.key)),
            *(torch.is_grad_enabled(), torch.get_default_dtype(), settings.device),
            *(repr(settings.flags), repr(settings.casts)),
        )
        try:
            code = self._codes.get(key)
        except Exception as error:  # __hash__ and __eq__ may raise any error
            raise TypeError(
                f"functx.jit: an argument can't be hashed ({error}): give tensors, numbers, tuples"
            ) from error
        if code is None:

            def flat(tensors: Sequence[Tensor], _: Any) -> tuple[list[Tensor], Any]:
                args, kwargs = tree.combine(tensors, how)
                name = f"functx.jit: {name_of(self.function)}"
                # A run in eager (inside of vmap or jvp) can have sharded modules, a trace can't.
                forbids = TracingError if _torch.tracing() else None
                watch = sharding.watching(name, forbids)
                with watch, leaving_nothing((self.function, *statics), freeze=True):
                    out = called(self.function, args, kwargs, name, TracingError)
                results, rest = tree.partition(out)
                if rest is not None:  # (with sizes among it, which this graph is for then)
                    rest = rest[0], [o and (graphs.number(o[0]),) for o in rest[1]]
                return results, rest

            code = self._codes[key] = Code(flat, self.backend, self.dynamic, state.known)
            if len(self._codes) == 8:  # perhaps a mistake
                *_, one, other = ((*key[1], *key[3], *key) for key in self._codes)
                pairs = [(a, b) for a, b in zip(one, other) if not _is_same(a, b)]
                changed = [f"{describe(a)}, then {describe(b)}" for a, b in pairs]
                why = f"the eighth trace, as what is no tensor changes: {changed[0]}. {_WAY_OUT}"
                tell(f"functx.jit: {name_of(self.function)}", why)
        results = call(code, tensors, state.tensors)
        return tree.combine(results, code.last.rest)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Of a module its parameters, say."""
        if name.startswith("__") or not isinstance(self.__dict__.get("function"), torch.nn.Module):
            raise AttributeError(f"functx.jit: no attribute {name!r}")
        return getattr(self.function, name)

    def __reduce__(self) -> Any:
        return Jitted, (self.function, self.backend, self.dynamic)  # a copy has no graphs


def _is_same(one: Any, other: Any) -> bool:
    """Whether two parts of signatures are equal; they differ if ``__eq__`` raises."""
    try:
        return bool(one == other)
    except Exception:
        return False


def is_compiled(x: Any) -> bool:
    """Whether something is a jitted function, or one of ``torch.compile``."""
    names = "_torchdynamo_orig_callable", "_orig_mod"
    found = attributes(x) or {}
    return is_of(x, Jitted) or any(name in found for name in names)
