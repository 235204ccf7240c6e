"""Checks of what a caller hands over: each names the transform, the value it got and the remedy.

Error types follow :mod:`torch.func`, so that code which catches torch's errors catches these too.
The one difference is *when*: what can be seen as the transform is made (a function that can't be
called, ``argnums`` of a wrong type) raises there, not at the first call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
import warnings
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch

from functx import _torch, _tree

Argnums = int | tuple[int, ...]
Static = tuple[tuple[int, ...], tuple[str, ...]]
_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class RematOptions(TypedDict, total=False):
    """The keyword arguments of `functx.remat`."""

    policy: Any
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    preserve_rng_state: bool | Literal["all"]
    determinism_check: Literal["default", "none"]
    debug: bool
    budget: Any
    prevent_cse: bool


def check_callable(func: Any, api: str) -> None:
    """Raises ``TypeError`` unless ``func`` can be called."""
    if not callable(func):
        hint = "; pass the function, not its result" if isinstance(func, torch.Tensor) else ""
        raise TypeError(
            f"{api}: expected a callable, got {describe(func)} of type {type(func).__name__}{hint}"
        )


def check_argnums(argnums: Any, api: str) -> None:
    """Raises ``RuntimeError`` unless ``argnums`` is an int or a tuple of different ints."""
    if isinstance(argnums, int):
        return
    if not isinstance(argnums, tuple) or not all(isinstance(i, int) for i in argnums):
        raise RuntimeError(f"{api}: argnums must be int or Tuple[int, ...], got {argnums!r}")
    if not argnums:
        raise RuntimeError(f"{api}: argnums must be non-empty, got ()")
    if len(set(argnums)) != len(argnums):
        raise RuntimeError(f"{api}: argnums elements must be unique, got {argnums}")


def resolve_argnums(argnums: Argnums, num_args: int, api: str) -> tuple[int, ...]:
    """The positions ``argnums`` names among ``num_args`` arguments, none of them negative."""
    positions = []
    for argnum in (argnums,) if isinstance(argnums, int) else argnums:
        if not -num_args <= argnum < num_args:
            raise RuntimeError(
                f"{api}: got argnum={argnum}, but only {num_args} positional inputs; "
                "arguments passed by keyword can't be differentiated"
            )
        positions.append(argnum % num_args)
    if len(set(positions)) != len(positions):
        raise RuntimeError(
            f"{api}: argnums elements must be unique, got {argnums}, which names one of "
            f"{num_args} positional inputs twice"
        )
    return tuple(positions)


def check_differentiable(leaf: Any, position: int, api: str) -> None:
    """Raises unless ``leaf``, found in argument ``position``, is a tensor with derivatives."""
    if not isinstance(leaf, torch.Tensor):
        raise ValueError(
            f"{api}: everything differentiated must be a Tensor, got {describe(leaf)} of type "
            f"{type(leaf).__name__} in argument {position}; {_make_it_a_tensor(leaf)}, or "
            "leave it out of argnums"
        )
    if not (leaf.is_floating_point() or leaf.is_complex()):
        raise RuntimeError(
            f"{api}: only Tensors of floating point and complex dtype can require gradients, got "
            f"dtype {leaf.dtype} in argument {position}; convert it with .float(), or leave it "
            "out of argnums"
        )


def _make_it_a_tensor(leaf: Any) -> str:
    if dataclasses.is_dataclass(leaf):
        cls = type(leaf).__name__
        return f"make its class a pytree, torch.utils._pytree.register_dataclass({cls})"
    return "convert it with torch.as_tensor"


def check_primals(primals: Any, api: str) -> None:
    """Raises ``RuntimeError`` if a leaf of ``primals``, as torch sees them, is no tensor."""
    for leaf in _tree.leaves_to_torch(primals):
        if not isinstance(leaf, torch.Tensor):
            raise RuntimeError(
                f"{api}: Expected primals to only contain Tensors, got {type(leaf)}; "
                f"{_make_it_a_tensor(leaf)}, or close over it"
            )


def split_aux(result: Any, api: str) -> tuple[Any, Any]:
    """The two parts of what a function called with ``has_aux=True`` returned."""
    if not (isinstance(result, tuple) and len(result) == 2):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else describe(result)
        raise RuntimeError(
            f"{api}: output of function f should be a tuple: (output, aux) if has_aux is True, "
            f"got {got}"
        )
    return result


def check_scalar(output: Any, api: str) -> None:
    """Raises ``RuntimeError`` unless ``output`` is a real tensor of no dimensions."""
    if not isinstance(output, torch.Tensor):
        hint = (
            "; to return more than the value, use has_aux=True" if isinstance(output, tuple) else ""
        )
        raise RuntimeError(f"{api}: Expected f(*args) to return a Tensor, got {type(output)}{hint}")
    if output.dim() != 0:
        raise RuntimeError(
            f"{api}: Expected f(*args) to return a scalar Tensor, got tensor with {output.dim()} "
            f"dims, shape {tuple(output.shape)}. Maybe you wanted to use the vjp or jacrev APIs "
            "instead?"
        )
    if output.is_complex() and output.requires_grad:
        raise RuntimeError(
            f"{api}: grad can be implicitly created only for real scalar outputs but got "
            f"{output.dtype}; return output.real or output.abs(), or use vjp"
        )


def check_outputs(outputs: Sequence[Any], api: str) -> None:
    """Raises ``RuntimeError`` unless ``outputs`` are tensors that can have derivatives."""
    if not outputs or [*outputs] == [None]:
        raise RuntimeError(
            f"{api}: Expected f to be a function that has non-empty output (got {[*outputs]})"
        )
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise RuntimeError(
                f"{api}: expected f(*primals) to return only tensors, got unsupported type "
                f"{type(output)}; return what isn't differentiated as aux, with has_aux=True"
            )
        if not (output.is_floating_point() or output.is_complex()):
            raise RuntimeError(
                f"{api}: All outputs of f must be floating-point or complex Tensors, got Tensor "
                f"with dtype {output.dtype}; return it as aux, with has_aux=True"
            )


def check_inputs(args: Sequence[Any], positions: Sequence[int], api: str) -> None:
    """Raises unless every leaf of ``args`` at ``positions`` is a tensor with derivatives."""
    for position in positions:
        for leaf in _tree.leaves(args[position]):
            check_differentiable(leaf, position, api)


def check_real(leaves: Sequence[Any], api: str, what: str) -> None:
    """Raises ``RuntimeError`` if one of ``leaves`` is complex."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_complex():
            raise RuntimeError(
                f"{api}: Expected all {what} to be real but received complex tensor at flattened "
                f"input idx: {index}"
            )


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", 1)
}


