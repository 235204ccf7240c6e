"""Checks of arguments. Each error names the transform, the value that it got, and the remedy.

Types and words of errors follow :mod:`torch.func`, so code that catches torch's errors catches
these too. Errors that can be found when a transform is made are raised then, not at the first call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch

from functx._core import tree as _tree

T = TypeVar("T", bound=Callable[..., Any])
Argnums = int | tuple[int, ...]
Randomness = Literal["error", "different", "same"]
Static = tuple[tuple[int, ...], tuple[str, ...]]


# Options of JAX or torch, with what to use in functx instead.
_ELSEWHERE = {
    "in_axes": "functx calls it in_dims, as torch.func does",
    "out_axes": "functx calls it out_dims, as torch.func does",
    "axis_size": "functx takes the size from the mapped arguments; map over torch.arange(size) if "
    "the function takes none",
    "axis_name": "functx has no named axes; reduce over the dimension that vmap returns",
    "spmd_axis_name": "functx has no named axes; shard tensors with torch.distributed.tensor",
    "argnum": "functx calls it argnums",
    "holomorphic": "leave it out: a function of complex tensors with a real result needs no "
    "option; for a complex result call functx.vjp",
    "allow_int": "leave it out: tensors of integers have no derivative; name the other arguments "
    "in argnums",
    "reduce_axes": "functx has no named axes; leave it out",
    "static_argnums": "leave it out: arguments that are not tensors belong to a graph's signature",
    "static_argnames": "leave it out: arguments that are not tensors belong to a graph's signature",
    "donate_argnums": "functx does not reuse the memory of arguments; leave it out",
    "donate_argnames": "functx does not reuse the memory of arguments; leave it out",
    "inline": "leave it out: inside another functx.jit, a function is a part of that graph",
    "device": "leave it out: a graph runs where its arguments are",
    "fullgraph": "leave it out: functx.jit always makes one graph, or raises TracingError",
    "concrete": "leave it out: Python values are concrete in a region",
    "use_reentrant": "leave it out; functx.checkpoint accepts it",
    "context_fn": "functx.remat calls it policy, and functx.checkpoint accepts it",
}


def check_options(api: str, given: Iterable[str]) -> None:
    """Raises ``TypeError`` for an option of JAX or torch that functx does not have."""
    for option in given:
        if option in _ELSEWHERE:
            raise TypeError(
                f"{api}() got an unexpected keyword argument {option!r}: {_ELSEWHERE[option]}"
            )


def refuse_options(api: str, given: Iterable[str]) -> None:
    """Raises ``TypeError`` for options that a function does not have, if any."""
    check_options(api, given)
    for option in given:
        raise TypeError(f"{api}() got an unexpected keyword argument {option!r}")


def with_options(transform: T) -> T:
    """Decorate a transform so that an option of JAX or torch raises an error with the remedy."""
    api = transform.__name__

    @functools.wraps(transform)
    def checked(*args: Any, **options: Any) -> Any:
        check_options(api, options)
        return transform(*args, **options)

    return cast(T, checked)


def check_callable(func: Any, api: str) -> None:
    """Raises ``TypeError`` unless ``func`` can be called."""
    if not callable(func):
        hint = "; pass the function, not its result" if isinstance(func, torch.Tensor) else ""
        raise TypeError(
            f"{api}: expected a callable, got {describe(func)} of type {type(func).__name__}{hint}"
        )


def check_argnums(argnums: Any, api: str) -> None:
    """Raises ``RuntimeError`` unless ``argnums`` is an int or a tuple of different ints."""
    chosen = (argnums,) if isinstance(argnums, int) else argnums
    are_ints = isinstance(chosen, tuple) and all(isinstance(i, int) for i in chosen)
    if not are_ints or not chosen or len(set(chosen)) < len(chosen):
        raise RuntimeError(
            f"{api}: argnums must be int or Tuple[int, ...], which must be non-empty, and elements "
            f"must be unique, got: {argnums!r}"  # the words of torch.func
        )


def resolve_argnums(argnums: Argnums, num_args: int, api: str) -> tuple[int, ...]:
    """The positions ``argnums`` names among ``num_args`` arguments, none of them negative."""
    chosen = (argnums,) if isinstance(argnums, int) else argnums
    positions = tuple(n + num_args * (n < 0) for n in chosen)
    if not {*positions} <= {*range(num_args)} or len({*positions}) < len(positions):
        raise RuntimeError(
            f"{api}: Got argnums={argnums}, but only {num_args} positional inputs. Elements must "
            "be unique, and arguments passed by keyword can't be differentiated"
        )
    return positions


class NotDifferentiableError(ValueError, RuntimeError):
    """A leaf without derivatives.

    torch.func raises one of the two base classes, depending on the transform and on the leaf.
    """


_LEAVES_OF_JAX = (
    "it is a pytree of JAX that torch does not know: differentiate with respect to its leaves "
    "(leaves, tree = jax.tree.flatten(x)), and call jax.tree.unflatten(tree, leaves) in the JAX "
    "function; for an Equinox module, first separate its arrays by equinox.partition(x, "
    "equinox.is_array)"
)


def _is_container_of_jax(leaf: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and not jax.tree_util.all_leaves([leaf])


def check_inputs(args: Sequence[Any], positions: Sequence[int], api: str) -> None:
    """Raises unless every leaf of ``args`` at ``positions`` is a tensor with derivatives."""
    for position in positions:
        for leaf in _tree.leaves(args[position]):
            if has_derivatives(leaf):
                continue
            name, remedy = type(leaf).__name__, "convert it with torch.as_tensor and .float()"
            if _is_container_of_jax(leaf):
                remedy = _LEAVES_OF_JAX
            elif dataclasses.is_dataclass(leaf):
                remedy = f"make it a pytree, torch.utils._pytree.register_dataclass({name})"
            raise NotDifferentiableError(
                f"{api}: everything differentiated must be a Tensor of floating point or complex "
                f"dtype, got {describe(leaf)} of type {name} in argument {position}; {remedy}, or "
                "don't differentiate it"
            )
    # Before torch 2.13, derivatives in inference mode are zero, without an error.
    # (`torch.__version__` compares as a version, not as a string.)
    if torch.is_inference_mode_enabled() and torch.__version__ < "2.13":
        raise RuntimeError(
            f"{api}: torch {torch.__version__} has no derivatives in torch.inference_mode. Call "
            f"{api} outside of it, or use torch.no_grad() instead."
        )


def split_aux(result: Any, api: str) -> tuple[Any, Any]:
    """The output and the aux of a function's result, where ``has_aux=True``."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise RuntimeError(
            f"{api}: output of function f should be a tuple: (output, aux) if has_aux is True, "
            f"got {describe(result)}"
        )
    return result


