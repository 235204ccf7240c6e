"""Errors of the engine. Each names the calls, the line of user code, both runs, and a remedy."""

from __future__ import annotations

import functools
import inspect
import sys
from itertools import zip_longest
from types import CodeType, MethodType
from typing import Any

import torch
from torch.nn.utils import parametrize

from functx import _torch
from functx._core import RematError, ReplayError, line_now
from functx._remat.calls import INSIDE, RETURN, Call, same_call


def name_of(func: Any) -> str:
    """The name of a torch function, for a message."""
    if isinstance(func, str):
        return func
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)
    owner: Any = getattr(func, "__self__", None)  # the getter of an attribute
    name = f"{owner.__name__}.{name}" if hasattr(owner, "__name__") else name
    return name.replace("_VariableFunctionsClass.", "torch.").replace("TensorBase.", "Tensor.")


def described(call: Call | None) -> str:
    """A call, as a message shows it."""
    if call is None:
        return "nothing more"
    mode = "" if call.grad else " under no_grad"
    return f"{name_of(call.func)}({', '.join(map(_argument, call.given))}){mode}"


def _argument(number: Any) -> str:
    if type(number) is tuple:
        if len(number) == 2 and isinstance(number[1], CodeType):  # a custom Function
            return str(number[0])
        is_value = len(number) == 2 and isinstance(
            number[0], type
        )  # of a derived class, or a range
        said = repr(number[-1] if len(number) == 1 or is_value else number)
        return said if len(said) < 80 else f"{said[:77]}..."
    if number < 0:
        return f"input {-1 - number}"
    return "a tensor made inside" if number == INSIDE else f"result {number}"


def differently(region: Any, listener: Any, call: Call, expected: Call | None) -> ReplayError:
    """The error for a call of a replay that differs from the forward's call in the same place."""
    called, due = described(call), described(expected)
    what = f"{called} where the forward called {due}"
    if called == due and expected is not None:
        what = f"{called} and gets {_shapes(call)} where the forward got {_shapes(expected)}"
    at = line_now()
    if call.func == RETURN:
        code = code_of(region.body)
        is_python = isinstance(code, CodeType)
        at = f"the end of {code.co_filename}:{code.co_firstlineno}" if is_python else "the end"
    by_numbers = expected is not None and same_call(call, expected, strict=False)
    hint = (not by_numbers and _of_cache(region)) or (
        "If the calls depend on a global, a counter or a file, pass that value to the region as an "
        "argument. If they depend on random numbers, draw them with torch, or give "
        "preserve_rng_state='all'."
    )
    return ReplayError(
        f"remat: at {at} the replay of {region.title} calls {what}. A replay must make the calls "
        f"of the forward (rule 3). {of_parametrizations()}{hint}{_logs(region, listener, call)}"
    )


def _logs(region: Any, listener: Any, call: Call) -> str:
    """With ``debug=True``, the calls of the forward and of the replay, side by side."""
    if not region.options.debug:
        return ""
    made = [c for c in listener.calls if c is not call] + [call]
    forward, replay = ([*map(described, calls)] for calls in (listener.expected, made))
    width = max(map(len, [*forward, "the forward"]))
    rows = zip_longest(["the forward", *forward], ["the replay", *replay], fillvalue="")
    return "\n" + "\n".join(f"  {one:{width}}  {other}".rstrip() for one, other in rows)


def _shapes(call: Call) -> str:
    return str([(shape, dtype) for _, shape, dtype in call.results]).replace("torch.Size", "")


def of_parametrizations() -> str:
    """The hint for parametrized weights that may come from the cache of ``parametrize.cached()``.

    It is given if that cache is active now, or if the current call computes such a weight.
    """
    found = _torch.parametrizations_are_cached()
    frame = sys._getframe(1)
    while not found and frame.f_back is not None:
        found = frame.f_code.co_filename == parametrize.__file__
        frame = frame.f_back
    if not found:
        return ""
    return (
        "If torch.nn.utils.parametrize.cached() was entered around the region, its cache held a "
        "weight in the forward and not in the replay, or in the replay and not in the forward. "
        "Enter cached() inside of the region, or do not use it. "
    )