def checked_budget(budget: Any, api: str) -> int | float:
    """A budget: bytes as an int, or a share as a float up to 1.

    Args:
        budget: either; or a text, bytes with a unit (``"2GiB"``, ``"500 MB"``).
        api: what it was given to, for messages.

    Raises:
        TypeError: it is neither number nor text.
        ValueError: it is not positive, a share larger than 1, or no text of that form.
    """
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([A-Za-z]*)\s*", budget)
        if found is None or (unit := found[2].replace("k", "K")) not in _UNITS:
            raise ValueError(f"{api}: budget is {budget!r}; write bytes as '2GiB' or '500MB'")
        budget = int(float(found[1]) * _UNITS[unit])
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(
            f"{api}: budget must be bytes (an int, or a text such as '2GiB') or a float up to 1, "
            f"got {describe(budget)}"
        )
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(
            f"{api}: budget is {budget}; a float is a share between 0 and 1, bytes are an int"
        )
    if budget <= 0:
        raise ValueError(f"{api}: budget is {budget} bytes")
    return budget


def integer(value: Any, message: str) -> int:
    """``value`` as an int; numpy's integers and the like are welcome, booleans are not."""
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__"):
        raise TypeError(f"{message}, got {describe(value)}")
    return operator.index(value)


def describe(value: Any) -> str:
    """A short text for ``value``: tensors by dtype and shape, all else by a cut ``repr``."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_derivatives_exist(api: str) -> None:
    """Raises ``RuntimeError`` where torch would say without an error that a derivative is zero."""
    if torch.is_inference_mode_enabled() and _inference_hides_derivatives():
        raise RuntimeError(
            f"{api}: in torch.inference_mode, torch {torch.__version__} gives zeros for "
            "derivatives. Leave it, or use torch.no_grad()."
        )


@functools.cache
def _inference_hides_derivatives() -> bool:
    """Whether derivatives are zero in inference mode, as before torch 2.13."""
    with _torch.cleared_interpreter_stack(), _torch.without_modes(), torch.inference_mode():
        return not torch.func.grad(torch.sin)(torch.zeros(()))


def checked_static(nums: int | Sequence[int], names: str | Sequence[str]) -> Static | None:
    """Positions and names, or ``None`` if there are none."""
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
        raise TypeError("remat: a static argument is a tensor, which can't be static.")


def warn_if_later(f: Any) -> None:
    """Warn of a function whose body runs after the call (rule 7)."""
    function = getattr(f, "__func__", f)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & _RUNS_LATER:
        warnings.warn(
            f"remat: {name_of(f)} is a generator or coroutine function: its body runs after the "
            "call, where no region is. Make a region of what it does in between.",
            stacklevel=4,
        )


def name_of(f: Any) -> str:
    """What messages call ``f``."""
    if isinstance(f, torch.nn.Module):
        return type(f).__name__
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "__qualname__", None) or type(f).__qualname__
