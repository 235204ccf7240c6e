"""Pullbacks of regions whose run is a known one: the same operations as before, without a replay.

NOTE [known pullbacks]
The first run of a region that is as a known one (``NOTE [known runs]`` in `_known_runs`) has called
the same functions on the same tensors with the same numbers. So its pullback, for the same results
and the same inputs, runs the same ATen operations, in surroundings that are as they were. These are
written down once (`_straight_line`), and from then on run as they are: no Python of the user's, no
mode, no tape, no second run of torch's engine.

A dispatch mode may change which formula torch takes for a derivative. So what was written down is
compared with an ordinary replay, bit by bit, when it is written and when it runs first. Where
anything is unusual (modes, hooks, transforms, anomaly mode, other surroundings, changed modules or
containers, random numbers), there is an ordinary replay as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_vmap
from functx._remat._checksum import checksum
from functx._remat._custom import running
from functx._remat._profile import shown
from functx._remat._straight_line import Code, Recorder
from functx._remat._tapes import PLAIN
from functx._torch_memory import storage_keys
from functx._torch_modes import below_autograd

PullBack = Callable[[list[Tensor], list[Tensor]], "list[Tensor | None]"]
"""An ordinary pullback, of what a node has saved and of cotangents; it empties both lists."""

_MANY = 16
_PLAIN = frozenset(PLAIN)


class Known:
    """What is known of a pullback.

    Attributes:
        code: what does the same; ``None`` where there is none.
        seen: whether it has run, and was compared with a replay.
    """

    __slots__ = ("code", "seen")

    def __init__(self, code: Code | None) -> None:
        self.code = code
        self.seen = False


def known_gradients(
    payload: Any,
    saved: list[Tensor],
    cotangents: list[Tensor],
    asked: Any,
    pull_back: PullBack,
) -> list[Tensor | None] | None:
    """The gradients of a region's inputs, if its pullback is known, or may be from now on.

    Args:
        payload: of the node.
        saved: what the node has saved; emptied if there is an answer.
        cotangents: likewise.
        asked: what else decides which operations run: which results, which gradients.
        pull_back: an ordinary replay.

    Returns:
        What ``pull_back`` gives; ``None`` if that is to be called.
    """
    region = payload.region
    if not _is_usual(payload) or region.environment.restored() is not None:
        return None
    name = region.options.name
    given = [*saved, *[c.for_replay(name) for c in region.constants if not c.is_absent()]]
    kept = len(given)
    given += cotangents
    layouts = _layouts(given)
    if layouts is None:
        return None
    pullbacks, key = region.ledger.pullbacks, (asked, layouts)
    known = pullbacks.get(key)
    if known is not None and known.seen:
        saved.clear()
        cotangents.clear()
        with shown(region.options, replay=True), below_autograd():
            return known.code(given)  # type: ignore[no-any-return]
    if known is None:
        if len(pullbacks) >= _MANY or not _are_apart(given, kept):
            return None
        known, bits = _written_down(region, given, kept, pull_back, [*saved], [*cotangents])
    elif known.code is not None:
        bits = _bits_of(known.code, [*given])
    else:
        return None
    del given
    gradients = pull_back(saved, cotangents)
    known.seen = key in pullbacks
    if bits is None or bits != [*map(_bits, gradients)]:
        known.code, known.seen = None, False
    pullbacks[key] = known
    return gradients


def _written_down(
    region: Any, given: Sequence[Tensor], kept: int, pull_back: PullBack, *of: list[Tensor]
) -> tuple[Known, Any]:
    """A pullback that is not known yet, and the bits of its gradients."""
    environment = region.environment
    recorder = Recorder(given, kept, lambda: environment.restored() is None)
    known = Known(None)

    def code(_: Any) -> Sequence[Tensor | None]:
        with recorder:
            results = pull_back(*of)
        known.code = recorder.code(results)
        return results if known.code is not None else ()

    return known, _bits_of(code, [])


def _bits_of(code: Callable[[list[Tensor]], Sequence[Tensor | None]], given: list[Tensor]) -> Any:
    """Those of its results; ``None`` where it fails: the replay says what there is to say."""
    try:
        with below_autograd() if given else nullcontext():
            results = code(given)
        return [*map(_bits, results)]
    except Exception:
        return None


def _are_apart(given: Sequence[Tensor], kept: int) -> bool:
    """Whether no cotangent has memory of anything else.

    In code each is known by its memory, and what is one now may be two another time. That of inputs
    and constants is shared in all known runs, or in none.
    """
    keys = storage_keys(given)
    cotangents = {*keys[kept:]}
    return len(cotangents) == len(given) - kept and cotangents.isdisjoint(keys[:kept])


def _is_usual(payload: Any) -> bool:
    """Whether nothing is there that an ordinary pullback would take note of."""
    region = payload.region
    return not (
        payload.level
        or payload.n_kept
        or payload.duals is not None
        or payload.apart
        or region.connected
        or region.left
        or region.retained
        or region.overwritten
        or torch.is_grad_enabled()
        or _torch.function_mode_depth()
        or _torch.dispatch_mode_depth()
        or _torch.peek_interpreter_stack() is not None
        or _torch.forward_ad_level() >= 0
        or _torch_vmap.legacy_vmap_level()
        or torch.is_anomaly_enabled()
        or running.keeping
        or _torch.tracing()
    )


def _layouts(tensors: Sequence[Tensor]) -> Any:
    """Of plain tensors; ``None`` if there are others."""
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        return (
            *[(t.shape, t.stride(), t.dtype, t.device, t.is_conj(), t.is_neg()) for t in tensors],
        )
    except RuntimeError:  # of another layout
        return None


def _layout(t: Tensor) -> Any:
    return t.shape, t.stride(), t.dtype, t.device, t.is_conj(), t.is_neg()


def _bits(t: Tensor | None) -> Any:
    return None if t is None else checksum(t)
