"""What leaves a region otherwise than by return, and gradients that could be lost (rule 4)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._core import RematError
from functx._remat import departures, levels
from functx._remat.captures import Captures


def further_results(captures: Captures, leaves: list[Tensor]) -> list[tuple[int, Tensor]]:
    """What is alive and requires grad at the base level, off the tape, as further results.

    Its leaves that no mode has seen are added to ``leaves``.
    """
    captures.let_go()
    if next(_alive(captures), None) is None:
        return []
    torch.clear_autocast_cache()  # which may hold a tape
    found: dict[int, Any] = {}
    for number, t in _alive(captures):
        if t.grad_fn is not None and not t._is_view() and _torch.level_of(t) == -1:
            unseen = Captures.leaves_unseen(captures, [t])
            leaves += [x for x in unseen if all(x is not leaf for leaf in leaves)]
            t.detach_()  # what lived on its tape alone is gone with that
            found[number] = captures.known[id(t)][0]
        del t
    if _refusal(captures, found) is not None:
        gc.collect()  # a cycle may hold it
        if (error := _refusal(captures, found)) is not None:
            raise error
    return [(number, t) for number, ref in found.items() if (t := ref()) is not None]


def _refusal(captures: Captures, found: dict[int, Any]) -> RematError | None:
    """What is alive and can't become a further result; stand-ins are added to those ``found``."""
    left = dict(_alive(captures))
    for number in sorted(left, reverse=True):  # results first: stand-ins may be on their tape
        t = left[number]
        if number > 0 or t.grad_fn is not None:
            return _left(captures, t, "A leaf or a view can't become a further result. ")
        if t._use_count() == 1:  # type: ignore[attr-defined]
            t.detach_()  # a stand-in
            found[number] = captures.known[id(t)][0]
        elif not captures.region.options.is_pullback:  # in which a replay may leave such a tape
            return _left(captures, t, "No mode saw what keeps it: start the thread outside. ")
    return None


def check_nothing_left(captures: Captures, results: list[Tensor]) -> None:
    """Inside of transforms, nothing that requires grad may be alive."""
    captures.let_go()
    returned = {id(t) for t in results}
    for release in (torch.clear_autocast_cache, gc.collect):  # that, or a cycle, may hold it
        if all(id(t) in returned for _, t in _alive(captures)):
            return
        release()
    left = {number: t for number, t in _alive(captures) if id(t) not in returned}
    if left:  # a result rather than a stand-in that is on its tape
        raise _left(captures, left[max(left)], "")


def _alive(captures: Captures) -> Iterator[tuple[int, Tensor]]:
    """What the region has made, or was given as a stand-in, that is alive and requires grad.

    A transform inside makes leaves of what it is given; these are not the program's.
    """
    for ref, number in [*captures.known.values()]:
        t = ref()
        if t is not None and levels.is_tracked(t):
            a_leaf = t.requires_grad and levels.has_no_node(t)
            if not a_leaf or number < 0 or number in captures.leaves:
                yield number, t
        t = None


def _left(captures: Captures, t: Tensor, why: str) -> RematError:
    number, title = captures.number_of(t), captures.region.title
    makers = [
        departures.name_of(call.func)
        for call in captures.calls
        if number in [result[0] for result in call.results] or number in call.further.values()
    ]
    hint = departures.of_parametrizations() if _torch.parametrizations_are_cached() else ""
    which = f"{makers[0]} made in {title}" if makers else f"{title} is given, or makes of data,"
    return RematError(
        f"remat: a tensor of shape {tuple(t.shape)} that {which} leaves it otherwise than by "
        f"return, and its gradient would be lost. {why}{hint}Return it (in a dataclass of yours: "
        "after torch.export.register_dataclass), or detach() what you keep. If a hook on a layer "
        "inside keeps it, as those of BackPACK do, make regions of single layers: "
        "functx.apply_remat(model, nn.Linear). Of a recurrent layer under functional_call make the "
        "layer a region, not what calls it."
    )
