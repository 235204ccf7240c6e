"""Errors of the engine: what was called, the user's line, both sides, and the way out."""

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
    """What a message calls a function of torch's."""
    if isinstance(func, str):
        return func
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)
    owner: Any = getattr(func, "__self__", None)  # the getter of an attribute
    name = f"{owner.__name__}.{name}" if hasattr(owner, "__name__") else name
    return name.replace("_VariableFunctionsClass.", "torch.").replace("TensorBase.", "Tensor.")


def described(call: Call | None) -> str:
    """A call, for a message."""
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
    """What a replay's listener has heard is not what the forward called."""
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
        "What they depend on (globals, counters, files) must be the same: pass it as an argument. "
        "Random numbers: draw with torch, or give preserve_rng_state='all'."
    )
    return ReplayError(
        f"remat: at {at} the replay of {region.title} calls {what}. A replay must make the calls "
        f"of the forward (rule 3). {of_parametrizations()}{hint}{_logs(region, listener, call)}"
    )


def _logs(region: Any, listener: Any, call: Call) -> str:
    """With ``debug=True``, what the forward and the replay called, side by side."""
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
    """The hint where parametrized weights may come from the cache of ``parametrize.cached()``.

    Either that is active now, or the call at hand computes such a weight.
    """
    found = _torch.parametrizations_are_cached()
    frame = sys._getframe(1)
    while not found and frame.f_back is not None:
        found = frame.f_code.co_filename == parametrize.__file__
        frame = frame.f_back
    if not found:
        return ""
    return (
        "If torch.nn.utils.parametrize.cached() was entered around the region: its cache holds a "
        "weight for one of the forward and the replay, and not for the other. Enter cached() "
        "inside of the region, or do without it. "
    )


def _of_cache(region: Any) -> str:
    """The hint where the forward has left a tensor behind."""
    left = [reference() for reference in region.left_behind if reference is not None]
    shapes = [tuple(t.shape) for t in left if t is not None and not t.requires_grad]
    if not shapes:
        return ""
    return (
        f"A tensor of shape {shapes[0]} without gradient was made at the first call and kept (a "
        "lazy cache?): call the function once before, outside of regions, or build it in __init__."
    )


def code_of(f: Any) -> Any:
    """The code of a function; ``None`` if it is not Python."""
    f = inspect.unwrap(f)
    while type(f) in (MethodType, functools.partial):
        f = f.__func__ if type(f) is MethodType else f.func
    return getattr(f, "__code__", None)


def modified(region: Any, error: BaseException | None, shape: Any = None) -> ReplayError:
    """An input is not what it was."""
    of_shape = "" if shape is None else f" of shape {tuple(shape)}"
    return ReplayError(
        f"remat: a tensor{of_shape} that {region.title} reads has been modified by an in-place "
        "operation since the forward: a replay would compute something else. Write to a copy, or "
        f"after the backward.{f' ({error})' if error else ''}"
    )


def of_ended_level(title: Any) -> RematError:
    """A replay pulls back what was made outside, at a level that has ended by then."""
    return refused(
        f"{title} calls a pullback that was made outside of it, but inside of a transform. That "
        "has ended when the region is replayed. Make the pullback inside of the region, or outside "
        "of the transform."
    )


def refused(message: str) -> RematError:
    """Something that a region can't get right, with the line that runs now."""
    return RematError(f"remat: at {line_now()}: {message}")


def requires_grad_in_forward_mode(t: torch.Tensor) -> RematError:
    """An input is on a tape of reverse mode at a level of forward mode, where regions have none."""
    return refused(
        f"a region inside of jvp is given a tensor of shape {tuple(t.shape)} that requires grad at "
        "the level of jvp, and no gradient would flow through the region to it: requires_grad_() "
        "was called on it, or on what it was computed from. Differentiate by functx.grad inside of "
        "jvp. If it was the hook of Hugging Face's gradient_checkpointing_enable(), call "
        "model.disable_input_require_grads()."
    )


def written(title: Any, operands: Any) -> RematError:
    """An input with history is written in place."""
    shapes = [f" of shape {tuple(t.shape)}" for t in operands if isinstance(t, torch.Tensor)]
    return refused(
        f"{title} writes in place to an argument or captured tensor{''.join(shapes[:1])} that is "
        "differentiated. Work on a copy, x.clone(), and return it."
    )


def drawn_by_others(region: Any, generator: torch.Generator) -> ReplayError:
    """A generator was not left as in the forward."""
    return ReplayError(
        f"remat: the replay of {region.title} leaves the generator of {generator.device} otherwise "
        "than the forward did: another thread, say, drew from it in between. Give each thread a "
        "torch.Generator of its own."
    )


def not_left(region: Any) -> ReplayError:
    """What left the forward otherwise than by return is not there."""
    return ReplayError(
        f"remat: the replay of {region.title} does not make a tensor that left the forward "
        "otherwise than by return. Return it from the region."
    )


def other_leaves(region: Any, leaf: torch.Tensor | None) -> ReplayError:
    """Code that no mode sees has read another parameter than in the forward."""
    of_shape = "" if leaf is None else f" of shape {tuple(leaf.shape)}"
    return ReplayError(
        f"remat: code of C++ in {region.title}, which no mode sees, has read a tensor{of_shape} in "
        "the forward, and does not in the replay. (Parameters of functional_call are there as long "
        "as it runs.) Pass the tensor to the region as an argument."
    )


def other_wrapped(region: Any, t: torch.Tensor) -> ReplayError:
    """A transform of torch's is given another tensor than in the forward."""
    return ReplayError(
        f"remat: at {line_now()}: a transform of torch.func in {region.title} is given another "
        f"tensor of shape {tuple(t.shape)} than in the forward: the program has bound its name, or "
        "the attribute that holds it, to another one. Use functx's transform of the same name, or "
        "pass the tensor to the region as an argument."
    )
