"""Modules and exported programs: their state as a pytree, and their forward as a function of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import torch
from torch import Tensor
from torch.export import ExportedProgram

import functx
from functx._core import describe
from functx.checkpoint_policies import everything_saveable
from functx.compat._bridge.dlpack import array_from_torch

Tensors = dict[str, Tensor]


def state_of(module: torch.nn.Module) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Parameters and buffers by name. A tensor with several names appears under the first."""
    return (
        {n: array_from_torch(p, f"the parameter {n}") for n, p in module.named_parameters()},
        {n: array_from_torch(b, f"the buffer {n}") for n, b in module.named_buffers()},
    )


def as_module(f: Any) -> torch.nn.Module | None:
    """``f`` if it is a module, the module of an exported program, or ``None``."""
    if isinstance(f, ExportedProgram):
        return f.module()
    return f if isinstance(f, torch.nn.Module) else None


def function_of(
    module: torch.nn.Module, layers: Sequence[torch.nn.Module] = ()
) -> Callable[..., Any]:
    """``fn(params, *args, **kwargs)``, with ``layers`` as regions.

    Buffers that are not in ``params`` are read from the module.
    """
    names = {*module.state_dict(keep_vars=True), *dict(module.named_buffers())}

    def call(params: Tensors, /, *args: Any, **kwargs: Any) -> Any:
        _check(module, params, names, "params")
        places = _places(module, params, type(module).__name__)
        state = {place: params[name] for place, name in places.items()}
        with _as_regions(module, layers):
            out = functx.functional_call(module, state, args, kwargs, tie_weights=False)
        params |= {name: state[place] for place, name in places.items()}  # buffers may be new
        return out

    call.__name__ = call.__qualname__ = type(module).__name__
    return call


def function_with_buffers(
    module: torch.nn.Module, layers: Sequence[torch.nn.Module] = ()
) -> Callable[..., Any]:
    """``fn(params, buffers, *args, **kwargs)``, which returns the result and the new buffers."""
    stateless, names = function_of(module, layers), {n for n, _ in module.named_buffers()}

    def call(params: Tensors, buffers: Tensors, /, *args: Any, **kwargs: Any) -> Any:
        _check(module, buffers, names, "params, buffers")
        state = {**params, **{name: b.clone() for name, b in buffers.items()}}
        result = stateless(state, *args, **kwargs)
        return result, {name: state[name].detach() for name in buffers}

    call.__name__ = call.__qualname__ = type(module).__name__
    return call


def _check(module: torch.nn.Module, state: Any, names: set[str], first: str) -> None:
    """Raise an error if ``state`` is not a module's state; torch would use the module's own."""
    name = type(module).__name__
    if not isinstance(state, dict):
        raise TypeError(
            f"to_jax({name}): call the function as fn({first}, *args, **kwargs), where {first} are "
            f"dicts of arrays by name; got {describe(state)}"
        )
    if unknown := sorted(state.keys() - names):
        raise ValueError(
            f"to_jax({name}): {unknown[0]!r} is not the name of a parameter or buffer; the names "
            f"are {sorted(names)}"
        )


def _places(module: torch.nn.Module, state: Tensors, name: str) -> dict[str, str]:
    """For each place in a module that a tensor of ``state`` fills, its name in ``state``.

    A place that has two names in the module (by a shared submodule) appears once.
    """
    own: Tensors = dict(module.named_parameters(remove_duplicate=False))
    own |= dict(module.named_buffers(remove_duplicate=False))
    places: dict[int, dict[Any, str]] = {}
    for place, tensor in own.items():
        owner, _, attribute = place.rpartition(".")
        places.setdefault(id(tensor), {}).setdefault(
            (module.get_submodule(owner), attribute), place
        )
    names: dict[str, str] = {}
    for n in state:
        for place in places[id(own[n])].values() if n in own else [n]:
            if n != (first := names.setdefault(place, n)):
                raise ValueError(f"to_jax({name}): {first!r} and {n!r} are tied; pass only one")
    return names


@contextmanager
def _as_regions(module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    regions = {module.get_submodule(name) for name in functx.remat_regions(module)}
    new = [layer for layer in layers if layer not in regions]
    try:
        if new:
            functx.apply_remat(module, new, policy=everything_saveable)
        yield
    finally:
        if new:
            functx.remove_remat(module, new)
