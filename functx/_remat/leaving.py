"""Tensors that leave a region without being returned, whose gradients could be lost (rule 4).

In plain autograd such a tensor becomes a further result, which hangs on the node of the region.
This is not possible inside of transforms, nor for views. There the region raises an error.
"""

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
    """Tensors that are still alive and require grad at the base level, as further results.

    They are taken off the tape of the region. Leaves on their tape that no mode has seen are added
    to ``leaves``.
    """
    captures.let_go()
    if next(_alive(captures), None) is None:
        return []
    torch.clear_autocast_cache()  # its casts may hold a tape
    found: dict[int, Any] = {}
    for number, t in _alive(captures):
        if t.grad_fn is not None and not t._is_view() and _torch.level_of(t) == -1:
            unseen = Captures.leaves_unseen(captures, [t])
            leaves += [x for x in unseen if all(x is not leaf for leaf in leaves)]
            t.detach_()  # frees the tensors that only its tape held
            found[number] = captures.known[id(t)][0]
        del t
    if _refusal(captures, found) is not None:
        gc.collect()  # a cycle may hold it
        if (error := _refusal(captures, found)) is not None:
            raise error
    return [(number, t) for number, ref in found.items() if (t := ref()) is not None]


def _refusal(captures: Captures, found: dict[int, Any]) -> RematError | None:
    """The error for a tensor that is alive and can't become a further result.

    ``None`` if there is no such tensor. Stand-ins that are alive are added to ``found``.
    """
    left = dict(_alive(captures))
    for number in sorted(left, reverse=True):  # results first: stand-ins may be on their tape
        t = left[number]
        if number > 0 or t.grad_fn is not None:
            return _left(captures, t, "A leaf or a view can't become a further result. ")
        if t._use_count() == 1:  # type: ignore[attr-defined]
            t.detach_()  # a stand-in
            found[number] = captures.known[id(t)][0]
        elif not captures.region.options.is_pullback:  # in which a replay may leave such a tape
            return _left(
                captures,
                t,
                "A tape that no mode saw holds it. If a thread made that tape, start the thread "
                "outside of the region. ",
            )
    return None


def check_nothing_left(captures: Captures, results: list[Tensor]) -> None:
    """Raise an error if a tensor that requires grad is still alive, inside of transforms."""
    captures.let_go()
    returned = {id(t) for t in results}
    # (The autocast cache or a reference cycle may hold a tensor that user code does not.)
    for release in (torch.clear_autocast_cache, gc.collect):
        if all(id(t) in returned for _, t in _alive(captures)):
            return
        release()
    left = {number: t for number, t in _alive(captures) if id(t) not in returned}
    if left:  # prefer a result to a stand-in, which may only be on the tape of that result
        raise _left(captures, left[max(left)], "")


def _alive(captures: Captures) -> Iterator[tuple[int, Tensor]]:
    """Stand-ins, and tensors made by the region, that are alive and require grad.

    A transform inside makes leaves of its arguments. They are not held by user code, and left out.
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
        f"remat: a tensor of shape {tuple(t.shape)} that {which} leaves the region without being "
        f"returned, and its gradient would be lost. {why}{hint}Return the tensor (in a dataclass "
        "of yours: after torch.export.register_dataclass), or detach() what you keep. If a hook on "
        "a layer inside keeps it, as the hooks of BackPACK do, make regions of single layers: "
        "functx.apply_remat(model, nn.Linear). If this is a recurrent layer under functional_call, "
        "make the layer itself a region, and not its caller."
    )
