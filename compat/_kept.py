"""Bytes kept at region boundaries, measured in each framework by its own means.

Both sides answer one question: of the arrays that entered an outermost ``remat`` region, which does
the pullback keep alive, and how many bytes are they?  In torch, a storage that is still alive after
the arguments and all results were dropped is kept.  In JAX, an array that is a leaf of the function
that ``jax.vjp`` returns is kept.  Neither is derived from the other, from shapes or from the graph.

A view in torch shares its storage, where JAX makes a new array: an array that holds exactly the
bytes of an argument (reshaped) counts as that argument on both sides.

Arrays that several regions take count once.  Arguments (parameters and data) and activations are
counted apart; tensors that the function closes over are alive anyway and count as neither.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import functx
from functx._remat import on_region
from functx.compat._jax import buffer_pointer, concrete
from functx.compat._torch import base_of, storage_key

if TYPE_CHECKING:
    from functx.compat._to_jax import Lowered


@dataclass(frozen=True)
class Kept:
    """What a pullback keeps of the arrays that entered its regions.

    Attributes:
        activations: bytes computed by the function.
        arguments: bytes of the function's arguments.
        regions: how many outermost regions ran.
    """

    activations: int
    arguments: int
    regions: int


def kept_by_torch(
    f: Callable[..., Any], args: Sequence[Any], closed_over: Sequence[torch.Tensor] = ()
) -> Kept:
    """Bytes that ``functx.vjp`` keeps, from storages that are still alive.

    Args:
        f: a function to a scalar; differentiated in its first argument.
        args: pytrees of tensors, which are cloned.
        closed_over: tensors of the surroundings, which are not counted.

    Returns:
        The bytes kept.
    """
    entered: dict[int, tuple[StorageWeakRef, int]] = {}
    regions = 0

    def record(inputs: list[torch.Tensor], name: str) -> None:
        nonlocal regions
        regions += 1
        for x in inputs:
            x = base_of(x)
            storage = x.untyped_storage()
            entered[storage_key(x)] = (StorageWeakRef(storage), storage.nbytes())

    clones = jax.tree_util.tree_map(
        lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, list(args)
    )
    ours = {storage_key(x) for x in _tensors(clones)}
    outside = {storage_key(x) for x in closed_over}
    first, *rest = clones
    with on_region(record):
        value, pullback = functx.vjp(lambda p: f(p, *rest), first)
    rest.clear()
    del clones, first, value
    gc.collect()
    live = {k: size for k, (ref, size) in entered.items() if not ref.expired()}
    del pullback
    arguments = sum(size for k, size in live.items() if k in ours)
    activations = sum(size for k, size in live.items() if k not in ours and k not in outside)
    return Kept(activations, arguments, regions)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in jax.tree_util.tree_leaves(tree) if isinstance(x, torch.Tensor)]


class _Recorder:
    """Collects the concrete arrays that pass a point of an eagerly differentiated function."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.regions = 0

    def __call__(self, operands: Sequence[Any], name: str) -> list[Any]:
        self.regions += 1
        return [self._pass(x) for x in operands]

    def _pass(self, x: Any) -> Any:
        x_now = concrete(x)
        if not isinstance(x_now, jax.core.Tracer):  # no derivative is taken of it
            self.arrays.append(x_now)
            return x

        @jax.custom_jvp
        def passing(x: Any) -> Any:
            return x

        @passing.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            # Public API hands over the primal here; with an eager vjp it is the array itself.
            self.arrays.append(concrete(primals[0]))
            return primals[0], tangents[0]

        return passing(x)


def kept_by_jax(
    lowered: Lowered,
    args: Sequence[Any],
    batched: Callable[[Callable[..., Any]], Callable[..., Any]],
    closed_over: Sequence[Any] = (),
) -> Kept:
    """Bytes that ``jax.vjp`` keeps, from the leaves of the function that it returns.

    Args:
        lowered: the lowered torch function.
        args: pytrees of JAX arrays.
        batched: turns the function of one example into that of the batch (or is the identity).
        closed_over: arrays of the surroundings, which are not counted.

    Returns:
        The bytes kept.
    """
    recorder = _Recorder()
    f = batched(lambda *xs: lowered.observed(recorder, *xs))
    _, pullback = jax.vjp(lambda p: f(p, *args[1:]), args[0])
    leaves = [x for x in jax.tree_util.tree_leaves(pullback) if isinstance(x, jax.Array)]
    sizes = {buffer_pointer(x): x.nbytes for x in leaves}
    entered = {buffer_pointer(x) for x in recorder.arrays}
    live = {k: size for k, size in sizes.items() if k in entered}
    given = [x for x in jax.tree_util.tree_leaves(list(args)) if isinstance(x, jax.Array)]
    ours = {buffer_pointer(x) for x in given}
    ours |= {buffer_pointer(x) for x in recorder.arrays if _is_reshaped(x, given)}
    outside = {buffer_pointer(x) for x in closed_over}
    arguments = sum(size for k, size in live.items() if k in ours)
    activations = sum(size for k, size in live.items() if k not in ours and k not in outside)
    return Kept(activations, arguments, recorder.regions)


def _is_reshaped(x: jax.Array, given: Sequence[jax.Array]) -> bool:
    values = np.asarray(x)
    return any(
        values.nbytes == a.nbytes
        and values.dtype == a.dtype
        and values.tobytes() == np.asarray(a).tobytes()
        for a in given
    )