def check_scalar(output: Any, api: str) -> None:
    """Raises ``RuntimeError`` unless ``output`` is a real tensor of no dimensions."""
    is_tensor = isinstance(output, torch.Tensor)
    if not is_tensor or output.dim() or (output.is_complex() and output.requires_grad):
        raise RuntimeError(
            f"{api}: Expected f(*args) to return a {'scalar ' if is_tensor else ''}Tensor, got "
            f"{describe(output)}. grad can be created only for real scalar outputs; return more as "
            "aux, with has_aux=True. Maybe you wanted to use the vjp or jacrev APIs instead?"
        )


def check_outputs(output: Any, api: str) -> None:
    """Raises ``RuntimeError`` unless ``output`` is a tree of tensors that can have derivatives."""
    outputs = _tree.leaves(output)
    if not outputs or outputs == [None]:
        raise RuntimeError(f"{api}: Expected f to be a function that has non-empty output")
    if wrong := [describe(out) for out in outputs if not has_derivatives(out)]:
        raise RuntimeError(
            f"{api}: expected f(*primals) to return only tensors of floating-point or complex "
            f"dtype, got {', '.join(wrong)}; return the others as aux, with has_aux=True"
        )


def has_derivatives(value: Any) -> bool:
    """Whether ``value`` is a floating point or complex tensor."""
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and (value.is_floating_point() or value.is_complex())


