"""Results that are pulled back one after the other, as nothing of their tapes is shared.

NOTE [one by one]
When torch's engine has run a node, what the node saved is gone, unless ``retain_graph`` is set. Two
results with tapes of their own need no ``retain_graph``: pulling back one leaves the other's tape
alone. As results of a region they share the region's node. So the node of such results keeps what
it saved until all of them have been pulled back. A node that saved nothing can always run again.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functx import _torch, _torch_nodes
from functx._remat._holders import base_of
from functx._remat._tapes import edges_of


def groups_of(results: Sequence[Tensor | None]) -> Sequence[int]:
    """For each of some results, the first one that it shares saved tensors of its tape with.

    Returns:
        Nothing where all of them are in one group.
    """
    owners: dict[Any, int] = {}
    groups = [*range(len(results))]
    for i, result in enumerate(results):
        seen: set[Any] = set()
        stack = edges_of(result)
        while stack:
            node, output = stack.pop()
            if (key := _key(node, output)) in seen:
                continue
            seen.add(key)
            if key in owners:
                first, other = sorted((groups[i], groups[owners[key]]))
                if first != other:
                    groups = [first if g == other else g for g in groups]
                continue  # who owns it owns what is below
            if _torch_nodes.saves(node):
                owners[key] = i
            stack += [edge for edge in node.next_functions if edge[0] is not None]
    return groups if any(groups) else ()


def _key(node: Any, output: int) -> Any:
    """A node; of a region's, the part that a result belongs to."""
    rest = getattr(getattr(node, "payload", None), "rest", None)
    return node if rest is None else (node, rest.group(output))


class Rest:
    """What a node holds for those of its results that have not been pulled back.

    Args:
        groups: of each result.
    """

    __slots__ = ("_groups", "_left", "_saved", "_versions")

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = groups
        self._left = {*groups}
        self._saved: Sequence[Tensor] | None = None
        self._versions: Sequence[int] = ()

    def group(self, result: int) -> int:
        """The group that a result is in."""
        return self._groups[result]

    def is_left(self) -> bool:
        """Whether some have not been pulled back."""
        return bool(self._left)

    def take(self, wanted: Sequence[int]) -> list[Tensor] | None:
        """What was saved, when torch has let go of it, unless it has gone for these results."""
        saved = self._saved
        if saved is None or not {self._groups[i] for i in wanted} <= self._left:
            return None
        if [*map(_version, saved)] != self._versions:
            raise RuntimeError("one of the inputs has been modified by an inplace operation")
        return [*saved]

    def pulled_back(self, wanted: Sequence[int], saved: Sequence[Tensor]) -> bool:
        """Some results are; answers whether others are left."""
        if not _torch_nodes.graph_is_kept():
            self._left -= {self._groups[i] for i in wanted}
        if not self._left:
            self._saved = None
        elif self._saved is None:
            self._saved, self._versions = [*saved], [*map(_version, saved)]
        return bool(self._left)


def let_go(payload: Any) -> None:
    """A node has run: where it can't again, it needs neither the function nor what that holds.

    An object that the function closes over may lead back to the node by tapes, which the garbage
    collector does not look into. Whoever else is to run the region again has it.
    """
    region = payload.region
    f: Any = getattr(region.body, "function", None)
    kind: Any = type(f)
    if kind is types.BuiltinFunctionType:
        return
    bare = kind is types.FunctionType and f.__closure__ is f.__defaults__ is None
    if bare and f.__kwdefaults__ is None and all(s is None for s in region.body.statics):
        return  # all that it is given are tensors, and it has nothing else of its own
    rest: Rest | None = payload.rest
    if payload.duals is not None or (rest is not None and rest.is_left()):
        return
    if _torch_nodes.graph_is_kept() or not (payload.n_kept or any(payload.needed)):
        return
    payload.region = payload.fn = emptied = object.__new__(region.__class__)
    emptied.__dict__.update(region.__dict__)
    emptied.__dict__.update(_NOTHING)
    payload.frames = ()


_NOTHING: dict[str, Any] = {
    **{"body": None, "environment": None, "originals": None},
    **{"constants": (), "entries": (), "inner_keeps": ()},
}


def _version(t: Tensor) -> int:
    return _torch.version(base_of(t))


def of_the_body(frames: Sequence[Any], results: list[int]) -> list[int]:
    """The results of a body that those of a level are made of, by the levels inside of it."""
    for frame in frames:
        results = frame.wanted_above(results)
    return results


def rest_of(results: Sequence[Sequence[int]], reached: Any) -> Rest | None:
    """Of a node; ``None`` if its results are to be pulled back together.

    Args:
        results: for each one, those of the body that it is made of.
        reached: what is known of the tapes of those; nothing about what left otherwise.
    """
    of = getattr(reached, "groups", ())
    if not of or any(i >= len(of) for those in results for i in those):
        return None
    groups = [{of[i] for i in those} for those in results]
    merged: list[set[int]] = []
    for group in groups:
        meeting = [m for m in merged if m & group]
        merged = [*(m for m in merged if not m & group), group.union(*meeting)]
    if len(merged) < 2:
        return None
    return Rest([next(n for n, m in enumerate(merged) if m & group) for group in groups])


def still_saved(ctx: Any, payload: Any, wanted: Sequence[int]) -> list[Tensor]:
    """What a node has saved, for some of its results.

    Raises:
        RuntimeError: torch's own, if it is gone, or was written to.
    """
    rest: Rest | None = payload.rest
    try:
        saved = [*ctx.saved_tensors]
    except RuntimeError as error:
        if "a second time" not in str(error):
            raise
        left = None if rest is None else rest.take(wanted)
        if not (any(payload.needed) or payload.n_kept or payload.duals):
            left = []  # it saved nothing
        if left is None:
            raise
        saved = left
    if rest is not None and rest.pulled_back(wanted, saved):
        payload.passing = ()
    return saved
