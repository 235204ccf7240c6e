"""The node of a region at one level.

It saves the inputs at that level through autograd, so they are freed and checked for writes like
those of any other node. If its backward is differentiated, it is itself a region: "replay, then
pull back" (`pullback.RegionPullback`). So derivatives of any order recompute.

NOTE [leaves asked for]
A pullback computes only the gradients that the backward pass asks for. torch says whether the pass
runs a node (`will_run`), but it raises an error for a leaf that is an input of
`torch.autograd.grad`. The error takes longer than everything else that the node does. So functx's
own backward passes say which leaves they ask for (`asking_for`). Once torch has raised at the base
level in runs of a script, later nodes get a view of each leaf, for which torch does not raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from functx import _torch
from functx._core import uncompiled
from functx._remat import departures, levels, pullback
from functx._remat.listener import listening
from functx._remat.observers import observers
from functx._remat.region import Inputs, Region
from functx._remat.replay import pulled_back
from functx._remat.script import Script
from functx._torch import graphs


class Payload:
    """The data of a node, in addition to its saved tensors."""

    __slots__ = ("level", "n_leaves", "n_values", "region", "requiring", "versions", "wanted")
    region: Region  # the region to replay
    level: int  # the level of the node
    n_values: int  # the number of saved values of its level, ...
    n_leaves: int  # ... and of leaves that no mode saw; they come after the values
    requiring: list[int]  # the values that require grad, and the leaves
    wanted: Sequence[int]  # the results that require grad, in the order of the node's outputs
    # The version of each value. (At a level, autograd's check compares versions of wrappers only.)
    versions: list[int]


class RegionNode(_torch.SingleLevelFunction):
    """The autograd function that attaches the results of a region to its saved tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        payload: Payload,
        outs: tuple[Tensor, ...],
        saved: list[Tensor],
        *requiring: Tensor,
    ) -> Any:
        ctx.payload = payload
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return outs

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        payload = ctx.payload
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise departures.modified(payload.region, error) from error
        if payload.level:
            saved = [levels.alive(t) for t in saved]
            for t, version, before in zip(saved, _versions(saved), payload.versions):
                if version != before:
                    raise departures.modified(payload.region, None, t.shape)
        needs = ctx.needs_input_grad[3:]
        if len(needs) > 1:
            script = payload.region.script
            needs = [n and _is_asked(e[0], script) for n, e in zip(needs, ctx.next_functions)]
        return (None, None, None, *pull_back(payload, [*saved], cotangents, needs))


