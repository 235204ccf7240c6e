"""Replay, then pull back: the derived function that a region's node is differentiated with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from functx import _torch, _torch_vmap
from functx._remat._alike import alike
from functx._remat._asked import Asked
from functx._remat._in_parts import running
from functx._remat._keepers import found_by_functions, hung
from functx._remat._letting_go import lend
from functx._remat._levels import at_level
from functx._remat._other_names import OtherNames
from functx._remat._read_results import Cut
from functx._remat._region import Flat
from functx._remat._stored import pending, refuse_changed
from functx._remat._tapes import leaves_below
from functx._remat._tracker import SILENT, active_tracker, tracking
from functx._remat._watch import nobody_watches
from functx._torch_edges import gradient_edge


class _recording:
    """A tape, also in inference mode, and no older vmap: one that runs maps over cotangents."""

    _grad_mode: Any = None
    _inference: Any = None
    _outside: Any = None

    def __enter__(self) -> None:
        if torch.is_inference_mode_enabled():  # no forward that has a derivative ran in it
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
        if not torch.is_grad_enabled():
            self._grad_mode = torch.set_grad_enabled(True)
        if _torch_vmap.legacy_vmap_level() > 0:
            self._outside = _torch_vmap.outside_legacy_vmap()
            self._outside.__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self._outside is not None:
            self._outside.__exit__(*exc)
        if self._grad_mode is not None:
            self._grad_mode.__exit__(*exc)
        if self._inference is not None:
            self._inference.__exit__(*exc)


def _bare(t: Tensor) -> Tensor:
    """``t`` without wrappers of levels that nothing is to be learned from: they hide its own."""
    while (
        _torch.is_wrapped(t)
        and not (t.requires_grad or _torch.is_batched(t) or _torch.is_functional(t))
        and _torch.forward_ad_level() < 0
    ):
        t = _torch.get_unwrapped(t)
    return t


class Pullback:
    """``(inputs, kept values, cotangents) -> gradients`` of a function, run on a fresh tape.

    The function runs at the level it ran at first; levels entered since (a vmap over cotangents)
    are none of its business, its random operations least of all. The tape is pulled back *after
    its level has ended*, with ``create_graph`` as the surroundings say: a dead level records
    nothing, living ones record what they need.

    Args:
        fn: the function to replay.
        needs: which inputs get a gradient.
        cut: which others require grad while the function runs, though no result depends on them.
        wanted: the results of the node that have a cotangent.
        want: tells the region what its replay is for; answers which results of ``fn`` that is.
        n_kept: how many values of the region's own are among the arguments.
        level: the level of the node; 0 is plain autograd, on which replays then run too: that
            keeps old-style Functions, hooks and ``.numpy()`` working.

    Attributes:
        by_name: whether Python is on the tape. ``NOTE [two names]`` in `_other_names`.
        lends: whether cotangents are aliases that can be let go. ``NOTE [let go]``.
        passing: inputs that are such aliases, too.
        marked: whether an input has a class of its own, or attributes. `_alike`.
        cut: where the tape of the replay is cut, if somewhere. ``NOTE [read results]``.
        everywhere: whether it is pulled back to all leaves. ``NOTE [all of a tape]`` in `_apart`.
        plainly: of `Asked`, where something may be left out by that.
        names: the stand-ins on the tape, and what they stand for, if that may make a difference.
    """

    cut: Cut | None = None
    everywhere = False
    marked = False
    names: OtherNames | None = None
    plainly: bool | None = None

    def __init__(
        self,
        fn: Flat,
        needs: Sequence[bool],
        cut: Sequence[bool],
        wanted: Sequence[int],
        level: int,
        want: Callable[[Sequence[int], Sequence[Tensor], Sequence[int], Any], list[int]],
        n_kept: int = 0,
    ) -> None:
        self.n_kept = n_kept
        self.want = want
        self.fn = fn
        self.needs = tuple(needs)
        self.requires = (*map(or_, needs, cut),)
        self.wanted = tuple(wanted)
        self.level = level
        self.by_name = self.lends = False
        self.passing: Sequence[int] = ()

    def told(self, kept: Sequence[Tensor], recorded: bool) -> list[int]:
        """The results of ``fn`` that are pulled back; the region is told what its replay is for."""
        asked = None
        if self.plainly is not None and _torch.forward_ad_level() < 0:
            inputs = tuple(i for i, need in enumerate(self.needs) if need)
            asked = Asked(inputs, recorded, self.plainly)
        return self.want(self.wanted, kept, self.passing, asked)

    def __call__(self, *tensors: Tensor) -> list[Tensor | None]:
        """Gradients of the inputs that need one, in their order."""
        n, m = len(self.needs), len(self.needs) + self.n_kept
        primals: Sequence[Tensor] = tensors[:n]
        kept, cotangents = tensors[n:m], tensors[m:]
        del tensors
        tracker = active_tracker()
        recording = torch.is_grad_enabled()
        primals = (*map(_bare, primals),)
        backward, running.of = running.of, None  # NOTE [in parts]
        before = running.again, running.around
        running.again, running.around = True, running.again
        others, hung.those = hung.those, ()
        depth = max(map(_torch.wrapper_level, primals), default=-1)
        plain = self.level == 0 and depth <= 0
        try:
            if plain and nobody_watches() and _torch.peek_interpreter_stack() is None:
                with _recording():
                    tape = _plain(self, primals, kept, recording)
            else:
                with tracking(SILENT), at_level(max(depth, self.level - 1, 0)), _recording():
                    tape = (_plain if plain else _fresh_level)(self, primals, kept, recording)
        finally:
            running.of = backward
            running.again, running.around = before
            keeping, hung.those = hung.those, others
        del primals, kept
        inputs, outs = tape
        if tracker is not None:
            tracker.note(inputs)
        if self.lends:
            for edge, cotangent in zip(outs, cotangents):
                lend(edge, cotangent)
        # On plain autograd the tape of the replay is part of what a second derivative needs.
        retain = plain and recording
        names, self.names = self.names, None
        pull_back = _pull_back if self.cut is None else self.cut.around(_pull_back)
        n = len(inputs)
        if self.by_name and len(outs) == 1 and not _torch.tracing():
            # Of the one node that a pass begins with, torch does not tell hooks on several tensors
            # that it runs it (`register_multi_grad_hook`): they would not be called.
            outs, cotangents = [*outs, _BESIDE], (*cotangents, _NOTHING)
        if self.everywhere:
            inputs += _other_leaves(outs, inputs)
        if names is None and not keeping:  # as in most calls
            gradients = pull_back(outs, inputs, cotangents, retain_graph=retain)
        else:
            with found_by_functions(keeping), names or nullcontext():
                gradients = pull_back(outs, inputs, cotangents, retain_graph=retain)
        if names is not None:
            names.pass_on()
        if pending.those is not None:
            refuse_changed()
        if tracker is not None:
            tracker.note(gradients)
        return gradients if len(gradients) == n else [*gradients[:n], *gradients[len(inputs) :]]


_NOTHING = torch.zeros(())
_BESIDE = gradient_edge(torch.zeros((), requires_grad=True).view(()))
"""Begins a pass too, and leads nowhere."""

Tape = tuple[list[Tensor], list[Any]]
"""The inputs that need a gradient, and where the tape of each wanted result begins."""


def _plain(
    pullback: Pullback, primals: Sequence[Tensor], kept: Sequence[Tensor], recording: bool
) -> Tape:
    """On plain autograd, below all transforms."""
    inputs = [
        # A stand-in of the base level is a leaf already; anything else must be cut off.
        t
        if not require or (recording and t.requires_grad)
        else t.requires_grad_()
        if i in pullback.passing
        else _leaf(t)
        for i, (t, require) in enumerate(zip(primals, pullback.requires))
    ]
    looks = _look_alike(pullback, inputs, primals) if pullback.marked else ()
    if pullback.by_name and not (recording or _torch.tracing()):
        own = [(t, p) for t, p in zip(inputs, primals) if t is not p]
        pullback.names = OtherNames(own) if own else None
    wanted = pullback.told(kept, recording)
    outs = pullback.fn(*inputs)
    for t, attributes in looks:
        alike(t, t.__class__, attributes)
    return _tape(pullback, inputs, outs, wanted)


def _look_alike(
    pullback: Pullback, inputs: list[Tensor], primals: Sequence[Tensor]
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Make the stand-ins look like what they stand for; those, and whose attributes they have."""
    looks = []
    for i, (t, p, require) in enumerate(zip(inputs, primals, pullback.requires)):
        if require:
            attributes = p.__dict__
            inputs[i] = alike(t, p.__class__, dict(attributes))
            looks.append((inputs[i], attributes))
    return looks


