"""What leaves a region otherwise than by return, and gradients that could be lost (rule 4)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torch import Tensor

from functx import _torch
from functx._errors import RematError
from functx._remat import departures, levels
from functx._remat.calls import DATA
from functx._remat.captures import Captures, tape_of


def further_results(captures: Captures) -> list[tuple[int, Tensor]]:
    """What is alive and requires grad at the base level, off the tape, as further results."""
    found = {}
    known = captures.known.values()
    if not captures.made and not any(ref() is not None for ref, n in known if n > 0):
        return []
    for number, t in _alive(captures):
        if t.grad_fn is not None and not t._is_view() and _torch.level_of(t) == -1:
            t.detach_()  # what lived on its tape alone is gone with that
            found[number] = captures.known[id(t)][0]
        del t
    for _, t in _alive(captures):
        why = "a leaf" if t.grad_fn is None else "a view"
        raise _left(captures, t, f"It is {why}, which can't become a further result. ")
    return [(number, left) for number, ref in found.items() if (left := ref()) is not None]


def check_threads(captures: Captures) -> None:
    """Nothing foreign may lead to a stand-in: what a thread of the region's own makes does."""
    standins = captures.inputs.leaves
    if all(leaf._use_count() == 1 for leaf in standins.values()):  # type: ignore[attr-defined]
        return  # no tape is left
    for t in captures.held:
        for node in tape_of(t, 0):
            if id(getattr(node, "variable", None)) in standins:
                raise RematError(
                    f"remat: {captures.region.title} computes a tensor of shape {tuple(t.shape)} "
                    "in a thread of its own. Start the thread outside, and make regions in it."
                )


def check_nothing_left(captures: Captures, results: list[Tensor]) -> None:
    """Inside of transforms, nothing that requires grad may be alive."""
    returned = {id(t) for t in results}
    if any(id(t) not in returned for _, t in _alive(captures)):
        gc.collect()  # it may be a cycle that holds it
        for _, t in _alive(captures):
            if id(t) not in returned:
                raise _left(captures, t, "")


def _alive(captures: Captures) -> Iterator[tuple[int, Tensor]]:
    """What the region has made that is alive and requires grad.

    A transform inside makes leaves of what it is given; these are not the program's.
    """
    for ref, number in [*captures.known.values()]:
        t = ref() if number > 0 or -1 - number in captures.made else None
        if t is not None and levels.is_tracked(t):
            a_leaf = t.requires_grad and t.grad_fn is None
            if not a_leaf or number < 0 or number in captures.leaves:
                yield number, t
        t = None


def _left(captures: Captures, t: Tensor, why: str) -> RematError:
    number = captures.number_of(t)
    made_by = [
        departures.name_of(call.func)
        for call in captures.calls
        if number in [result[0] for result in call.results] or number in call.further.values()
    ] or [DATA]
    return RematError(
        f"remat: a tensor of shape {tuple(t.shape)} that {made_by[0]} made in "
        f"{captures.region.title} leaves it otherwise than by return, and its gradient would be "
        f"lost. {why}Return it, or detach() what you keep."
    )


def leaves_unseen(captures: Captures, results: list[Tensor]) -> list[Tensor]:
    """Leaves on the tape that no mode has seen: they become inputs, asked for by themselves.

    Fused layers call ``Function.apply(x, self.weight)``, which no function mode is shown.

    Raises:
        RematError: the tape leads to something else that was made outside.
    """
    found: dict[int, Tensor] = {}
    standins = captures.inputs.leaves
    for result in results:
        for node in tape_of(result, captures.first_node):
            leaf = getattr(node, "variable", None)
            if leaf is None:
                if node._sequence_nr() >= captures.first_node:
                    continue
            elif standins.get(id(leaf)) is leaf or captures.number_of(leaf) is not None:
                continue
            elif _torch.level_of(leaf) <= 0:
                found[id(leaf)] = leaf
                continue
            raise RematError(
                f"remat: {captures.region.title} gives a captured tensor to an autograd.Function "
                "or other code that can't be seen, or calls a pullback made outside; a gradient "
                "would be lost. Pass the tensor as an argument, or make the pullback inside."
            )
    return [*found.values()]
