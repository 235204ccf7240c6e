"""What a body asks of a tensor about its tape: ``grad_fn``, ``is_leaf``, ``_version`` and the like.

NOTE [answers]
A body works on stand-ins, with which a tape of their own begins. So what it asks of a tensor that
it did not make is asked of that tensor, as it is outside. The answer is written down among the
operations, and a replay, in which other tensors stand there, is told what the forward was told. So
it is with what the body has made (how often it was written to), but for nodes and hooks: those a
replay has of its own. A node from outside is held as the edges of the region's node hold it.

Only the user's code is answered. What torch and functx ask is about what is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from functx._errors import RematError
from functx._places import is_internal
from functx._remat._entry import Entry
from functx._remat._gradients import RETAIN_GRAD
from functx._remat._hung_on_given import HANGING, LEFT
from functx._remat._of_a_run import Knowing
from functx._remat._taken_off import Hanging
from functx._torch_modules import frame_above
from functx._torch_nodes import ABOUT_ITS_TAPE, BASE, GRAD_FN, HOOK_DICTS, nowhere

_MODE = "RegionMode.__torch_function__"
EDGES = torch.autograd.graph.__file__  # where torch reads what somebody else wants
_FEW = 8  # frames of a mode of the user's, between what it is shown and what it calls


class Answering(Hanging, Knowing):
    """The part of a tracker that answers."""

    def about_gradients(self, func: Any, args: Any) -> Any:
        """What `_gradients` is about: what it gives, or `LEFT` to be done."""
        if func in HANGING:
            return self.hangs(func, args)
        if func in ABOUT_ITS_TAPE:
            return self.asked(func, args[0])
        return None if func == RETAIN_GRAD else LEFT  # a replay's own gradients concern nobody

    def asked(self, func: Any, t: Tensor) -> Any:
        """Somebody asks; the answer, or `LEFT`."""
        return LEFT

    def answer(self, func: Any, t: Tensor) -> Any:
        """The user's code asks, here or in a region inside."""
        return func(t)


def who_asks() -> str:
    """The file of the code that reads what the mode of regions is being shown."""
    frame: Any = frame_above(2)
    while frame.f_code.co_qualname != _MODE:
        frame = frame.f_back
    frame = above = frame.f_back
    for _ in range(_FEW):  # a mode of the user's is shown what anybody reads
        if above is None or is_internal[above.f_code.co_filename]:
            break
        if above.f_code.co_name == "__torch_function__":
            frame = above.f_back
        above = above.f_back
    return "" if frame is None else frame.f_code.co_filename


def by_the_user() -> bool:
    """Whether that is the user's code."""
    return not is_internal[who_asks()]


def kept_answer(func: Any, answer: Any, outside: bool) -> tuple[Any, Callable[[], Any] | None]:
    """What is written down of an answer, and what a replay asks for it if that is not all.

    Args:
        func: what was asked.
        answer: to it.
        outside: whether it is about what is outside of the region.
    """
    if func not in (GRAD_FN, BASE, *HOOK_DICTS):
        return answer, None
    if answer is None or not outside or func == BASE:
        return answer is None, None
    if func == GRAD_FN:
        return False, lambda: answer
    ref = weakref.ref(answer)  # a hook may hold a result
    return False, lambda: nowhere() if (found := ref()) is None else found


def told_again(func: Any, t: Tensor, entry: Entry, externals: Sequence[Tensor]) -> Any:
    """What a replay is told, which the forward has written down."""
    if entry.told is not None:
        return entry.told()
    (answer,) = entry.scalars
    if func not in (GRAD_FN, BASE, *HOOK_DICTS):
        return answer
    if answer:
        return None
    return externals[entry.sources[0]] if entry.sources and entry.sources[0] >= 0 else func(t)


def refuse_otherwise(func: Any, t: Tensor, inside: Any, outside: Any, name: str) -> None:
    """Raise where what stands for ``t`` in the region ``name`` answers otherwise than ``t``."""
    if inside == outside or (func == BASE and not (inside is None or outside is None)):
        return
    attribute = getattr(getattr(func, "__self__", func), "__name__", str(func))
    raise RematError(
        f"remat: in the region {name!r}, something asks for .{attribute} of a tensor of shape "
        f"{tuple(t.shape)} that the region did not make: in the region it is {inside}, outside it "
        f"is {outside}, and a replay can't tell. Ask outside of the region and pass the answer as "
        "an argument."
    )


def refuse_edges(given: Any, originals: Mapping[Any, Tensor], name: str) -> None:
    """Raise where `torch.autograd.grad` is given an edge that stand-ins do not have.

    Args:
        given: its outputs and inputs.
        originals: the tensors that the region did not make, by node and number.
        name: of the region.
    """
    for one in given:
        for edge in one if isinstance(one, (list, tuple)) else ():
            if isinstance(edge, GradientEdge) and edge[:2] in originals:
                t = originals[edge[:2]]
                raise RematError(
                    f"remat: the region {name!r} gives torch.autograd.grad the grad_fn of a tensor "
                    f"of shape {tuple(t.shape)} that it did not make, from which nothing in the "
                    "region is computed, but from a stand-in. Give it the tensor, or "
                    "torch.autograd.graph.get_gradient_edge of it."
                )
