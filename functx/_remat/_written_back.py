"""What a body has written to becomes a result of its region. ``NOTE [follows]`` in `_follows`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_nodes
from functx._remat._follows import Follows, made_by
from functx._remat._in_turn import turn_of
from functx._remat._partial import Looker, Watcher
from functx._torch import sequence_number
from functx._torch_memory import not_counted


def written_back(
    owners: Sequence[Tensor],
    places: Sequence[Any],
    results: Sequence[Tensor | None],
    write_back: Callable[[Tensor, Tensor], None],
) -> None:
    """Write back what a body has written to; what is computed from that follows on the tape.

    What was written to has a node of its own, above the region's. So no pass would come by the
    region that asks for the gradient of that alone; see ``NOTE [part of a gradient]``.

    Args:
        owners: what was written to.
        places: of the results that these have become, if they have.
        results: all of the region's.
        write_back: writes one.
    """
    values = [results[place] if isinstance(place, int) else None for place in places]
    pairs = [(t, v) for t, v in zip(owners, values) if v is not None and v is not t]
    found = [(_watcher(value), owner, value) for owner, value in pairs]
    if any(watcher for watcher, _, _ in found):
        became = {id(value) for _, _, value in found}
        found += [
            (w, r, r)
            for r in results
            if r is not None and id(r) not in became and (w := _watcher(r))
        ]
        # First those from which others are computed, as these are to follow from them.
        found.sort(key=lambda one: 0 if one[0] is None else -len(one[0].others))
    for watcher, owner, value in found:
        if owner is not value:
            write_back(owner, value)
        if watcher is not None:
            _follow(watcher, owner, results)
    if any(watcher for watcher, _, _ in found):
        _in_order([r for r in results if r is not None and all(r is not v for v in values)])


def _watcher(t: Tensor) -> Watcher | None:
    hooks = (_torch_nodes.hooks_of(t) or {}).values()
    return next((hook for hook in hooks if isinstance(hook, Watcher)), None)


def _follow(watcher: Watcher, t: Tensor, results: Sequence[Tensor | None]) -> None:
    """Make results that are computed from ``t`` follow from it."""
    with _torch.without_modes():
        those = [t, _torch.view_base(t)]
        others = [one for one in those if one is not None and one.grad_fn is not None]
        for one in others:
            one.register_hook(_torch_nodes.EngineHook())
        look = functools.partial(watcher.look, [*map(Looker, others)])
        for place in watcher.others:
            y = results[place]
            if place != watcher.place and y is not None and y.grad_fn is not None:
                _put_above(y, look, others)


def _in_order(results: Sequence[Tensor]) -> None:
    """Hooks on results are called by when these were made: ``NOTE [order of hooks]``.

    So each has a node, the others too, and these are numbered as those of the body were.
    """
    turns = []
    with _torch.without_modes():
        for r in results:
            of, n = made_by((r.grad_fn, r.output_nr))
            if (payload := getattr(of, "payload", None)) is not None:
                if of is r.grad_fn:
                    _put_above(r, _nobody, [])
                turns.append((turn_of(payload, n), sequence_number(r.grad_fn), r.grad_fn))
    numbers = sorted(number for _, number, _ in turns)
    for number, (_, _, node) in zip(numbers, sorted(turns, key=lambda one: one[:2])):
        _torch_nodes.number(node, number)


def _nobody(nodes: Any) -> None:
    """Looks at nothing."""


def _put_above(t: Tensor, look: Callable[[Any], None], others: Sequence[Tensor]) -> None:
    hooks = _torch_nodes.hooks_of(t)
    allowed = _torch.get_single_level_function_allowed()
    _torch.set_single_level_function_allowed(True)
    try:
        with torch.enable_grad(), not_counted(t):
            # Past the `apply` that regions observe: it is no operation of the body.
            super(_torch.SingleLevelFunction, Follows).apply(look, t, *others)  # type: ignore[misc]
    finally:
        _torch.set_single_level_function_allowed(allowed)
    for key, hook in [*(hooks or {}).items()]:
        if isinstance(hook, _torch_nodes.EngineHook) and hook.goes_along:
            del hooks[key]
            t.register_hook(hook)
            hook.is_on(t)
