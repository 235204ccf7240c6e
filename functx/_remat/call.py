"""One call: flatten its arguments, freeze its cells, run it as a region, build the result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from functx import _torch
from functx._core import backend_of, exporting, line_now, tell, tree, uncompiled
from functx._remat import arguments, cells, departures, forward, levels, sharding
from functx._remat.observers import observers
from functx._remat.region import Options
from functx._torch import compiler


def run(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """``f(*args, **kwargs)``, as a region where anything may be differentiated."""
    if torch.compiler.is_dynamo_compiling():
        plain, contexts = compiler.in_plain_graph(), options.contexts
        if plain and exporting():
            return f(*args, **kwargs)
        if plain and contexts is not None:  # the compiler recomputes; it knows no transforms
            return torch_checkpoint(f, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        tell("a region")
    return _run(f, args, kwargs, options)


@uncompiled
def _run(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    if (backend := backend_of("remat", args, kwargs)) is not None:
        if options.budget is not None:
            raise TypeError("remat: a budget is for torch tensors; JAX arrays can have a policy.")
        return backend.remat(f, options.policy)(*args, **kwargs)
    undifferentiated = not torch.is_grad_enabled() and not observers.tracers
    if undifferentiated or observers.without or exporting():
        return f(*args, **kwargs)
    if options.budget is not None:
        return _on_budget[0](f, args, kwargs, options)
    if _torch.dual_level() >= 0 and not levels.has_jvp() and _has_tangents(args, kwargs):
        warnings.warn(
            f"remat: {options.name} runs without recomputing: its inputs are duals of plain "
            "torch.autograd.forward_ad, which functx can't follow. Use functx.jvp.",
            stacklevel=3,
        )
        return f(*args, **kwargs)
    title = f"the region {options.name} ({line_now()})"
    result: list[Any] = []  # how the forward's result is put together
    frozen, identity, held = cells.frozen(f)
    guarded = sharding.guarded(frozen)
    tensors, call, call_again = _prepared(f, guarded, args, kwargs, options.name)

    def body(*ts: Tensor) -> list[Tensor]:
        out, how = tree.partition(call(*ts))
        result.append(how)
        return out

    def again(*ts: Tensor) -> list[Tensor]:
        held.put()
        return tree.partition(call_again(*ts))[0]

    try:
        return tree.combine(forward.run(body, again, tensors, options, title, identity), result[0])
    except RuntimeError as error:
        if _MARKED_DIRTY in str(error):
            raise departures.written(title, []) from error
        if "no compiled frames" not in str(error):  # torch's, of fullgraph=True
            raise
        raise departures.refused(
            f"{title} calls what is compiled with fullgraph=True (flex_attention, say), but in "
            "regions compiled functions run in eager. Compile around them, as torch.compile(model)."
        ) from error


# torch's error of a custom Function that has written to a stand-in, which is a leaf where what it
# is for may be none.
_MARKED_DIRTY = "a leaf Variable that requires grad has been used in an in-place operation"
_on_budget: list[Callable[..., Any]] = []


def on_budget(runner: Any) -> Any:
    """Register what runs functions that have a budget."""
    _on_budget.append(runner)
    return runner


def _has_tangents(args: Any, kwargs: Any) -> bool:
    tensors = [t for t in tree.leaves((args, kwargs)) if isinstance(t, Tensor)]
    return any(fwAD.unpack_dual(t).tangent is not None for t in tensors)


def _prepared(
    f: Any, frozen: Any, args: Any, kwargs: Any, name: str
) -> tuple[list[Tensor], Any, Any]:
    """The tensors in the arguments, and calls of the function with stand-ins."""
    if not kwargs and all(type(a) is Tensor for a in args):
        return [*args], f, frozen
    arguments.check(args, kwargs, name)
    tensors, how = tree.partition((args, kwargs))

    def call(*ts: Tensor) -> Any:
        args, kwargs = tree.combine(ts, how)
        return arguments.called(f, args, kwargs, f"remat: {name}")

    def call_again(*ts: Tensor) -> Any:
        args, kwargs = tree.combine(ts, how)
        return frozen(*args, **kwargs)

    return tensors, call, call_again
