"""The cotangents of a region's inputs: as a region's results, if they may be differentiated."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._errors import RematError
from functx._remat import _in_parts
from functx._remat._apart import hides_history
from functx._remat._custom import running
from functx._remat._depth import nested
from functx._remat._dual_level import off_the_tape
from functx._remat._holders import base_of
from functx._remat._interrupted import interrupted_backwards
from functx._remat._known_pullbacks import known_gradients
from functx._remat._letting_go import can_go, lent, nobody_differentiates
from functx._remat._operator import call
from functx._remat._options import Options
from functx._remat._pullback import Pullback
from functx._remat._read_results import Cut, Replayed
from functx._remat._region import Region
from functx._remat._tracker import SILENT, active_tracker, tracking
from functx._torch_memory import place_of


def gradients_of(
    payload: Any,
    saved: list[Tensor],
    needs: Sequence[bool],
    wanted: Sequence[int],
    cotangents: list[Tensor],
    cut: Sequence[bool],
    beside: Cut | None = None,
    *,
    everywhere: bool = False,
) -> list[Tensor | None]:
    """The cotangents of the inputs, for those of some results; the lists are emptied.

    Those of what a replay's tape is cut at come after them. ``NOTE [read results]``. If told so, it
    is pulled back to other leaves as well. ``NOTE [all of a tape]`` in `_apart`.
    """
    if everywhere:
        return _replayed(payload, (needs, wanted, cut), beside, saved, cotangents, True)
    if not any(needs):
        return [None] * len(needs)
    pull_back = functools.partial(_replayed, payload, (needs, wanted, cut), beside)
    ledger = payload.region.ledger
    if beside is None and ledger is not None and ledger.pullbacks is not None:
        places = (*(payload.places[i] for i in wanted),)
        asked = payload.level, places, (*needs,), (*cut,)
        found = known_gradients(payload, saved, cotangents, asked, pull_back)
        if found is not None:
            return found
    return pull_back(saved, cotangents)


def _replayed(
    payload: Any,
    of: tuple[Sequence[bool], Sequence[int], Sequence[bool]],
    beside: Cut | None,
    saved: list[Tensor],
    cotangents: list[Tensor],
    everywhere: bool = False,
) -> list[Tensor | None]:
    fn, region, (needs, wanted, cut) = payload.fn, payload.region, of
    if beside is not None or (torch.is_grad_enabled() and not _torch.tracing()):
        fn = Replayed(fn, region, payload.level, beside)
    pullback = Pullback(fn, needs, cut, wanted, payload.level, payload.want, payload.n_kept)
    some = pullback.needs != pullback.requires or payload.levels > 1
    if everywhere:
        pullback.everywhere = True
    elif some and payload.levels and not (region.connected or hides_history(region)):
        pullback.plainly = payload.plainly
    if beside is not None:
        pullback.cut = beside
    if region.marked:
        pullback.marked = True
    ledger = region.ledger
    pullback.by_name = ledger is None or ledger.python_on_tape
    if payload.absent:
        kept, absent = iter(saved), iter(payload.absent)
        with tracking(SILENT):  # what making placeholders takes is no operation of a body
            primals = [next(kept) if need else next(absent)() for need in payload.needed]
        saved[:] = [*primals, *kept]
        del primals, kept, absent
    tensors = [*saved, *payload.apart, *cotangents]
    saved.clear()
    cotangents.clear()
    beyond = payload.n_kept or region.connected
    connected = payload.needed if beyond else ()
    lends = payload.lets_go()
    passing = payload.passing if lends and not payload.n_kept else ()
    if (within := _in_parts.running.of) is None:
        _in_parts.begins(region.hooks, recorded=isinstance(fn, Replayed))
    try:
        results = iter(_pull_back(region, pullback, tensors, connected, lends, passing))
    except Exception as error:
        interrupted_backwards(error, region.options.name)
        raise
    finally:
        _in_parts.running.of = within
    gradients = [next(results) if need else None for need in needs]
    return gradients if beside is None else [*gradients, *results]


def gradients_with_tangents(
    payload: Any,
    saved: list[Tensor],
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """``NOTE [gradients with tangents]`` in `_dual_level`."""
    duals = payload.duals
    assert duals is not None
    if payload.region.rewritten:
        raise RematError(
            f"remat: the region {payload.region.options.name!r} writes in place to a tensor that "
            "it did not make, ran on dual tensors of a forward_ad.dual_level, and is "
            "differentiated backwards inside it; the tangents of its gradients would be lost. "
            "Write to a .clone(), or take forward over reverse with functx.jvp of functx.grad."
        )
    those = [(i, c) for i, c in enumerate(cotangents) if c is not None]
    primal = [(i, c) for i, c in those if duals.is_primal(payload.places[i])]
    tangent = [i for i, _ in those if not duals.is_primal(payload.places[i])]
    gradients: list[Tensor | None] = [None] * len(needs)
    if tangent:
        given = [c for i, c in those if not duals.is_primal(payload.places[i])]
        gradients = gradients_of(payload, saved, needs, tangent, given, payload.cut)
    if primal:
        places = [payload.places[i] for i, _ in primal]

        def pulled_back() -> Sequence[Tensor | None]:
            pullback = duals.pullback(payload.region, needs, payload.cut, places)
            given = [*tensors, *(c for _, c in primal)]
            return _pull_back(payload.region, pullback, given, duals=True)

        try:
            results = iter(pulled_back())
        except NotImplementedError as error:
            if torch.is_grad_enabled() or "forward AD" not in str(error):
                raise
            # Without remat the cotangents of tangents come along, which are for that other formula.
            with torch.enable_grad():
                results = map(off_the_tape, pulled_back())
        for i in duals.inputs():
            if needs[i] and (found := next(results)) is not None:
                before = gradients[i]
                gradients[i] = found if before is None else before + found
    return gradients


def _pull_back(
    region: Region,
    pullback: Pullback,
    tensors: list[Tensor],
    connected: Sequence[bool] = (),
    lends: bool = False,
    passing: Sequence[int] = (),
    *,
    duals: bool = False,
) -> Sequence[Tensor | None]:
    """Run a pullback: as a region, if that may be differentiated; the list is its own."""
    tensors[:] = _torch.unwrap_dead(tensors)
    alone = not (duals or torch.is_grad_enabled()) and _mapped_at_most()
    unread = (lends or pullback.level > 0) and nobody_differentiates(() if alone else tensors)
    if unread and not alone and pullback.level > 0 and not duals:
        # Its own level has ended when it is pulled back: what is recorded is what it reads beside
        # these tensors (in a hook), by those whose it is.
        alone = active_tracker() is None and _mapped_at_most()
    theirs: list[tuple[Any, Any]] = []
    if lends and unread:
        pullback.lends = True
        first = len(pullback.needs) + pullback.n_kept
        if alone:
            theirs = [(place_of(base_of(c)), weakref.ref(c)) for c in tensors[first:] if can_go(c)]
        tensors[first:] = [lent(c) if can_go(c) else c for c in tensors[first:]]
        pullback.passing = [i for i in passing if can_go(tensors[i])]
        for i in pullback.passing:
            tensors[i] = lent(tensors[i])
    if alone:
        with nested(region.options.name):
            return _not_lent(pullback(*tensors), theirs)
    options = Options(
        name=f"pullback of {region.options.name}",
        determinism_check=region.options.determinism_check,
        replay=True,
    )
    return call(Region(pullback, tensors, options, connected=connected), made_here=True)


def _not_lent(
    gradients: list[Tensor | None], theirs: Sequence[tuple[Any, Any]]
) -> list[Tensor | None]:
    """Gradients that are cotangents, as those and not as aliases of ours.

    Torch takes what nobody else holds for the ``grad`` of a leaf, and adds to that in place.

    Args:
        gradients: what a pullback gave.
        theirs: the places of cotangents in memory, and these, weakly.
    """
    for i, g in enumerate(gradients if theirs else ()):
        if g is not None and (base := base_of(g)).layout is torch.strided:
            found = place_of(base)
            for place, ref in theirs:
                if place == found and (own := ref()) is not None:
                    gradients[i] = own
    return gradients


def _mapped_at_most() -> bool:
    """Whether nothing but ``vmap`` is active: nothing could differentiate what runs now."""
    vmap = _torch.TransformType.Vmap
    levels = _torch.interpreters()
    if not levels:
        return not running.keeping  # a compiler is to see that it is a replay
    return all(i.key() == vmap for i in levels) and not _torch.tracing()
