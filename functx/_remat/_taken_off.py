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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functx import _torch_nodes
from functx._errors import RematError, ReplayError
from functx._remat._bound import Bound, Finding, Reaching, State, found_by
from functx._remat._cells import snapshot
from functx._remat._hung_inside import look_inside
from functx._remat._hung_on_given import LEFT
from functx._remat._in_parts import Parts, in_parts, of_the_user, running
from functx._remat._keepers import Keeper, Keeping
from functx._remat._reached_by_hooks import hooks_called_by
from functx._remat._read_results import Replayed, being_replayed
from functx._remat._state_of_hooks import NOTHING_GIVEN


@dataclass
class Run:
    """A replay that has hung its hooks.

    Attributes:
        region: the name of what is replayed.
        compares: whether hooks are to be the same functions.
        recorded: whether a derivative may be taken of what it gives.
        again: whether it is run for that once more.
        reaching: what its hooks reach.
    """

    region: str
    compares: bool
    recorded: bool = False
    again: bool = False
    reaching: Any = None


class OneHook(Parts, dict[int, Any]):
    """A hook of a body, by the handles of all runs that have hung it.

    Args:
        handle: of the first run, whose body has returned.
        reached: what it reaches.

    Attributes:
        removed: whether it was taken off since.
        then: what it found in the first run, where one of the region around is run again.
    """

    removed = False
    then: State | None = None
    bound: Bound | None = None
    _around: Callable[[], OneHook | None] | None = None  # the same, of the region around, weakly
    _removing = False
    _calls: Sequence[Any] = ()  # hooks of a module, which may be removed there

    def __init__(self, handle: Any, reached: Mapping[str, Any]) -> None:
        super().__init__()
        self._hooks = _torch_nodes.where_hung(handle)
        self.join(handle, reached)

    def join(
        self,
        handle: Any,
        reached: Mapping[str, Any],
        run: Run | None = None,
        state: State | None = None,
    ) -> None:
        """A run has hung it; if that takes it off by itself, the others do so, too.

        Args:
            handle: of the hook.
            reached: what it reaches.
            run: that is a replay; the first run's own hooks are never called.
            state: of what the hook is bound to, which it is to have.

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
            if run is None:
                self._calls = hooks_called_by(hook) if inside is None else inside._calls
            theirs = Bound(hook, reached) if hook is not None else inside and inside.bound
            bound = self.bound = self.bound or theirs
            if inside is not None:
                inside.bound, inside.then = bound, state if run is not None and run.again else None
            if run is not None:
                if run.compares and bound and theirs and not bound.is_like(theirs):
                    raise _refused(run.region, theirs, bound)
                exchanged = functools.partial(self._again, run, state, reached)
                _torch_nodes.exchange_hook(handle, exchanged)

    def know(self, handle: Any) -> None:
        """Be told of what takes it off, and forget what did so that nobody has any more."""
        for key in [key for key, one in self.items() if _torch_nodes.hook_of(one) is None]:
            held = weakref.ref(self.pop(key))
            if (one := held()) is not None:
                self[key] = one  # by somebody who may remove it
        self[handle.id] = handle
        _torch_nodes.tell_of_removal(handle, self)

    def _again(self, run: Run, state: State | None, reached: Mapping[str, Any], hook: Any) -> Any:
        """One of a replay, for that of the first run. See `_bound`, `_in_parts`."""
        bound = hook
        if self.bound is not None and state is not None:
            given = self.bound.give(hook, reached, state, run.reaching)
            bound = run.reaching.bound(hook, given, recorded=run.recorded, again=run.again)
        return in_parts(bound, self, run.region, hook)

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
        keepers: nodes of custom Functions of this run, and each `Keeper` of a region inside.
    """

    handles: Sequence[Any] = ()
    hooks: Sequence[OneHook] = ()
    keepers: Sequence[Any] = ()

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


