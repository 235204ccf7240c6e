"""Convert the function to cross-check to a flat function of two lists of tensors.

A `Case` hides pytrees, keyword arguments, modules, integer arguments and ``in_dims``. Its function
takes the tensors that are differentiated (`primals`) and all other tensors (`rest`), and returns
the tensors of the result as a list. So everything else compares lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functx._core import tree
from functx.compat._bridge import function_of

Dims = Any
Flat = Callable[[list[Any], list[Any]], list[Any]]


@dataclass(frozen=True)
class Case:
    """A flat function, and its arguments."""

    name: str
    function: Flat  # maps ``primals`` and ``rest`` to a list of tensors
    primals: list[Tensor]  # the tensors that are differentiated
    rest: list[Tensor]  # all other tensors among the arguments
    paths: list[str]  # the path of each of ``primals``, such as ``[0]['weight']``
    primal_dims: list[int | None]  # for each of ``primals``, the axis of the examples
    rest_dims: list[int | None]  # the same for ``rest``
    batched: bool  # whether ``function`` takes one example
    result_paths: list[str]  # the path of each tensor of the result, set when ``function`` runs


def case_of(
    f: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    in_dims: Dims,
    name: str | None,
) -> Case:
    """Flatten a call; arguments and errors are those of `crosscheck`.

    The parameters of a module become the first argument.
    """
    if isinstance(f, type) or not callable(f):
        what = f"the class {f.__name__}" if isinstance(f, type) else type(f).__name__
        raise TypeError(f"crosscheck takes a torch function or module, not {what}")
    if type(f).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise TypeError(
            "crosscheck takes a torch function, which it runs in JAX too, and not a JAX function;"
            " convert a JAX function by functx.compat.from_jax"
        )
    name = name or str(getattr(f, "__name__", type(f).__name__))
    args = tuple(args)
    batched = in_dims is not None
    if batched and not isinstance(in_dims, int) and len(in_dims) != len(args):
        raise ValueError(
            f"crosscheck {name}: in_dims={in_dims!r} has {len(in_dims)} entries for"
            f" {len(args)} arguments"
        )
    dims = [in_dims] * len(args) if not isinstance(in_dims, Sequence) else list(in_dims)
    if isinstance(f, torch.nn.Module):
        params = {key: value.detach() for key, value in f.named_parameters()}
        f = function_of(f)
        args, dims = (params, *args), [None, *dims]
    if not args:
        raise TypeError(
            f"crosscheck needs at least one positional argument for {name}, to differentiate with"
            " respect to it"
        )
    try:
        several = (argnums,) if isinstance(argnums, int) else argnums
        numbers = [range(len(args))[n] for n in several]
    except IndexError:
        raise ValueError(
            f"crosscheck {name}: argnums={argnums} is out of range for {len(args)} arguments"
        ) from None

    call = (args, dict(kwargs))
    leaves, spec = tree.flatten(call)
    paths = [path[3:] for path in tree.paths(call)]  # within args or kwargs
    try:
        leaf_dims = [d for arg, dim in zip(args, dims) for d in tree.broadcast_prefix(dim, arg)]
    except ValueError as error:
        raise ValueError(
            f"crosscheck {name}: in_dims={in_dims!r} has another structure than the arguments"
        ) from error
    leaf_dims += [None] * (len(leaves) - len(leaf_dims))
    for leaf, path in zip(leaves, paths):
        package = type(leaf).__module__.partition(".")[0]
        if package in ("jax", "jaxlib", "numpy") and hasattr(leaf, "dtype"):
            raise TypeError(
                f"crosscheck converts arguments itself: pass torch tensors to {name}, not"
                f" {package}'s {type(leaf).__name__} at {path}"
            )
    # The number of the argument of each leaf. Leaves of keyword arguments come after these.
    of_argument = [n for n, arg in enumerate(args) for _ in tree.leaves(arg)]
    chosen = [i for i, n in enumerate(of_argument) if n in numbers]
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    inexact = [i for i in tensors if leaves[i].is_floating_point() or leaves[i].is_complex()]
    primals = [i for i in inexact if i in chosen]
    rest = [i for i in tensors if i not in primals]
    result_paths: list[str] = []

    def flat(primal_values: list[Any], rest_values: list[Any]) -> list[Any]:
        values = dict(zip((*primals, *rest), (*primal_values, *rest_values)))
        full = [values.get(i, leaf) for i, leaf in enumerate(leaves)]
        positional, keywords = tree.unflatten(spec, full)
        return _tensors(f(*positional, **keywords), result_paths, name)

    flat.__name__ = name
    return Case(
        name=name,
        function=flat,
        primals=[leaves[i].detach() for i in primals],
        rest=[leaves[i].detach() for i in rest],
        paths=[paths[i] for i in primals],
        primal_dims=[leaf_dims[i] for i in primals],
        rest_dims=[leaf_dims[i] for i in rest],
        batched=batched,
        result_paths=result_paths,
    )


def _tensors(result: Any, paths: list[str], name: str) -> list[Tensor]:
    every = zip(tree.paths(result), tree.leaves(result))
    found = [(path, x) for path, x in every if isinstance(x, Tensor)]
    if not found:
        raise TypeError(
            f"crosscheck compares tensors, but {name} returned {type(result).__name__} without"
            " tensors"
        )
    paths[:] = [path or "result" for path, _ in found]
    return [x for _, x in found]