def _of_cache(region: Any) -> str:
    """The hint if user code still holds a tensor that the forward has made."""
    left = [reference() for reference in region.left_behind if reference is not None]
    shapes = [tuple(t.shape) for t in left if t is not None and not t.requires_grad]
    if not shapes:
        return ""
    return (
        f"A tensor of shape {shapes[0]} that does not require grad was made at the first call and "
        "kept (a lazy cache?). Call the function once before, outside of regions, or build the "
        "tensor in __init__."
    )


def code_of(f: Any) -> Any:
    """The code of a function; ``None`` if it is not Python."""
    f = inspect.unwrap(f)
    while type(f) in (MethodType, functools.partial):
        f = f.__func__ if type(f) is MethodType else f.func
    return getattr(f, "__code__", None)


def modified(region: Any, error: BaseException | None, shape: Any = None) -> ReplayError:
    """The error for an input that was modified after the forward."""
    of_shape = "" if shape is None else f" of shape {tuple(shape)}"
    return ReplayError(
        f"remat: a tensor{of_shape} that {region.title} reads has been modified by an in-place "
        "operation since the forward, so a replay would compute other values. Write to a copy of "
        f"the tensor, or write after the backward.{f' ({error})' if error else ''}"
    )


def of_ended_level(title: Any) -> RematError:
    """The error for a replay that calls a pullback from outside whose level has ended."""
    return refused(
        f"{title} calls a pullback that was made outside of the region, but inside of a transform. "
        "The transform has ended before the region is replayed. Make the pullback inside of the "
        "region, or outside of the transform."
    )


def refused(message: str) -> RematError:
    """The error for code that a region can't support, with the line that is running."""
    return RematError(f"remat: at {line_now()}: {message}")


def requires_grad_in_forward_mode(t: torch.Tensor) -> RematError:
    """The error for an input that requires grad at a level of forward mode.

    A region has no node at such a level.
    """
    return refused(
        f"a region inside of jvp is given a tensor of shape {tuple(t.shape)} that requires grad at "
        "the level of jvp, and no gradient would flow through the region to it: requires_grad_() "
        "was called on it, or on a tensor that it was computed from. Differentiate with "
        "functx.grad inside of jvp. If the hook of Hugging Face's "
        "gradient_checkpointing_enable() called requires_grad_(), call "
        "model.disable_input_require_grads()."
    )


def written(title: Any, operands: Any) -> RematError:
    """The error for a write in place to an input that is differentiated."""
    shapes = [f" of shape {tuple(t.shape)}" for t in operands if isinstance(t, torch.Tensor)]
    return refused(
        f"{title} writes in place to an argument or captured tensor{''.join(shapes[:1])} that is "
        "differentiated. Write to a copy, x.clone(), and return the copy."
    )


def drawn_by_others(region: Any, generator: torch.Generator) -> ReplayError:
    """The error for a generator that the replay leaves in another state than the forward."""
    return ReplayError(
        f"remat: the replay of {region.title} leaves the generator of {generator.device} in "
        "another state than the forward did. Perhaps another thread has drawn from it in the "
        "meantime. Give each thread its own torch.Generator."
    )


def not_left(region: Any) -> ReplayError:
    """The error for a tensor that left the forward without being returned, and is now missing."""
    return ReplayError(
        f"remat: the replay of {region.title} does not make a tensor that left the forward "
        "without being returned. Return it from the region."
    )


def other_leaves(region: Any, leaf: torch.Tensor | None) -> ReplayError:
    """The error for code that no mode sees, if it reads another leaf than in the forward."""
    of_shape = "" if leaf is None else f" of shape {tuple(leaf.shape)}"
    return ReplayError(
        f"remat: C++ code in {region.title}, which no mode sees, has read a tensor{of_shape} in "
        "the forward, and does not read it in the replay. (The parameters that functional_call "
        "sets are gone when it returns.) Pass the tensor to the region as an argument."
    )


def other_wrapped(region: Any, t: torch.Tensor) -> ReplayError:
    """The error for a transform of torch.func that gets another tensor than in the forward."""
    return ReplayError(
        f"remat: at {line_now()}: a transform of torch.func in {region.title} is given another "
        f"tensor of shape {tuple(t.shape)} than in the forward. User code has assigned another "
        "tensor to the variable or the attribute that held it. Use functx's transform of the same "
        "name, or pass the tensor to the region as an argument."
    )
