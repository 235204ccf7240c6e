"""Modules and exported programs: their state as pytrees, their forward as a function of it."""

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
    """Parameters and buffers by name; of a tensor under several names only the first."""
    return (
        {n: array_from_torch(p, f"the parameter {n}") for n, p in module.named_parameters()},
        {n: array_from_torch(b, f"the buffer {n}") for n, b in module.named_buffers()},
    )


def as_module(f: Any) -> torch.nn.Module | None:
    """A module, or that of an exported program; None for anything else."""
    if isinstance(f, ExportedProgram):
        return f.module()
    return f if isinstance(f, torch.nn.Module) else None


def function_of(
    module: torch.nn.Module, layers: Sequence[torch.nn.Module] = ()
) -> Callable[..., Any]:
    """``fn(params, *args, **kwargs)``, with its ``layers`` as regions.

    Buffers that are not among ``params`` are the module's.
    """
    names = {*module.state_dict(keep_vars=True), *dict(module.named_buffers())}

    def call(params: Tensors, /, *args: Any, **kwargs: Any) -> Any:
        _check(module, params, names, "params")
        given = _places(module, params, type(module).__name__)
        state = {place: params[name] for place, name in given.items()}
        with _as_regions(module, layers):
            out = functx.functional_call(module, state, args, kwargs, tie_weights=False)
        params |= {name: state[place] for place, name in given.items()}  # buffers may be others
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
    """Refuse what is no state of a module: torch would use the module's own in its place."""
    name = type(module).__name__
    if not isinstance(state, dict):
        raise TypeError(
            f"to_jax({name}): the function is called as fn({first}, *args, **kwargs), with dicts "
            f"of arrays by name first; got {describe(state)}"
        )
    if unknown := sorted(state.keys() - names):
        said = f"{unknown[0]!r} is no name of a parameter or buffer; those are {sorted(names)}"
        raise ValueError(f"to_jax({name}): {said}")


def _places(module: torch.nn.Module, state: Tensors, name: str) -> dict[str, str]:
    """Where the tensors of ``state`` are in a module, each place once, and by what name given."""
    own: Tensors = dict(module.named_parameters(remove_duplicate=False))
    own |= dict(module.named_buffers(remove_duplicate=False))
    places: dict[int, dict[Any, str]] = {}
    for place, tensor in own.items():
        owner, _, attribute = place.rpartition(".")
        places.setdefault(id(tensor), {}).setdefault(
            (module.get_submodule(owner), attribute), place
        )
    given: dict[str, str] = {}
    for n in state:
        for place in places[id(own[n])].values() if n in own else [n]:
            if n != (first := given.setdefault(place, n)):
                raise ValueError(f"to_jax({name}): {first!r} and {n!r} are tied: give one of them")
    return given


@contextmanager
def _as_regions(module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    known = {module.get_submodule(name) for name in functx.remat_regions(module)}
    new = [layer for layer in layers if layer not in known]
    try:
        if new:
            functx.apply_remat(module, new, policy=everything_saveable)
        yield
    finally:
        if new:
            functx.remove_remat(module, new)
