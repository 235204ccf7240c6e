"""Measure the bytes that are kept at region boundaries, in each framework by its own means.

Both sides answer the same question: which of the arrays that enter an outermost ``remat`` region
does the pullback keep alive, and how many bytes are they? In torch, a tensor is kept if its storage
is still alive after the arguments and all results were dropped. In JAX, an array is kept if it is a
leaf of the function that ``jax.vjp`` returns. Neither is derived from the other, from shapes, or
from the graph.

In torch, a view shares its storage; in JAX it is a new array. To make both comparable, an array
with exactly the bytes of an argument (reshaped) counts as that argument on both sides. A part of an
argument (a slice) counts as an activation. A view of an activation counts with the bytes of the
view; the bytes of whole storages are reported separately, and there a slice of an argument in torch
counts as nothing.

Values that a policy saves inside a region do not enter it, so they do not count.

An array that several regions take counts once, for the first of them. Arguments (parameters and
data) and activations are counted separately. Tensors that the function closes over are alive
anyway, and count as neither.
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
    """The bytes that a pullback keeps of arrays that entered this region first.

    Attributes:
        name: the name of the region's function.
        activations: bytes that the differentiated function computed.
        arguments: bytes of its arguments.
        integers: bytes of activations without derivatives: integers and masks.
    """

    name: str
    activations: int
    arguments: int
    integers: int


@dataclass(frozen=True)
class Kept:
    """The bytes that a pullback keeps of the arrays that entered its regions.

    Attributes:
        activations: bytes that the function computed.
        arguments: bytes of the function's arguments.
        regions: how many outermost regions ran.
        by_region: the same for each region, in the order in which they ran.
        storages: bytes of the buffers of the activations. In torch these are whole storages, of
            which regions may have taken views.
        integers: bytes of activations without derivatives: integers and masks.
    """

    activations: int
    arguments: int
    regions: int
    by_region: tuple[RegionResiduals, ...] = ()
    storages: int = 0
    integers: int = 0


Buffer = tuple[int, int, int, Any]  # address or storage, offset, bytes, and layout
View = tuple[int, int, Any]  # the same without the offset


def _kept(
    entered: Sequence[tuple[str, set[Buffer]]],
    ours: set[View],
    outside: set[View],
    integers: set[Buffer],
) -> Kept:
    """Sum the bytes that each region keeps.

    Args:
        entered: for each region, its name and the buffers that it took and that are alive.
        ours: the arguments.
        outside: the tensors that the function closes over.
        integers: the buffers without derivatives.
    """
    seen: set[Buffer] = set()
    regions = []
    for name, taken in entered:
        new = taken - seen
        activations = {b for b in new if _view(b) not in ours | outside}
        arguments = {b for b in new if _view(b) in ours}
        kinds = activations, arguments, activations & integers
        sizes = (sum(b[2] for b in buffers) for buffers in kinds)
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
    """The bytes that ``functx.vjp`` keeps, from storages that are still alive.

    ``f`` returns a scalar and is differentiated with respect to its first argument. Tensors in
    ``closed_over`` do not count.
    """
    entered: list[tuple[str, dict[Buffer, tuple[StorageWeakRef, int]]]] = []
    integers = set[Buffer]()
    outer = 0  # the level at which f is differentiated

    def record(inputs: list[Tensor], name: str, level: int) -> None:
        if level != outer:  # this region is in a derivative that f takes itself
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
    not_counted = {storage for storage, *_ in ours | outside}
    held = sum(size for storage, size in whole.items() if storage not in not_counted)
    kept = _kept([(name, {*found}) for name, found in live], ours, outside, integers)
    return replace(kept, storages=held)


def _buffer(x: Tensor) -> Buffer:
    order = () if x.is_contiguous() else (*x.shape, *x.stride())  # () for contiguous tensors
    return _torch.storage_of(x), int(x.storage_offset()), x.nbytes, order


def _view(buffer: Buffer) -> View:
    return buffer[0], *buffer[2:]


def _passing(x: Any, arrays: list[Any]) -> Any:
    """Return ``x``, and append the concrete array behind it to ``arrays``.

    With an eager ``jax.vjp``, the derivative rule of ``passing`` gets that array.
    """
    x_now = concrete(x)
    if not isinstance(x_now, jax.core.Tracer):  # it is not differentiated
        arrays.append(x_now)
        return x

    @jax.custom_jvp
    def passing(x: Any) -> Any:
        return x

    @passing.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # The public API passes the primal; with an eager vjp it is the array itself.
        arrays.append(concrete(primals[0]))
        return primals[0], tangents[0]

    return passing(x)


def kept_by_jax(
    observed: Callable[[Any], Callable[..., Any]],
    args: Sequence[Sequence[jax.Array]],
    closed_over: Sequence[jax.Array],
) -> Kept:
    """The bytes that ``jax.vjp`` keeps, from the leaves of the function that it returns.

    ``observed`` makes the lowered function for an observer of operands (``Lowered.observed``).
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
    arguments = [x for arrays in args for x in arrays]
    reshaped = [x for _, arrays in regions for x in arrays if _is_reshaped(x, arguments)]
    ours = {(buffer_pointer(x), x.nbytes, ()) for x in (*arguments, *reshaped)}
    outside = {(buffer_pointer(x), x.nbytes, ()) for x in closed_over}
    whole = [x for x in leaves if not jnp.issubdtype(x.dtype, jnp.inexact)]
    integers = {(buffer_pointer(x), 0, x.nbytes, ()) for x in whole}
    kept = _kept(live, ours, outside, integers)
    return replace(kept, storages=kept.activations)


def _is_reshaped(x: jax.Array, arguments: Sequence[jax.Array]) -> bool:
    same = [a for a in arguments if (a.dtype, a.nbytes) == (x.dtype, x.nbytes)]
    return any(np.asarray(a).tobytes() == np.asarray(x).tobytes() for a in same)
