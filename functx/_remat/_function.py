"""A user's function as a body: arguments to flat tensors, results back, late binding held fast.

NOTE [kept once]
What a body closes over is an input of the region, a constant, or only returned: that is kept if a
pullback reads it, an input until it has. The copy must not keep it too: tensors without memory take
its place in cells, defaults and partials; replays, which hand out inputs by position, put it there.

NOTE [compiled regions]
``torch.compile`` recomputes by its partitioner: a region that it meets in plain autograd is handed
over to that, and stays in the graph. It knows no transforms, so a region under one is a graph
break, and runs in eager; nor does it know names, so a region whose policy asks for them does too.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from functx import _torch, _torch_compiler, _torch_modules, _torch_operators, _tree
from functx._arrays import backend_of
from functx._remat._cells import rebound, snapshot
from functx._remat._containers import MUTABLE, Copies, reached
from functx._remat._given import Given
from functx._remat._letting_go import memoryless
from functx._remat._observers import inlined
from functx._remat._operator import call, differentiating
from functx._remat._options import Options
from functx._remat._region import Region
from functx._remat._rules.proxy import keeping
from functx._remat._stored import Kept, Stored
from functx._remat._tapes import PLAIN, with_no_leaves
from functx._remat._tracker import active_tracker


def run(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], o: Options) -> Any:
    """``f(*args, **kwargs)`` as a region. ``NOTE [compiled regions]``."""
    if _torch_compiler.in_plain_graph():
        if torch.compiler.is_exporting():  # who loads the graph differentiates it
            return f(*args, **kwargs)
        if o.policy is None and _torch_compiler.replays_numbers():
            return checkpoint(f, *args, use_reentrant=False, **kwargs)
        if o.contexts is not None:
            return checkpoint(f, *args, use_reentrant=False, context_fn=o.contexts, **kwargs)
    return _run(f, args, kwargs, o)


@_torch_compiler.uncompiled
def _run(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], o: Options) -> Any:
    if (backend := backend_of("remat", args, kwargs)) is not None:
        if o.budget is not None:
            raise TypeError("remat: a budget is for torch tensors; the arguments are JAX arrays.")
        return backend.remat(f, o.policy)(*args, **kwargs)
    if _recording.active or inlined() or torch.jit.is_tracing() or _torch.traces_autograd():
        return f(*args, **kwargs)
    if not differentiating() and not keeping():
        return f(*args, **kwargs)
    if o.budget is not None:
        return _ON_BUDGET[0](f, args, kwargs, o)
    if _torch_operators.hooks_modules():  # so replays run other operations than the forward
        o = replace(o, determinism_check="none", prune=False)
    f = functools.partial(with_no_leaves, f) if _torch_modules.global_hooks else f
    leaves, spec = _flat(args) if not kwargs else _tree.flatten((args, kwargs))
    inputs: list[Tensor] = []
    places: dict[int, int] = {}
    where: list[int | None] = []
    statics: list[Any] = []
    around = active_tracker() if len(leaves) > 1 else None
    aliases = None if around is None else around.aliases
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            # What was one tensor in the forward is one input. ``NOTE [aliases]`` in `_aliases`.
            key = id(aliases.get(id(leaf), (leaf,))[0]) if aliases else id(leaf)
            if (place := places.setdefault(key, len(inputs))) == len(inputs):
                inputs.append(leaf)
            where.append(place)
            statics.append(None)
        else:
            where.append(None)
            statics.append(leaf)
    given = None if spec is None else Given((args, kwargs), f, o.name)
    body = Body(f, spec, where, statics, given)
    outs = call(Region(body, inputs, o, reaches=(f, statics)))
    return body.result(outs)


_ON_BUDGET: list[Callable[..., Any]] = []


def on_budget(runner: Any) -> Any:
    """Register what runs functions that have a budget."""
    _ON_BUDGET.append(runner)
    return runner


def _flat(args: tuple[Any, ...]) -> tuple[Sequence[Any], Any]:
    """Flatten arguments by position: nothing to do where all are tensors, as in most calls."""
    for a in args:
        if type(a) not in PLAIN:
            return _tree.flatten((args, {}))
    return args, None


class _Recording(threading.local):
    active = False


_recording = _Recording()


@contextmanager
def recording() -> Iterator[None]:
    """While what a function runs is recorded, regions inside it are the functions themselves."""
    before, _recording.active = _recording.active, True
    try:
        yield
    finally:
        _recording.active = before


class Body:
    """Flat tensors in, flat tensors out; the structure of the result is kept for the caller."""

    def __init__(
        self,
        f: Callable[..., Any],
        spec: Any,
        where: Sequence[int | None],
        statics: Sequence[Any],
        given: Given | None,
    ) -> None:
        self._given = given or None
        self._first: Callable[..., Any] | None = f
        self._spec = spec
        self._where = where
        self.statics = statics
        self._out: Any = None
        self._emptied: dict[int, Any] = {}  # by id, containers that are copied for each replay
        # No cell of the user's: the result of this very call may end up in it, as in
        # ``x = remat(lambda: g(x))()``, and nothing could free them.
        self.function, self._cells = f, snapshot(f)
        if self._cells:
            self.function = rebound(f, self._cells)
            self._cells = snapshot(self.function)

    def __call__(self, *tensors: Tensor) -> list[Tensor | None]:
        first, self._first = self._first, None
        f = first
        if f is None:
            f = self.function
            if self._cells or self._emptied:
                f = rebound(f, self._cells, marked=self._emptied)
        if self._spec is None:  # all arguments are tensors
            result = f(*[tensors[place] for place in self._where if place is not None])
        else:
            leaves = [
                static if place is None else tensors[place]
                for place, static in zip(self._where, self.statics)
            ]
            args, kwargs = tree = _tree.unflatten(self._spec, leaves)
            if self._given is not None:
                return self._run(f, tree, first is not None)
            result = f(*args, **kwargs)
        if type(result) in PLAIN:
            return [result]
        outs, spec = _tree.flatten(result)
        if first is not None:
            self._out = (spec, [None if isinstance(o, Tensor) else (o,) for o in outs])
        return [o for o in outs if isinstance(o, Tensor)]

    def with_others(self, there: Mapping[int, Any], *tensors: Tensor) -> list[Tensor | None]:
        """A replay that has others in the places of some things, by their ids. `_advanced`."""
        one = copy.copy(self)
        one.function = rebound(self.function, self._cells, marked=self._emptied, tensors=there)
        one._cells, one._emptied = {}, {}
        one.statics = [rebound(x, {}, tensors=there) for x in self.statics]
        return one(*tensors)

    def _run(self, f: Any, tree: Any, first: bool) -> list[Tensor | None]:
        """``NOTE [changed arguments]`` in `_given`."""
        given = self._given
        assert given is not None
        args, kwargs = tree = given.apart(tree)
        watched = given.watch(tree)
        stored = Stored(watched, tree, given.name) if first else Kept(watched, given.name)
        try:
            result = f(*args, **kwargs)
        except BaseException as error:
            given.interrupted(watched, error)
            raise
        kept = stored.kept(watched)
        own = given.own(watched)
        outs, spec = _tree.flatten(result, lambda x: id(x) in own)
        if first:
            held = [None if isinstance(o, Tensor) else (own.get(id(o), (o, o))[1],) for o in outs]
            self._out = (spec, held)
        taken = given.take(watched, own, outs, stored.exchange, kept)
        return [*(o for o in outs if isinstance(o, Tensor)), *taken]

    def let_go(self, known: Callable[[int], bool], unread: Collection[int]) -> dict[int, Tensor]:
        """Close over others for some tensors; those, by these ids. ``NOTE [kept once]``."""
        tensors: dict[int, Tensor] = {}
        for t in self._closed_over():
            if known(key := id(t)) and (instead := memoryless(t, key not in unread)) is not None:
                tensors[key] = instead
        if tensors:
            self.function = rebound(self.function, self._cells, tensors=tensors)
            self._cells = snapshot(self.function)
        return tensors

    def _closed_over(self) -> list[Tensor]:
        f = self.function
        found = [c for _, c in self._cells.values() if issubclass(type(c), Tensor)]
        if isinstance(f, functools.partial):
            found += [x for x in (*f.args, *f.keywords.values()) if isinstance(x, Tensor)]
        elif type(f) is types.FunctionType and (f.__defaults__ or f.__kwdefaults__):
            those = (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())
            found += [x for x in those if isinstance(x, Tensor)]
        return found

    def forget(self, owners: Sequence[Tensor], before: Mapping[int, Any]) -> None:
        """Do not close over tensors that depend on this very call: nothing could free them.

        A replay has what the forward found. ``NOTE [what was left in a list]`` in `_containers`.
        """
        held = {id(t) for t in owners}
        cells = {
            key: (cell, contents.detach() if id(contents) in held else contents)
            for key, (cell, contents) in self._cells.items()
        }
        copies: Copies = {}
        self.function = rebound(self.function, cells, held=held, copies=copies, before=before)
        self._cells = snapshot(self.function)
        # What an earlier call emptied stays so, but for what this one has replaced.
        before = {key: c for key, c in self._emptied.items() if key not in copies}
        found = reached(new for _, new in copies.values())
        self._emptied = before | {key: c for key, c in found.items() if type(c) in MUTABLE}

    def result(self, tensors: Sequence[Tensor | None]) -> Any:
        """What ``f`` returned, with ``tensors`` in the places of its tensors."""
        if self._given is not None:
            tensors = self._given.put_back(tensors)
        if self._out is None:
            return tensors[0]
        spec, leaves = self._out
        self._out = None
        rest = iter(tensors)
        return _tree.unflatten(spec, [next(rest) if o is None else o[0] for o in leaves])