def _leaf(t: Tensor) -> Tensor:
    """``t`` off all tapes, and on its own; its tangent stays."""
    leaf = _torch.detached(t).requires_grad_()
    if _torch.forward_ad_level() < 0:
        return leaf
    tangent = forward_ad.unpack_dual(t).tangent
    return leaf if tangent is None else forward_ad.make_dual(leaf, tangent)


def _fresh_level(
    pullback: Pullback, primals: Sequence[Tensor], kept: Sequence[Tensor], recording: bool
) -> Tape:
    """At a grad level that has ended when this returns."""
    level = _torch.enter_grad_level()
    try:
        inputs = [_torch.wrap_for_grad(t, level) for t in primals]
        for t, require in zip(inputs, pullback.requires):
            if require:
                _torch.require_grad(t)
        wanted = pullback.told(kept, recording)
        return _tape(pullback, inputs, pullback.fn(*inputs), wanted)
    finally:
        _torch.exit_grad_level()


def _tape(
    pullback: Pullback,
    inputs: Sequence[Tensor],
    outs: Sequence[Tensor | None],
    places: Sequence[int],
) -> Tape:
    wanted = [outs[i] for i in places]
    return (
        [t for t, need in zip(inputs, pullback.needs) if need],
        # An edge, not the result: results that the pullback does not read can go.
        [None if o is None or not o.requires_grad else gradient_edge(o) for o in wanted],
    )


def _other_leaves(edges: Sequence[Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Those that a tape ends in, beside some."""
    nodes = [e.node for e in edges if e is not None and not isinstance(e, Tensor)]
    own = {*map(id, inputs)}
    return [t for t in leaves_below(*nodes) if id(t) not in own]


def _pull_back(
    outs: Sequence[Any],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    retain_graph: bool,
) -> list[Tensor | None]:
    taped = [(o, c) for o, c in zip(outs, cotangents) if o is not None]
    if not taped:
        return [None] * len(inputs)
    gradients = _torch.run_backward(
        tuple(o for o, _ in taped),
        tuple(c for _, c in taped),
        retain_graph,
        torch.is_grad_enabled(),  # create_graph
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    # A backward that hands a saved tensor on as it is hands on a wrapper of the dead level.
    return [None if g is None else _torch.unwrap_if_dead(g) for g in gradients]
