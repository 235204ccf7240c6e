"""What leaves a region otherwise than by return, and gradients that could be lost (rule 4)."""

from __future__ import annotations

import gc

from torch import Tensor

from functx import _torch
from functx._errors import RematError
from functx._remat import departures
from functx._remat.captures import Captures, tape_of


def further_results(captures: Captures) -> list[tuple[int, Tensor]]:
    """At the base level, what requires grad and is alive: further results, off the tape.

    Models record hidden states and router logits through hooks; these keep working.

    Returns:
        Their numbers, and they themselves.
    """
    leavers = captures.leavers.values()
    found = {}
    for ref, number, _ in leavers:
        t = ref()
        if t is None or not t.requires_grad or t.grad_fn is None or t._is_view():
            continue
        if _torch.level_of(t) == -1:
            t.detach_()  # what lived on its tape alone is gone with that
            found[number] = ref
    t = None
    for ref, _, _ in leavers:
        t = ref()
        if t is not None and t.requires_grad:
            why = "a leaf" if t.grad_fn is None else "a view"
            raise _left(captures, t, f"It is {why}, which can't become a further result: ")
    return [(number, t) for number, ref in found.items() if (t := ref()) is not None]


def check_nothing_left(captures: Captures, results: list[Tensor]) -> None:
    """Inside of transforms, nothing that requires grad may be alive."""
    returned = {id(t) for t in results}
    refs = [ref for ref, _, _ in captures.leavers.values()]
    if any(_left_alive(ref, returned) for ref in refs):
        gc.collect()  # it may be a cycle that holds it
        for ref in refs:
            if _left_alive(ref, returned):
                raise _left(captures, ref(), "")


def _left_alive(ref: object, returned: set[int]) -> bool:
    t = ref()  # type: ignore[operator]
    return t is not None and t.requires_grad and id(t) not in returned


def _left(captures: Captures, t: Tensor | None, why: str) -> RematError:
    assert t is not None
    made_by = [
        departures.name_of(call.func) for ref, _, call in captures.leavers.values() if ref() is t
    ]
    return RematError(
        f"remat: a tensor of shape {tuple(t.shape)} that {made_by[0]} made in "
        f"{captures.region.title} leaves it otherwise than by return, and its gradient would be "
        f"lost. {why}return it, or detach() what you keep."
    )


def leaves_unseen(captures: Captures, results: list[Tensor]) -> list[Tensor]:
    """Leaves on the tape that no mode has seen: they become inputs, asked for by themselves.

    Fused layers call ``Function.apply(x, self.weight)``, which no function mode is shown.

    Raises:
        RematError: the tape leads to something else that was made outside.
    """
    found: dict[int, Tensor] = {}
    inputs = captures.inputs
    for result in results:
        for node in tape_of(result, captures.first_node):
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                if inputs.leaves.get(id(leaf)) is leaf or captures.number_of(leaf) is not None:
                    continue
                if _torch.level_of(leaf) <= 0:
                    found[id(leaf)] = leaf
                    continue
            elif node._sequence_nr() >= captures.first_node:
                continue
            raise RematError(
                f"remat: {captures.region.title} gives a captured tensor to an autograd.Function "
                "or other code that can't be seen, or calls a pullback made outside; the gradient "
                "of what that reads would be lost. Pass the tensor as an argument, or make the "
                "pullback inside."
            )
    return [*found.values()]
