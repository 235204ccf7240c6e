"""Tensors that left a region otherwise than by return become further results of it.

NOTE [leaving]
At the base level such a tensor is detached and put behind the region's node, as the results are. A
view can't be detached, and under transforms it is a wrapper of levels that have ended. So what it
wraps goes up through the real levels like every result, and at the end the tensor that somebody
holds is made to be what has come out there. It has its derivatives at all levels, whoever holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any
from weakref import ref

from torch import Tensor

from functx import _torch, _torch_nodes
from functx._errors import RematError
from functx._remat._escape import Birth, find
from functx._remat._prune import is_unread
from functx._remat._tapes import held_by_python, leaves_below, nodes_of
from functx._remat._unseen import refuse_unseen


def escaped(
    births: Sequence[Birth],
    returned: Sequence[Tensor | None],
    duals: Set[int],
    frames: Sequence[Any],
    f: Any,
    stored: Set[int],
) -> dict[int, Tensor]:
    """What left a region with frames: `_escape.find`, looking for cycles at the latest now."""
    found = find(births, returned, duals, f, stored)
    if f is not None and not all(can_leave(t, n, frames) for n, t in found.items()):
        found.clear()
        found = find(births, returned, duals)
    return found


def can_leave(t: Tensor, number: int, frames: Sequence[Any]) -> bool:
    """Whether what a region made, by its number, can become a further result of it."""
    # A stand-in that was written to; or a leaf, which can't be a result and a leaf.
    if bool(nodes_of([t])) == (number < 0):
        return False
    if len(frames) == 1 and _torch.detachable(t):
        return True
    if not _torch_nodes.can_become(t) or any(number in frame.duals for frame in frames):
        return False
    known = False  # what is inside of a view is one
    for frame in reversed(frames[1:]):
        value = frame.inside_of(t)
        if value is None or not (known or _alone(t)):
            return False
        known = known or not _torch.detachable(t)
        t = value
    return (known or _alone(t)) and not _torch.is_wrapped(t)


def _alone(t: Tensor) -> bool:
    """Whether ``t`` is no view, or one of what a region computed and nobody else holds."""
    base: list[Any] = [_torch.view_base(t)]  # in no variable, see `held_by_python`
    return base[0] is None or (
        held_by_python(base) <= 0
        and _torch.use_count(base[0]) <= 2  # the view, and Python, which looks
        and (base[0].grad_fn is not None or _only_here(base[0]))
    )


def _only_here(base: Tensor) -> bool:
    """Whether the memory of ``base`` is that of one view of it alone, and not an input's."""
    if _torch.is_wrapped(base):
        return False
    # The two, and this look at it.
    return int(_torch.storage_use_count(_torch.storage_key(base))) <= 3


def values_at_base(left: Iterable[Tensor], frames: Sequence[Any]) -> list[Tensor]:
    """What left a region, as values of the base level: a result more at each level."""
    values = [*left]
    for frame in reversed(frames[1:]):
        values = [frame.leave(t) for t in values]
    return values


def put_in_place(
    left: list[Tensor],
    results: list[Tensor | None],
    name: str,
    taped: Mapping[int, dict[int, Any]],
) -> None:
    """Make what somebody holds be what has come out of a region; the lists are emptied.

    The last first: the tape of what was made later holds what was made before.

    Args:
        left: what somebody holds.
        results: of the region, of which these are the last.
        name: of the region.
        taped: its results at each level, by place, weakly.
    """
    while left:
        t, new = left.pop(), results.pop()
        for known in taped.values() if new is not t else ():
            known.update({place: ref(t) for place, one in known.items() if one() is new})
        if new is not t and not (new is not None and _torch_nodes.become(t, new)):
            raise RematError(
                f"remat: the region {name!r} leaves behind, otherwise than by return, a tensor of "
                f"shape {tuple(t.shape)} that something beside Python holds as well (a tape). "
                "Return it from the region, or store its .detach()."
            )


def settle(constants: Iterable[Tensor]) -> None:
    """Make what is no result and has no derivative what it is without the levels that ended.

    Of those that only record, it is a wrapper again, or torch would take it for a captured tensor,
    which nobody may write to.
    """
    levels: list[int] = []
    for interpreter in reversed(_torch.interpreters()):
        if interpreter.key() not in (_torch.TransformType.Grad, _torch.TransformType.Jvp):
            break
        levels.insert(0, interpreter.level())
    for t in constants:
        if _torch_nodes.can_become(t):
            value = _torch.unwrap_if_dead(t)
            for level in levels:
                value = _torch.wrap_for_grad(value, level)
            _torch_nodes.become(t, value if levels else value.detach())


def leaves_of(
    left: Iterable[Tensor],
    births: Sequence[Birth],
    frames: Sequence[Any],
    reached: Set[int],
    name: str,
) -> set[int]:
    """Ids of the leaves that the tapes of what left a region end in, which must all be known.

    Args:
        left: what left it.
        births: what the body made.
        frames: of the region.
        reached: ids of leaves that the tapes of its results end in: what it writes to follows from
            one that is of no frame, and is a result.
        name: of the region.
    """
    known = {leaf for frame in frames for leaf in frame.leaves} | reached
    left = [*left]
    found = leaves_below(*nodes_of(left))
    for t in found:
        if not (id(t) in known or is_unread(t) or any(ref() is t for _, ref, _ in births)):
            refuse_unseen(name, t)
    # What stands for an input has no tape: it is a leaf itself.
    return {*map(id, found), *known.intersection(id(v) for t in left for v in _values_in(t))}


def _values_in(t: Tensor) -> Iterator[Tensor]:
    """A tensor, and what its wrappers are around."""
    yield t
    while _torch.is_wrapped(t):
        yield (t := _torch.get_unwrapped(t))
