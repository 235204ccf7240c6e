"""Tensors that leave a region otherwise than by return: appended, stored, caught by a hook.

Such a tensor hangs on the throw-away tape of the first run, and gradients through it would be
lost. In plain autograd it becomes a further result of the region, so that it gets its gradient.
Under a transform it is a wrapper of a level that has ended, so it is an error that says where it
was made.

They are found without looking for them: when the tape is gone, what a body made is alive only if
somebody holds it.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._errors import RematError

Place = tuple[types.CodeType, int]
Birth = tuple[int, "weakref.ref[Tensor]", Place]
"""A number, the tensor, and where it was made."""

_INTERNAL = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


@functools.lru_cache(maxsize=4096)
def _internal(filename: str) -> bool:
    return filename.startswith(_INTERNAL)


def where() -> Place:
    """The line outside of torch and functx that is running, not looked up yet."""
    # Never this function's own frame: a frame that holds itself is garbage with all it refers to.
    frame: Any = getattr(inspect.currentframe(), "f_back", None)
    here = frame
    while _internal(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    if _internal(frame.f_code.co_filename):
        frame = here
    return frame.f_code, frame.f_lasti


def line_of(place: Place) -> int:
    """The number of the line of a place."""
    code, instruction = place
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end and line]
    return lines[0] if lines else code.co_firstlineno


def describe_place(place: Place) -> str:
    """``file:line`` of a place."""
    return f"{place[0].co_filename}:{line_of(place)}"


def find(births: Sequence[Birth], returned: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """What a body made (by its number) that is on some tape and alive, though not returned."""
    if not any(_alive(births, returned)):
        return {}
    for generation in (0, 1, 2):  # garbage in cycles is held by nobody; most of it is young
        gc.collect(generation)
        if not any(_alive(births, returned)):
            return {}
    # A tensor written in place was made more than once; its last number counts.
    last = {id(t): (number, t) for number, t in _alive(births, returned)}
    return dict(last.values())


def _alive(
    births: Sequence[Birth], returned: Sequence[Tensor | None]
) -> Iterator[tuple[int, Tensor]]:
    own = {id(t) for t in returned if t is not None}
    for number, ref, _ in births:
        t = ref()
        # Held by Python: beside `t` and the call's argument, and by a tensor of C++ (a cache of
        # autocast, a tape) if there is one, which has the Python object too.
        if (
            t is not None
            and id(t) not in own
            and sys.getrefcount(t) > (3 if _torch.use_count(t) > 1 else 2)
            and (number < 0 or _taped(t))
        ):
            yield number, t


def _taped(t: Tensor) -> bool:
    """Whether a gradient could flow to ``t`` through what a region computed it from."""
    while t.grad_fn is None:
        if not _torch.is_wrapped(t):
            return False
        t = _torch.get_unwrapped(t)
    return True


def refuse(name: str, births: Sequence[Birth], escaped: dict[int, Tensor]) -> None:
    """Raise for tensors that can't be made results."""
    made = {number: describe_place(place) for number, _, place in births}
    places = [
        f"a tensor of shape {tuple(t.shape)}, "
        + (f"made at {made[number]}" if number >= 0 else "an input, or written into one")
        for number, t in escaped.items()
    ]
    raise RematError(
        f"remat: the region {name!r} leaves behind, otherwise than by return, "
        f"{'; '.join(places)}. It is still held (in a list, an attribute, by a hook) but its "
        "gradient would be lost. Return it from the region, or store its .detach()."
    )
