"""One call: flatten its arguments, freeze its cells, run it as a region, build the result."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from functx import _torch
from functx._core import (
    backend_of,
    exporting,
    line_of,
    tell,
    tree,
    uncompiled,
    validate,
    where,
)
from functx._remat import arguments, cells, departures, forward, levels, sharding
from functx._remat.cells import Wrapper
from functx._remat.observers import observers
from functx._remat.region import Options
from functx._remat.script import OF_NO_REGION
from functx._torch import compiler


class Rematted(Wrapper):
    """A function that is a region at each call. It can be pickled if the function can."""

    def __init__(self, function: Any, options: Options) -> None:
        if type(function) is types.FunctionType:
            # As `functools.update_wrapper`, in less time: a closure may be wrapped at each call.
            names = self.__dict__
            for name in functools.WRAPPER_ASSIGNMENTS:
                names[name] = getattr(function, name)
            names.update(function.__dict__, __wrapped__=function)
        else:
            functools.update_wrapper(self, function)
        self.function, self.options = function, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.options.static is not None:
            validate.check_static(self.options.static, args, kwargs)
        return run(self.function, args, kwargs, self.options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        # A decorated function is found by its name.
        return name if found is self else (Rematted, (self.function, self.options))

    def __repr__(self) -> str:
        return f"functx.remat({self.function!r})"


def run(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """Call ``f(*args, **kwargs)``, as a region if anything may be differentiated."""
    if torch.compiler.is_dynamo_compiling():
        plain, contexts = compiler.in_plain_graph(), options.contexts
        if plain and exporting():
            return f(*args, **kwargs)
        # Without transforms the compiler can recompute by itself.
        if plain and contexts is not None:
            return torch_checkpoint(f, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        tell("a region")
    return _run(f, args, kwargs, options)


@uncompiled
def _run(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    # Most processes do not import JAX. So look for it first: `backend_of` takes longer.
    jax = sys.modules.get("jax")
    if jax is not None and (backend := backend_of("remat", args, kwargs)) is not None:
        if options.budget is not None:
            raise TypeError("remat: a budget is for torch tensors; use a policy for JAX arrays.")
        return backend.remat(f, options.policy)(*args, **kwargs)
    undifferentiated = not torch.is_grad_enabled() and not observers.tracers
    if undifferentiated or observers.without or exporting():
        return f(*args, **kwargs)
    if options.budget is not None:
        return _on_budget[0](f, args, kwargs, options)
    if _torch.dual_level() >= 0 and not levels.has_jvp() and _has_tangents(args, kwargs):
        warnings.warn(
            f"remat: {options.name} runs without recomputing, because its inputs are duals of "
            "plain torch.autograd.forward_ad, which functx can't follow. Use functx.jvp.",
            stacklevel=3,
        )
        return f(*args, **kwargs)
    title = Title((options.name, *where(inner=3)))  # skip `_run`, `run` and the caller of `run`
    frozen, held = f, None
    if type(f) is not types.FunctionType or f.__closure__ is not None:
        frozen, held = cells.frozen(f)
        frozen = sharding.guarded(frozen)
    if kwargs or not _ONLY_TENSORS.issuperset(map(type, args)):
        tensors, call, again = _prepared(f, frozen, args, kwargs, options.name)
    else:
        tensors, call, again = [*args], f, frozen
    try:
        scripts = options.scripts or OF_NO_REGION
        return forward.run(call, again, tensors, options, title, f, scripts, held)
    except RuntimeError as error:
        if _MARKED_DIRTY in str(error):
            raise departures.written(title, []) from error
        if "no compiled frames" not in str(error):  # torch's error for fullgraph=True
            raise
        raise departures.refused(
            f"{title} calls a function that is compiled with fullgraph=True (for example "
            "flex_attention), but compiled functions run in eager mode inside of regions. Compile "
            "around the regions, as with torch.compile(model)."
        ) from error


class Title(tuple[str, types.CodeType, int]):
    """The title of a region in messages. The line is looked up when the title is printed."""

    __slots__ = ()

    def __str__(self) -> str:
        name, code, instruction = self
        file, line, _ = line_of((code, instruction))
        return f"the region {name} ({file}:{line})"


_ONLY_TENSORS = frozenset([Tensor])
# torch's error for a custom Function that has written to a stand-in. A stand-in is a leaf, even if
# the tensor that it stands for is not.
_MARKED_DIRTY = "a leaf Variable that requires grad has been used in an in-place operation"
_on_budget: list[Callable[..., Any]] = []


def on_budget(runner: Any) -> Any:
    """Register the function that runs functions with a budget."""
    _on_budget.append(runner)
    return runner


def _has_tangents(args: Any, kwargs: Any) -> bool:
    tensors = [t for t in tree.leaves((args, kwargs)) if isinstance(t, Tensor)]
    return any(fwAD.unpack_dual(t).tangent is not None for t in tensors)


def _prepared(
    f: Any, frozen: Any, args: Any, kwargs: Any, name: str
) -> tuple[list[Tensor], Any, Any]:
    """The tensors in the arguments, and calls of the function with stand-ins."""
    arguments.check(args, kwargs, name)
    tensors, how = tree.partition((args, kwargs))

    def call(*ts: Tensor) -> Any:
        args, kwargs = tree.combine(ts, how)
        return arguments.called(f, args, kwargs, f"remat: {name}")

    @functools.wraps(frozen, assigned=(), updated=())
    def call_again(*ts: Tensor) -> Any:
        args, kwargs = tree.combine(ts, how)
        return frozen(*args, **kwargs)

    return tensors, call, call_again