def hooks_of(
    handles: Sequence[Any], keepers: Sequence[Any], body: Any, f: Any
) -> tuple[list[OneHook], list[Keeper]]:
    """What a body of ``f`` that has run first has hung, and applied, in the order of doing so.

    Args:
        handles: of its hooks.
        keepers: nodes of custom Functions, and those that regions inside have.
        body: that has run.
        f: its function.
    """
    found: Sequence[Mapping[str, Any]] = ()
    if handles or keepers:
        found = found_by([*_of_users(handles), *_nodes_of(keepers)], snapshot(f))
    n = len(handles)
    hooks = [*map(OneHook, handles, found), *(hook for _, hook in _of_a_replay(body))]
    applied = [
        k if isinstance(k, Keeper) else Keeper(Bound(k, reached))
        for k, reached in zip(keepers, found[n:])
    ]
    return hooks, applied


def _nodes_of(keepers: Sequence[Any]) -> list[Any]:
    return [None if isinstance(k, Keeper) else k for k in keepers]


def _of_users(handles: Iterable[Any]) -> list[Any]:
    """The hooks, as the user has hung them; ``None`` for what regions have."""
    return [of_the_user(_torch_nodes.hook_of(handle)) for handle in handles]


def _of_a_replay(body: Any) -> Sequence[tuple[Any, OneHook]]:
    """Those of the replay that is pulled back by ``body``, if that does so."""
    fn = getattr(body, "fn", None)
    return fn.hung if isinstance(fn, Replayed) else ()


def hung_again(region: Any, replay: Hanging, results: Sequence[Tensor | None]) -> None:
    """A replay is about to be pulled back, whose body has hung its hooks.

    Args:
        region: that was replayed.
        replay: the run.
        results: of the body.

    Raises:
        RematError: one was taken off, and which one it is here can't be told.
    """
    hooks, name = region.hooks, region.options.name
    if not (hooks or region.inside or region.keepers or replay.handles):  # as in most calls
        return
    handles = [*replay.handles, *(handle for handle, _ in _of_a_replay(region.body))]
    keepers = region.keepers[: len(replay.keepers)]  # a replay may end before its body does
    off = [hook.removed for hook in hooks]
    if len(handles) == len(hooks):
        run = Run(name, region.options.determinism_check != "none")
        those = [*hooks, *keepers]
        states: Sequence[State | None] = [one.then for one in those]
        run.again = running.around and any(then is not None for then in states)
        if not run.again:
            states = [one.bound and one.bound.state() for one in those]
        if (of := being_replayed(region)) is not None:
            now, run.recorded, of.hung = (off, states), True, [*zip(handles, hooks)]
            off, states = remembered = of.remembered(now)
            run.again = run.again or remembered is not now
        nodes = _nodes_of(replay.keepers)
        forward = [one.bound for one in those]
        replayed = [*_of_users(handles), *nodes]
        run.reaching = reaching = Reaching(replayed, name, run.compares, forward)
        del replayed
        by_hook = reaching.by_hook()
        for handle, hook, reached, is_off, state in zip(handles, hooks, by_hook, off, states):
            if is_off:
                handle.remove()
            else:
                hook.join(handle, reached, run, state)
        n = len(handles)
        _keep(run, keepers, replay.keepers, by_hook[n:], states[n:])
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


def _keep(
    run: Run,
    keepers: Sequence[Keeper],
    replayed: Sequence[Any],
    reached: Sequence[Mapping[str, Any]],
    states: Sequence[State | None],
) -> None:
    """Custom Functions of a replay find what those of the forward do. See `_keepers`."""
    given: list[Finding] = []
    for keeper, one, those, state in zip(keepers, replayed, reached, states):
        if isinstance(one, Keeper):  # of a region inside
            one.bound, one.then = keeper.bound, state if run.again else None
        elif not keeper.bound.is_of(one):  # what ran forward was left out
            break
        elif state is not None:
            given += keeper.bound.give(one, those, state, run.reaching)
    if any(one is not NOTHING_GIVEN for one in given):
        nodes = [one for one in replayed if not isinstance(one, Keeper)]
        Keeping(nodes, run.reaching, given, run.recorded, run.again)


def _refused(region: str, now: Bound, was: Bound) -> ReplayError:
    return ReplayError(
        f"remat: a replay of the region {region!r} hangs a hook, {now}, where the forward hung "
        f"another one, {was}: something that decides on that (a flag, an attribute) changed "
        "between forward and backward. Keep it until the backward has run, or give the region what "
        "changes as an argument."
    )
