"""Bytes kept at region boundaries, measured in each framework by its own means.

Both sides answer one question: of the arrays that entered an outermost ``remat`` region, which does
the pullback keep alive, and how many bytes are they?  In torch, a tensor is kept whose storage is
still alive after the arguments and all results were dropped.  In JAX, an array is kept that is a
leaf of the function that ``jax.vjp`` returns.  Neither is derived from the other, from shapes or
from the graph.

A view in torch shares its storage, where JAX makes a new array.  An array that holds exactly the
bytes of an argument (reshaped) counts as that argument on both sides, a part of one (a slice) as an
activation, and a view of an activation counts with the bytes that it shows; those of the whole
storages are given as well, in which a slice of an argument is nothing in torch.

What a policy saves inside a region did not enter it, and does not count.

Arrays that several regions take count once, for the first of them.  Arguments (parameters and data)
and activations are counted apart; tensors that the function closes over are alive anyway and count
as neither.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import functx
from functx import _torch
from functx._core import has_derivatives
from functx._remat import on_region
from functx._torch.lowering import base_of
from functx.compat._jax import buffer_pointer, concrete


@dataclass(frozen=True)
class RegionResiduals:
    """What a pullback keeps of the arrays that one region was the first to take.

    Attributes:
        name: of the region's function.
        activations: bytes computed by the function that is differentiated.
        arguments: bytes of its arguments.
        integers: bytes of activations that have no derivative: integers and masks.
    """

    name: str
    activations: int
    arguments: int
    integers: int


@dataclass(frozen=True)
class Kept:
    """What a pullback keeps of the arrays that entered its regions.

    Attributes:
        activations: bytes computed by the function.
        arguments: bytes of the function's arguments.
        regions: how many outermost regions ran.
        by_region: the same of each region, in the order in which they ran.
        storages: bytes of the buffers that hold the activations; in torch those of whole storages,
            of which a region may have taken views.
        integers: bytes of activations that have no derivative: integers and masks.
    """

    activations: int
    arguments: int
    regions: int
    by_region: tuple[RegionResiduals, ...] = ()
    storages: int = 0
    integers: int = 0


Buffer = tuple[int, int, int, Any]  # address or storage, offset, bytes, and their order
View = tuple[int, int, Any]  # the same without the offset


def _kept(
    entered: Sequence[tuple[str, set[Buffer]]],
    ours: set[View],
    outside: set[View],
    integers: set[Buffer],
) -> Kept:
    """Sum up what each region keeps: of the buffers that each took, those that live.

    ``ours`` are those of arguments, ``outside`` those of what the function closes over, and
    ``integers`` hold no numbers that have derivatives.
    """
    seen: set[Buffer] = set()
    regions = []
    for name, taken in entered:
        new = taken - seen
        made = {b for b in new if _view(b) not in ours | outside}
        given = {b for b in new if _view(b) in ours}
        sizes = (sum(b[2] for b in buffers) for buffers in (made, given, made & integers))
        regions.append(RegionResiduals(name, *sizes))
        seen |= taken
    return Kept(
        sum(r.activations for r in regions),
        sum(r.arguments for r in regions),
        len(regions),
        tuple(regions),
        integers=sum(r.integers for r in regions),
    )


def kept_by_torch(
    f: Callable[..., Any], args: Sequence[Sequence[Tensor]], closed_over: Sequence[Tensor]
) -> Kept:
    """Bytes that ``functx.vjp`` keeps, from storages that are still alive.

    ``f`` gives a scalar, and is differentiated in its first argument; tensors that are
    ``closed_over`` do not count.
    """
    entered: list[tuple[str, dict[Buffer, tuple[StorageWeakRef, int]]]] = []
    integers = set[Buffer]()
    outer = 0  # the level at which f is differentiated

    def record(inputs: list[Tensor], name: str, level: int) -> None:
        if level != outer:  # a derivative that f takes itself
            return
        integers.update(_buffer(base_of(x)) for x in inputs if not has_derivatives(x))
        storages = [(_buffer(x), x.untyped_storage()) for x in map(base_of, inputs)]
        entered.append((name, {k: (StorageWeakRef(s), s.nbytes()) for k, s in storages}))

    clones = [[x.detach().clone() for x in tensors] for tensors in args]
    ours = {_view(_buffer(x)) for xs in clones for x in xs}
    outside = {_view(_buffer(x)) for x in closed_over}
    first, *rest = clones

    def entered_with(p: Any) -> Any:
        nonlocal outer
        outer = _torch.current_interpreter().level()
        return f(p, *rest)

    with on_region(record):
        value, pullback = functx.vjp(entered_with, first)
    rest.clear()
    del clones, first, value
    gc.collect()
    live = [
        (name, {k: size for k, (ref, size) in buffers.items() if not ref.expired()})
        for name, buffers in entered
    ]
    del pullback
    whole = {k[0]: size for _, buffers in live for k, size in buffers.items()}
    known = {storage for storage, *_ in ours | outside}
    held = sum(size for storage, size in whole.items() if storage not in known)
    kept = _kept([(name, {*found}) for name, found in live], ours, outside, integers)
    return replace(kept, storages=held)


def _buffer(x: Tensor) -> Buffer:
    order = () if x.is_contiguous() else (*x.shape, *x.stride())  # none: as they are stored
    return _torch.storage_of(x), int(x.storage_offset()), x.nbytes, order


def _view(buffer: Buffer) -> View:
    return buffer[0], *buffer[2:]


def _passing(x: Any, arrays: list[Any]) -> Any:
    """``x``; the concrete array that it is when a function is differentiated eagerly is noted."""
    x_now = concrete(x)
    if not isinstance(x_now, jax.core.Tracer):  # no derivative is taken of it
        arrays.append(x_now)
        return x

    @jax.custom_jvp
    def passing(x: Any) -> Any:
        return x

    @passing.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # Public API hands over the primal here; with an eager vjp it is the array itself.
        arrays.append(concrete(primals[0]))
        return primals[0], tangents[0]

    return passing(x)


def kept_by_jax(
    observed: Callable[[Any], Callable[..., Any]],
    args: Sequence[Sequence[jax.Array]],
    closed_over: Sequence[jax.Array],
) -> Kept:
    """Bytes that ``jax.vjp`` keeps, from the leaves of the function that it returns.

    ``observed`` gives the lowered function, given an observer of operands (``Lowered.observed``).
    """
    regions: list[tuple[str, list[Any]]] = []

    def record(operands: Sequence[Any], name: str) -> list[Any]:
        arrays: list[Any] = []
        regions.append((name, arrays))
        return [_passing(x, arrays) for x in operands]

    f = observed(record)
    _, pullback = jax.vjp(lambda p: f(p, *args[1:]), args[0])
    leaves = [x for x in jax.tree_util.tree_leaves(pullback) if isinstance(x, jax.Array)]
    sizes = {buffer_pointer(x): x.nbytes for x in leaves}
    live = [
        (name, {(k, 0, sizes[k], ()) for k in map(buffer_pointer, arrays) if k in sizes})
        for name, arrays in regions
    ]
    given = [x for arrays in args for x in arrays]
    entered = [x for _, arrays in regions for x in arrays if _is_reshaped(x, given)]
    ours = {(buffer_pointer(x), x.nbytes, ()) for x in (*given, *entered)}
    outside = {(buffer_pointer(x), x.nbytes, ()) for x in closed_over}
    whole = [x for x in leaves if not jnp.issubdtype(x.dtype, jnp.inexact)]
    integers = {(buffer_pointer(x), 0, x.nbytes, ()) for x in whole}
    kept = _kept(live, ours, outside, integers)
    return replace(kept, storages=kept.activations)


def _is_reshaped(x: jax.Array, given: Sequence[jax.Array]) -> bool:
    same = [a for a in given if (a.dtype, a.nbytes) == (x.dtype, x.nbytes)]
    return any(np.asarray(a).tobytes() == np.asarray(x).tobytes() for a in same)
