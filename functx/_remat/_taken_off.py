"""Hooks that a body hangs on what it makes, and that are taken off when it has returned.

NOTE [taken off]
A handle leaves the body (``handles.append(h.register_hook(f))``), and whoever has it removes it
between forward and backward, or between two backward passes. Without remat the hook is called no
more. Each replay hangs its own; so the handles of what all runs of a region have hung there are one
to whoever removes one of them. When a replay's body has returned, which may have pulled something
back itself, with its hooks, those that were taken off since the forward are taken off there.

The hooks of a region inside count for it and for those around: their replays run it afresh. And so
do those of a replay, for the region that its pullback is when that may be differentiated: what that
has recorded is what was hung there then, whatever is taken off later. A further derivative is taken
with what is there now.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functx import _torch_nodes
from functx._errors import RematError, ReplayError
from functx._remat._bound import Bound, State
from functx._remat._cells import snapshot
from functx._remat._hung_inside import look_inside
from functx._remat._hung_on_given import LEFT
from functx._remat._in_parts import Parts, in_parts, of_the_user
from functx._remat._read_results import Replayed, being_replayed


@dataclass
class Run:
    """A replay that has hung its hooks.

    Attributes:
        region: the name of what is replayed.
        compares: whether hooks are to be the same functions.
        recorded: whether a derivative may be taken of what it gives.
        again: whether it is run for that once more.
    """

    region: str
    compares: bool
    recorded: bool = False
    again: bool = False


class OneHook(Parts, dict[int, Any]):
    """A hook of a body, by the handles of all runs that have hung it.

    Args:
        handle: of the first run, whose body has returned.
        outer: ids of the variables that the function of the region closes over.

    Attributes:
        removed: whether it was taken off since.
    """

    removed = False
    bound: Bound | None = None
    _around: Callable[[], OneHook | None] | None = None  # the same, of the region around, weakly
    _removing = False

    def __init__(self, handle: Any, outer: Collection[int] = ()) -> None:
        super().__init__()
        self._hooks = _torch_nodes.where_hung(handle)
        self.join(handle, outer=outer)

    def join(
        self, handle: Any, run: Run | None = None, state: State | None = None, *, outer: Any = ()
    ) -> None:
        """A run has hung it; if that takes it off by itself, the others do so, too.

        Args:
            handle: of the hook.
            run: that is a replay; the first run's own hooks are never called.
            state: of what the hook is bound to, which it is to have.
            outer: of the first run.

        Raises:
            ReplayError: that is another function, or has other numbers.
        """
        if handle.id not in self:
            one: OneHook | None = self
            while one is not None:  # an inner one may be gone when the handle takes it off
                one.know(handle)
                one = one.around()
            inside = _torch_nodes.belongs_to(handle, self)
            if inside is not None:
                inside._around = weakref.ref(self)
            hook = of_the_user(_torch_nodes.hook_of(handle))
            theirs = Bound(hook, outer) if hook is not None else inside and inside.bound
            bound = self.bound = self.bound or theirs
            if inside is not None:
                inside.bound = bound
            if run is not None:
                if run.compares and bound and theirs and not bound.is_like(theirs):
                    raise _refused(run.region, theirs, bound)
                _torch_nodes.exchange_hook(handle, functools.partial(self._again, run, state))

    def know(self, handle: Any) -> None:
        """Be told of what takes it off, and forget what did so that nobody has any more."""
        for key in [key for key, one in self.items() if _torch_nodes.hook_of(one) is None]:
            held = weakref.ref(self.pop(key))
            if (one := held()) is not None:
                self[key] = one  # by somebody who may remove it
        self[handle.id] = handle
        _torch_nodes.tell_of_removal(handle, self)

    def _again(self, run: Run, state: State | None, hook: Any) -> Any:
        """One of a replay, for that of the first run. See `_bound`, `_in_parts`."""
        put_back = None
        if self.bound is not None and state is not None:
            put_back = self.bound.give(hook, state, again=run.again, recorded=run.recorded)
        return in_parts(hook, self, run.region, put_back)

    def around(self) -> OneHook | None:
        """The same hook, as the region around knows it."""
        return None if self._around is None else self._around()

    def __delitem__(self, key: int) -> None:
        """It is taken off by one of its handles, which stays: a replay may do so once more."""
        self.removed = True
        if not self._removing:
            self._removing = True
            for handle in [*self.values()]:
                handle.remove()
            self._removing = False

    def __reduce__(self) -> Any:
        """The copy of a handle is of what hangs nowhere."""
        return _torch_nodes.nowhere, ()

    def hangs_in(self, hooks: Any) -> bool:
        """Whether the first run has hung it here, on a node that is still there."""
        return self._hooks() is hooks


class Hanging:
    """The part of a tracker that knows the hooks which its body hangs.

    Attributes:
        handles: of those of this run, in the order of hanging them.
        hooks: those of the first run, if this is another one.
    """

    handles: Sequence[Any] = ()
    hooks: Sequence[OneHook] = ()

    def hangs(self, func: Any, args: Any) -> Any:
        """The body hangs a hook; its handle, or `LEFT` if that is to be done, and told of."""
        handle = self.hang(func, *args)
        if handle is not LEFT:
            self.hung(handle)
        return handle

    def hang(self, func: Any, t: Tensor, hook: Any) -> Any:
        """Hang a hook on ``t``, if this run has not made it; its handle, or `LEFT`."""
        return LEFT

    def hung(self, handle: Any) -> None:
        """The body has hung a hook."""
        if _torch_nodes.tells_where(handle):  # in a graph that is lowered nothing hangs
            self.handles = [*self.handles, handle]

    def has_hung(self, hooks: Any) -> bool:
        """Whether the first run has hung the hook that is next, here, on what it did not make."""
        n = len(self.handles)
        return n < len(self.hooks) and self.hooks[n].hangs_in(hooks)


def hooks_of(handles: Sequence[Any], body: Any, f: Any) -> list[OneHook]:
    """The hooks of a body of ``f`` that has run first, in the order of hanging them."""
    outer = snapshot(f) if handles else ()
    own = [OneHook(handle, outer) for handle in handles]
    return [*own, *(hook for _, hook in _of_a_replay(body))]


def _of_a_replay(body: Any) -> Sequence[tuple[Any, OneHook]]:
    """Those of the replay that is pulled back by ``body``, if that does so."""
    fn = getattr(body, "fn", None)
    return fn.hung if isinstance(fn, Replayed) else ()


def hung_again(region: Any, handles: Sequence[Any], results: Sequence[Tensor | None]) -> None:
    """A replay is about to be pulled back, whose body has hung its hooks.

    Args:
        region: that was replayed.
        handles: of the hooks, in the order of hanging them.
        results: of the body.

    Raises:
        RematError: one was taken off, and which one it is here can't be told.
    """
    hooks, name = region.hooks, region.options.name
    handles = [*handles, *(handle for handle, _ in _of_a_replay(region.body))]
    off = [hook.removed for hook in hooks]
    if len(handles) == len(hooks):
        states = [hook.bound and hook.bound.state() for hook in hooks]
        run = Run(name, region.options.determinism_check != "none")
        if (of := being_replayed(region)) is not None:
            now, run.recorded, of.hung = (off, states), True, [*zip(handles, hooks)]
            off, states = remembered = of.remembered(now)
            run.again = remembered is not now
        for handle, hook, is_off, state in zip(handles, hooks, off, states):
            if is_off:
                handle.remove()
            else:
                hook.join(handle, run, state)
    elif any(off):
        raise RematError(
            f"remat: a replay of the region {name!r} hangs {len(handles)} hooks where the forward "
            f"hung {len(hooks)}, of which one was removed: which one it is there can't be told. "
            "Hang the same hooks each time, or hang them outside of the region."
        )
    elif region.options.determinism_check != "none":
        raise ReplayError(
            f"remat: a replay of the region {name!r} hangs {len(handles)} hooks where the forward "
            f"hung {len(hooks)}: something that decides on that (a flag, a module's hooks) changed "
            "between forward and backward. Keep it until the backward has run, or give the region "
            "what changes as an argument."
        )
    if region.inside:
        look_inside(region.inside, results, name)


def _refused(region: str, now: Bound, was: Bound) -> ReplayError:
    return ReplayError(
        f"remat: a replay of the region {region!r} hangs a hook, {now}, where the forward hung "
        f"another one, {was}: something that decides on that (a flag, an attribute) changed "
        "between forward and backward. Keep it until the backward has run, or give the region what "
        "changes as an argument."
    )