def pull_back(
    payload: Any, saved: list[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of a node's values that require grad, and of its leaves.

    ``saved`` has the values, the leaves, and the values that the policy saved. A gradient that is
    not needed is ``None``.
    """
    requiring = payload.requiring
    asked = [i for i, need in zip(requiring, needs) if need]
    results, given = list[int](), list[Tensor]()
    for i, c in zip(payload.wanted, cotangents):
        if c is not None:
            results.append(i)
            given.append(c if _torch.unwrap_if_dead(c) is c else levels.alive(c))
    del cotangents
    if not given or not asked:
        return [None] * len(requiring)
    n, m = payload.n_values, payload.n_values + payload.n_leaves
    values, leaves, kept = saved[:n], saved[n:m], saved[m:]
    del saved
    outer, traced = listening() if _torch.function_depth() else None, _torch.dispatch_depth() > 0
    since = graphs.last_node() if traced else None
    if outer is not None:
        outer.sleep()
    try:
        # If it is differentiated, the backward is a region again. (Not under ``is_grads_batched``,
        # because the vmap of that option can't detach.)
        if observers.tracers or (
            torch.is_grad_enabled()
            and any(map(levels.is_tracked, values + kept + given + leaves))
            and not any(map(_torch.is_legacy_batched, values + kept + given))
        ):
            flat = values + kept + given
            del values, kept, given
            args = payload, leaves, results, asked, flat
            found, grads = pullback.pull_back_in_a_region(*args)
        else:
            found, grads = pulled_back(payload, values, kept, leaves, results, given, asked)
    finally:
        if outer is not None:
            outer.wake()
    if traced:
        graphs.close(since, payload.region.options.name, "backward")
    if len(found) == len(requiring):
        return [*grads]
    by_number = dict(zip(found, grads))
    return [by_number.get(i) for i in requiring]


def _versions(tensors: list[Tensor]) -> list[int]:
    """The version of each tensor. Modes are off: one might answer for another tensor."""
    with _torch.without_function_modes():
        return [0 if t.is_inference() else t._version for t in map(levels.base_of, tensors)]


# For each running backward pass of functx, the ids of the leaves that it asks for.
_asked_leaves: list[set[int]] = []


@contextmanager
def asking_for(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Say that the backward pass in this context asks for the gradients of these leaves."""
    ids = {*map(id, leaves)}
    _asked_leaves.append(ids)
    try:
        yield
    finally:
        _asked_leaves.remove(ids)


def _is_asked(node: Any, script: Script) -> bool:
    """Whether the running backward pass asks for the gradient at this node."""
    if _asked_leaves and (leaf := getattr(node, "variable", None)) is not None:
        key = id(leaf)
        for ids in _asked_leaves:
            if key in ids:
                return True
    try:
        return node is not None and _torch.will_run(node)
    except RuntimeError:  # torch raises it for a leaf that is an input of `torch.autograd.grad`
        script.has_leaves_asked = True  # see NOTE [leaves asked for]
        return True


def _is_dense_leaf(t: Tensor) -> bool:
    """Whether ``t`` is a leaf that can have a view; sparse leaves can't."""
    return t.grad_fn is None and t.layout is torch.strided


def _sharing(results: list[Tensor], inputs: Inputs | list[Tensor], n: int) -> list[Tensor]:
    """Replace results that share memory with an input or another result by views.

    torch raises an error for a write to a view that a Function returns, so a write can't change
    the other tensors unnoticed. This works at the base level only: inside of a Function, no level
    below records the view. The first ``n`` results were returned. The others are tensors that user
    code holds, and they stay as they are.
    """
    if type(inputs) is list and len(results) == 1:
        # The most common case, without building sets.
        mine = _torch.storage_of(results[0])
        for t in inputs:
            if _torch.storage_of(t) == mine != -1:
                break
        else:
            return results
    memory = [*map(_torch.storage_of, results)]
    stored = [inputs] if isinstance(inputs, list) else inputs.stored
    held = {_torch.storage_of(t) for parts in stored for t in parts} - {-1}
    if held.isdisjoint(memory) and len({*memory}) == len(memory):
        return results
    shared = [m in held or (m != -1 and memory.count(m) > 1) for m in memory]
    return [
        levels.at_depth(0, partial(t.view_as, t)) if s and i < n else t
        for i, (t, s) in enumerate(zip(results, shared))
    ]


def attach_simply(
    region: Region,
    values: list[Tensor],
    requiring: list[int],
    results: list[Tensor],
    outermost: bool,
) -> list[Tensor]:
    """`attach` at the base level, if all results require grad and only input values are saved.

    This is the case for nearly all nodes. It does not need the checks of the other cases.
    """
    if outermost and observers.of_nodes:
        for callback in observers.of_nodes:
            callback([*values], region.options.name, 0)
    payload = Payload()
    payload.region, payload.level, payload.n_values, payload.n_leaves = region, 0, len(values), 0
    payload.requiring, payload.wanted = requiring, range(len(results))
    tracked = values if len(requiring) == len(values) else [values[i] for i in requiring]
    if region.script.has_leaves_asked and len(tracked) > 1:
        tracked = [t.view_as(t) if _is_dense_leaf(t) else t for t in tracked]
    results = _sharing(results, values, len(results))
    return list(RegionNode.apply(payload, tuple(results), values, *tracked))


def attach(
    region: Region,
    level: int,
    values: list[Tensor],
    requiring: list[int],
    leaves: Sequence[Tensor],
    results: list[Tensor],
    required: list[bool],
    kept: Sequence[Tensor],
    *,
    inputs: Inputs | None,
    outermost: bool,
) -> list[Tensor]:
    """Attach the results at one level to a node.

    ``results`` are off the tape. Those that are ``required`` to have a gradient become outputs of
    the node. The node saves the ``values`` of the inputs at this level, the ``leaves`` that no mode
    saw, and the values that the policy saves (``kept``). Inference tensors are saved as copies.
    ``requiring`` lists the values that require grad. If ``inputs`` is ``None``, the values are
    plain tensors at the base level. Observers are notified of nodes of outermost regions only.
    """
    if outermost and observers.of_nodes:
        for callback in observers.of_nodes:
            callback([*values], region.options.name, level)
    payload = Payload()
    payload.region, payload.level = region, level
    payload.n_values, payload.n_leaves = len(values), len(leaves)
    payload.requiring, tracked, saved = requiring, values, values
    if len(requiring) < len(values):
        tracked = [values[i] for i in requiring]
    if leaves or kept:
        payload.requiring = [*requiring, *range(len(values), len(values) + len(leaves))]
        tracked = [*tracked, *leaves]
        saved = [*values, *leaves, *kept]
    if leaves or kept or (inputs is not None and inputs.has_inference):
        saved = [t.clone() if t.is_inference() else t for t in saved]
    wanted: Sequence[int]
    if False in required:
        wanted = [i for i, r in enumerate(required) if r]
        behind = [results[i] for i in wanted]
    else:
        wanted, behind = range(len(results)), results
    payload.wanted = wanted
    if level:
        payload.versions = _versions(saved)
    else:
        n_returned = len(region.script.results)
        if region.further:
            n_returned = sum([i < n_returned for i in wanted])
        behind = _sharing(behind, values if inputs is None else inputs, n_returned)
    apply = RegionNode.apply
    if _torch.peek_interpreter() is None:
        if region.script.has_leaves_asked and len(tracked) > 1:
            tracked = [t.view_as(t) if _is_dense_leaf(t) else t for t in tracked]
        got = apply(payload, tuple(behind), saved, *tracked)
    else:
        got = _torch.apply_at_level(apply, payload, tuple(behind), saved, *tracked)
    if False not in required:
        return [*got]
    results = list(results)
    for i, t in zip(wanted, got):
        results[i] = t
    return results


def required_of(values: list[Tensor], k: int, inputs: Inputs) -> list[bool]:
    """For each result, whether it requires grad at level k."""
    if k and inputs.frames[k - 1].kind is not levels.GRAD:
        return []
    # (A view made under no_grad at a functorch level says that it requires grad.)
    return [
        t.requires_grad
        and (k == 0 or _torch.level_of(t) == k)
        and (t.grad_fn is not None or id(t) in inputs.leaves)
        for t in values
    ]


def off_the_tape(t: Tensor, k: int) -> Tensor:
    """A result without its history at level k."""
    if k == 0:
        if _torch.dual_level() >= 0 and fwAD.unpack_dual(t).tangent is not None:
            raise AssertionError("functx: a dual of plain forward mode at the base level")
        return levels.detached(t)
    return _torch.wrap_grad(_torch.unwrap_grad(t, k), k) if _torch.level_of(t) == k else t
