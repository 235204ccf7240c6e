"""Tensors that leave a region otherwise than by return: appended, stored, caught by a hook.

Such a tensor hangs on the throw-away tape of the first run, and gradients through it would be
lost. It becomes a further result of the region (`_leaving`), or is an error that says where it was
made.

They are found without looking for them: when the tape is gone, what a body made is alive only if
somebody holds it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

from torch import Tensor

from functx import _torch, _torch_modules
from functx._errors import RematError
from functx._places import Place, describe_place
from functx._remat._tapes import held_by_python
from functx._torch import is_grad_wrapper
from functx._torch_edges import requires_grad_anywhere

Birth = tuple[int, "weakref.ref[Tensor]", Place]
"""A number, the tensor, and where it was made."""


# The code (the class of what is no function) of bodies of which something was held.
_holding: weakref.WeakSet[Any] = weakref.WeakSet()


def find(
    births: Sequence[Birth],
    returned: Sequence[Tensor | None],
    duals: Set[int] = frozenset(),
    f: Any = None,
    stored: Set[int] = frozenset(),
) -> dict[int, Tensor]:
    """What a body made (by its number) that a derivative flows through and that is alive.

    Args:
        births: what the body made.
        returned: what it returned of that.
        duals: numbers of tensors that had a tangent.
        f: the body, if what is found may be in cycles and held by nobody, where that of a run
            before was held: to look takes as long as thousands of operations.
        stored: ids of tensors that were found where the body stored them, which is in no cycle.
    """
    if not any(_alive(births, returned, duals)):
        return {}
    known = all(id(t) in stored for _, t in _alive(births, returned, duals))
    code = getattr(getattr(f, "__func__", f), "__code__", type(f))
    if not known and (f is None or code not in _holding):
        for generation in (0, 1, 2):  # garbage in cycles is held by nobody; most of it is young
            gc.collect(generation)
            if not any(_alive(births, returned, duals)):
                return {}
        _torch_modules.forget_lent_weights()
    # A tensor written in place was made more than once; its last number counts.
    last = {id(t): (number, t) for number, t in _alive(births, returned, duals)}
    if f is not None and last and not known:
        _holding.add(code)
    return dict(last.values())


def beyond_the_tape(
    births: Sequence[Birth], found: dict[int, Tensor], returned: Sequence[Tensor | None]
) -> dict[int, Tensor]:
    """Which of those found are held by others than the tape; all are taken off it.

    A hook on what is saved may keep the very tensor (``save_on_cpu`` does, on the CPU). If it is a
    result of the node that saves it, it holds what holds it, till the node is pulled back.

    Args:
        births: what the body made.
        found: emptied.
        returned: what the body returned.
    """
    others = {*map(id, returned)}
    for _, ref, _ in births:
        t = ref()
        if t is not None and t.grad_fn is not None and id(t) not in others and _torch.detachable(t):
            _torch.detach_in_place(t)
    t = None
    numbers = {*found}
    found.clear()
    return {number: cell[0] for number, cell in _held(births, returned) if number in numbers}


def any_held(births: Sequence[Birth], returned: Sequence[Tensor | None]) -> bool:
    """Whether anything that a body made is held, but what it returned; on a tape or not."""
    return any(number >= 0 or _taped(cell[0], True) for number, cell in _held(births, returned))


def with_tangents(
    births: Sequence[Birth],
    returned: Sequence[Tensor | None],
    tangent_of: Callable[[Tensor], Tensor | None],
    level: int,
) -> set[int]:
    """Numbers of tensors that are held, and have a tangent at ``level``, which now still lives."""
    found = set()
    # At a level that ends, what is returned is another tensor; and this may be held as well.
    for number, cell in _held(births, () if level else returned):
        t = _torch.unwrap_if_dead(cell[0])
        while _torch.is_wrapped(t) and _torch.wrapper_level(t) > level:
            t = _torch.unwrap_if_dead(_torch.get_unwrapped(t))
        if not t.is_inference() and tangent_of(t) is not None:
            found.add(number)
    return found


def constants(births: Sequence[Birth], but: Iterable[Tensor]) -> list[Tensor]:
    """What a body made, somebody holds, and no derivative flows through, in wrappers of levels.

    When the levels have ended, torch lets nobody write to it inside of a transform; and it looks
    for what is inside of one such wrapper, and not further.
    """
    found: dict[int, Tensor] = {}
    for _, cell in _held(births, but):
        if is_grad_wrapper(cell[0]):
            found[id(cell[0])] = cell[0]
    return [*found.values()]


def _alive(
    births: Sequence[Birth], returned: Sequence[Tensor | None], duals: Set[int]
) -> Iterator[tuple[int, Tensor]]:
    for number, cell in _held(births, returned):
        if number in duals or _taped(cell[0], number < 0):
            yield number, cell[0]


def _held(
    births: Sequence[Birth], but: Iterable[Tensor | None]
) -> Iterator[tuple[int, list[Tensor]]]:
    """What a body made and Python holds, but for some: the number, and a list of the tensor."""
    others = {*map(id, but)}
    for number, ref, _ in births:
        if ref() is None:  # most of them
            continue
        cell: list[Any] = [ref()]  # in no variable, see `held_by_python`
        if cell[0] is not None and id(cell[0]) not in others and held_by_python(cell) > 0:
            yield number, cell


def _taped(t: Tensor, given: bool) -> bool:
    """Whether a gradient could flow to ``t``, by what a region computed it from or was given."""
    if given:
        return requires_grad_anywhere(t)
    while t.grad_fn is None:
        if not _torch.is_wrapped(t):
            return t.requires_grad  # a leaf of the region's own, which would get a ``grad``
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
    views = any(_torch.view_base(t) is not None for t in escaped.values())
    raise RematError(
        f"remat: the region {name!r} leaves behind, otherwise than by return, "
        f"{'; '.join(places)}. It is still held (in a list, an attribute, by a hook) but its "
        "derivative would be lost. Return it from the region, or store "
        + ("a .clone() of it, as it is a view of memory that others have, or " if views else "")
        + "its .detach() (which has a tangent, under jvp)."
    )
