"""What is one tensor in a forward, and several in a replay.

NOTE [aliases]
What no tape knows is handed to a body as it is, so a region inside that is given such a tensor, and
closes over it as well, knows it for one. In a replay another tensor stands for the one it is given,
and in a replay of a region inside, which ran there, a third one. So trackers have, by the id of
each, all *names* of what was one tensor in the forward, the one that it was then first. What runs
inside shares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

Aliases = Mapping[int, Sequence[Tensor]]

PassedOn = tuple[int | None, Sequence["weakref.ref[Tensor]"]]
"""Where a body was handed a tensor as it is, if it was, and the names of that so far."""


def passed_on(
    externals: Iterable[tuple[Tensor, Tensor]], aliases: Aliases, instead: Mapping[int, Tensor]
) -> list[PassedOn]:
    """What a replay is to know by several names, of a run that may be in a replay itself.

    Args:
        externals: what the body read that it did not make, each with what it saw instead.
        aliases: what that run knew by several names.
        instead: what replays close over instead of some tensors, by id.
    """
    found: list[PassedOn] = []
    for i, (t, seen) in enumerate(externals):
        names = aliases.get(id(t), (t,))
        as_it_is = any(seen is name for name in names)
        if as_it_is or len(names) > 1:
            more = (instead[id(name)] for name in names if id(name) in instead)
            found.append((i if as_it_is else None, tuple(map(weakref.ref, (*names, *more)))))
    return found


def known_again(those: Sequence[PassedOn], externals: Sequence[Tensor]) -> Aliases:
    """The names in a replay.

    Args:
        those: what the forward passed on.
        externals: what the replay hands out, by position.
    """
    aliases: dict[int, Sequence[Tensor]] = {}
    for position, so_far in those:
        names = [t for name in so_far if (t := name()) is not None]
        if position is not None and all(t is not externals[position] for t in names):
            names.append(externals[position])
        if len(names) > 1:
            aliases.update(dict.fromkeys(map(id, names), names))
    return aliases