def check_real(tree: Any, api: str, what: str) -> None:
    """Raises ``RuntimeError`` if a leaf of ``tree`` is complex."""
    if any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in _tree.leaves(tree)):
        raise RuntimeError(f"{api}: Expected all {what} to be real; use torch.view_as_real")


_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def checked_budget(budget: Any, api: str) -> int | float:
    """A budget: bytes as an int (or as a string, ``"2GiB"``), or a share as a float up to 1.

    Raises a ``TypeError`` if it is neither a number nor a string, and a ``ValueError`` if the
    number is out of range or the string can't be read.
    """
    number = budget
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([A-Za-z]*)\s*", budget)
        unit = _UNITS.get(found[2].replace("k", "K"), 0) if found else 0
        number = int(float(found[1]) * unit) if found else 0
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not number > 0 or (isinstance(number, float) and number > 1):
        raise (ValueError if is_number else TypeError)(
            f"{api}: budget must be positive: bytes (an int, or a string such as '2GiB', in "
            f"{', '.join([*_UNITS][1:])}), or a share (a float up to 1); got {describe(budget)}"
        )
    return number


def integer(value: Any, message: str) -> int:
    """``value`` as an int; accepts numpy's integers and the like, but not booleans."""
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__"):
        raise TypeError(f"{message}, got {describe(value)}")
    return operator.index(value)


def checked_static(nums: int | Sequence[int], names: str | Sequence[str]) -> Static | None:
    """Positions and names of static arguments, or ``None`` if no argument is static."""
    nums = (nums,) if type(nums) is int else nums
    names = (names,) if isinstance(names, str) else names
    if not isinstance(nums, Sequence) or not all(type(n) is int for n in nums):
        raise TypeError(f"remat: static_argnums must be an int or several, got {nums!r}.")
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"remat: static_argnames must be a string or several, got {names!r}.")
    return (tuple(nums), tuple(names)) if nums or names else None


def check_static(static: Static, args: Any, kwargs: Any) -> None:
    """Refuse a call with a position out of range, or with a static argument that is a tensor."""
    nums, names = static
    for n in nums:
        if not -len(args) <= n < len(args):
            raise ValueError(
                f"remat: static_argnums has {n}, out of range for {len(args)} positional arguments."
            )
    given = [args[n] for n in nums] + [kwargs[n] for n in names if n in kwargs]
    if any(isinstance(a, torch.Tensor) for a in given):
        raise TypeError(
            "remat: a static argument is a tensor, which can't be static. Leave it out of "
            "static_argnums and static_argnames."
        )


def has_forward(module: torch.nn.Module) -> bool:
    """Whether a module can be called: a list of modules can't."""
    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)


_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def warn_if_later(f: Any) -> None:
    """Warn of a function whose body runs after the call (rule 7)."""
    if type(f) is types.FunctionType and not f.__code__.co_flags & _LATER:
        return  # a fast path: this runs for each closure that becomes a region
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    if any(is_of_kind(f) for is_of_kind in kinds):
        warnings.warn(
            f"remat: {name_of(f)} is a generator or coroutine function. Its body runs after the "
            "call returns, outside the region. Apply remat to the functions that it calls.",
            stacklevel=4,
        )


def describe(value: Any) -> str:
    """A short text for ``value``: dtype and shape of a tensor, else a ``repr`` cut to 60."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # __repr__ may raise any error
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def name_of(f: Any) -> str:
    """The name of ``f`` in messages."""
    if isinstance(f, torch.nn.Module):
        return type(f).__name__
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "__qualname__", None) or type(f).__qualname__
