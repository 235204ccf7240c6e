"""Hooks that a body hangs on what it returns, and the caller's on the same result.

NOTE [hooks inside and outside]
Without remat both hang on one tensor and are called as they were hung: those of the body first, and
``.grad`` of the result and a gradient with respect to it are what they made of it. With remat those
of the body are called by a replay, when the node's have been. That is the same only where nobody
changes what the others see. So the result has a hook of the engine's, before any of the user's,
that notes in each backward pass whether somebody looks at it. If so, it is an error that the
caller's hooks have changed the gradient, or that those of the body do, in the replay. Where there
is no replay (the gradient of the result is all that is asked for) those of the body would not be
called.

A body's hooks are hung again in each replay. Which of them are off by then, `_taken_off` knows.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from functx import _torch, _torch_nodes
from functx._errors import RematError
from functx._remat._follows import made_by
from functx._remat._one_by_one import of_the_body
from functx._remat._partial import Looker


class Inside:
    """The hooks of a body, or of a region inside of it, on one of its results.

    Attributes:
        looks: what notes who looks at the result, one a level.
        around: how somebody looks at it outside of a region around.
    """

    around: str | None = None

    def __init__(self) -> None:
        self.looks: Sequence[_Look] = ()

    def look(self, t: Tensor, name: str) -> None:
        """A replay is about to be pulled back, which has hung its own on its result ``t``."""
        how, changed = self.around, False
        for one in self.looks:
            how = one.how or how
            changed = changed or (one.how is not None and one.changed())
        inner = inside_of(t)
        keys = _keys_of(t)
        if changed and (inner or keys):
            raise refused(
                name, tuple(t.shape), "one outside of it changes the gradient that it is given"
            )
        for its in inner:
            its.around = how
        if not keys:
            return
        if how is not None:
            hooks = _torch_nodes.hooks_of(t)
            for key in keys:
                dict.__setitem__(hooks, key, _changes_nothing(hooks[key], t, name, how))


def _keys_of(t: Tensor) -> list[int]:
    hooks = _torch_nodes.hooks_of(t)
    return [] if hooks is None else _torch_nodes.users_keys(hooks)


def _changes_nothing(hook: Any, t: Tensor, name: str, how: str) -> Any:
    error = refused(
        name, tuple(t.shape), f"that changes its gradient, and outside of the region {how}"
    )

    @functools.wraps(hook)
    def called(gradient: Any) -> Any:
        if hook(gradient) is not None:
            raise error

    return called


def refused(name: str, shape: tuple[int, ...], why: str) -> RematError:
    """The error for hooks inside and outside of the region ``name``."""
    return RematError(
        f"remat: the region {name!r} hangs a hook on a result of shape {shape}, and "
        f"{why}. Without remat the hook of the region is called first; here a replay calls it, "
        "when those outside have been called. Hang all of them inside of the region, or all "
        "outside, or return a .clone() of what has the hook."
    )


def inside_of(t: Tensor) -> list[Inside]:
    """Of a result of a region: the hooks that its body hung on it."""
    node, n = made_by((t.grad_fn, t.output_nr))
    payload = getattr(node, "payload", None)
    if payload is None or not payload.region.inside:
        return []
    return _those(payload.frames, payload.places[n], payload.region.inside)


def _those(frames: Sequence[Any], place: int, inside: Mapping[int, Inside]) -> list[Inside]:
    return [inside[p] for p in of_the_body(frames, [place]) if p in inside]


def hung_inside(results: Sequence[Tensor | None], first: int = 0) -> dict[int, Inside]:
    """What hangs on the results of a body, while they are on its tape.

    Args:
        results: of the body.
        first: the place of the first.
    """
    found = {}
    for place, t in enumerate(results, first):
        if t is not None and (_torch_nodes.has_hooks(t) or inside_of(t)):
            found[place] = Inside()
    return found


def watch_inside(frame: Any, results: Sequence[Tensor | None]) -> None:
    """Note who looks at results on which the body has hung hooks.

    Args:
        frame: a level of the region.
        results: as that level has them.
    """
    region = frame.region
    inside: Mapping[int, Inside] = region.reached.inside
    region.inside = inside
    frames = frame.levels_inside()
    with _torch.without_modes():
        for place, t in enumerate(results):
            if t is not None and t.grad_fn is not None and (those := _those(frames, place, inside)):
                t.register_hook(mark := _Mark())
                look = _Look(t, region.options.name)
                mark.look = look
                for one in those:
                    one.looks = [*one.looks, look]


def look_inside(inside: Mapping[int, Inside], results: Sequence[Tensor | None], name: str) -> None:
    """A replay has hung its hooks on the results of a body."""
    with _torch.without_modes():
        for place, one in inside.items():
            t = results[place]
            if t is not None:
                one.look(t, name)


class _Mark(_torch_nodes.EngineHook):
    """The first hook of a result: so there is a dict, to which others are added."""

    goes_along = True
    look: _Look

    def is_on(self, t: Tensor) -> None:
        self.look.is_on(t)

    def __call__(self, cotangent: Tensor | None) -> None:
        if cotangent is not None:
            self.look.note()


class OfADual(Looker, _torch_nodes.EngineHook):
    """The first hook of a dual that a region with such hooks gave, or of its tangent.

    It is no result of the node, but an alias of one: what hooks on it do is not known.
    """

    def __init__(self, t: Tensor, name: str) -> None:
        super().__init__(t)
        self._name = name

    def __call__(self, cotangent: Tensor | None) -> None:
        if cotangent is not None and (how := self.looks()) is not None:
            raise refused(
                self._name, self._shape, f"outside of it, where that has a tangent, {how}"
            )


class _Look(Looker):
    """Who looks at a result in the backward pass under way."""

    how: str | None = None

    def __init__(self, t: Tensor, name: str) -> None:
        super().__init__(t)
        self._name = name

    def is_on(self, t: Tensor) -> None:
        """Its node is another one, too."""
        super().is_on(t)
        self._node = weakref.ref(t.grad_fn)

    def note(self) -> None:
        """A backward pass comes by."""
        self.how = self.looks()
        if (hooks := self._hooks()) is not None:
            hooks.given.clear()
        node = self._node()
        if self.how is None or node is None or not self.is_asked_for():
            return
        if not any(_torch.will_be_reached(below) for below, _ in node.next_functions):
            raise refused(self._name, self._shape, "its gradient is all that is asked for")

    def changed(self) -> bool:
        """Whether a hook of the caller's has given another gradient."""
        hooks = self._hooks()
        return hooks is not None and bool(hooks.given)
