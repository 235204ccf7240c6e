"""Finds and undoes the side effects that a function has in a trace (J1, J4).

functx notes everything that the function reaches before a trace, and compares it afterwards. If the
function has left a tensor of the trace somewhere, that is an error. If it has changed a plain value
(a counter), a graph can't repeat that at each call, so the function runs in eager from then on. In
both cases functx first restores the old values, so that a trace has no effects. Seeds and states of
generators are compared when the function draws, and at the end.

A limit: objects that the search does not reach are neither compared nor restored.
"""

from __future__ import annotations

import collections
import functools
import gc
import operator
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from functx import _torch
from functx._compile.intact import in_words, is_traced
from functx._compile.met import refused
from functx._compile.running import Ran
from functx._compile.search import (
    CACHE,
    CELL,
    ITEM,
    MISSING,
    PLAIN,
    Search,
    in_cell,
    member_of,
    read,
)
from functx._compile.surroundings import surroundings
from functx._core import RematError, TracingError, describe, name_of
from functx._torch import graphs

_SEED = 0x5EED_F00D
REFUSALS = TracingError, RematError  # the errors by which functx refuses something
_NOTED_BY_TORCH = {"_flat_weights", "_flat_weight_refs"}  # recurrent layers set these in each call


class Changed(Exception):
    """A trace has changed a plain value of user code; functx has undone all its effects."""

    def __init__(self, change: Change, holder: Any) -> None:
        super().__init__()
        self.fills = change.fills
        owner = holder.__name__ if isinstance(holder, type) else _owner_name(holder)
        key = change.key if isinstance(change.key, str) else f"[{change.key!r:.40}]"
        self.said = f"{key} of {owner} ({describe(change.old)}, then {describe(change.new)})"


@dataclass
class Change:
    """One place whose contents differ from those before the trace."""

    owner: Any
    key: Any
    old: Any
    new: Any
    undo: Callable[[], None]

    @property
    def fills(self) -> bool:
        """Whether only a first call may make this change: filling something, or setting a flag."""
        return self.old is MISSING or (self.old is None or type(self.old) is bool)


class Before:
    """The state in reach before a trace. ``codes`` collects the code objects that run in it."""

    def __init__(self, found: Search, codes: Iterable[types.CodeType] = ()) -> None:
        self.found, self._codes = found, codes
        self._places = [
            (place[0], place[1], place[2], value)
            for place, value in (
                *(((ITEM, box, key), value) for box, key, value in found.items),
                *((("read", f, x), value) for f, x, value in found.reads),
                *((slot, t) for t, slots in zip(found.tensors, found.slots) for slot in slots),
            )
        ]
        # torch.utils.swap_tensors raises an error for tensors with weak references. So these block
        # it during the trace.
        self._references = [weakref.ref(t) for t in found.tensors]
        self._caches = [(x, x.cache_info()) for x in found.held if type(x) is CACHE]

    def changes(self) -> Iterator[Change]:
        """The differences between the noted state and the present one."""
        noted = set()
        for box, before, owner in self.found.snapshots:
            noted.add(id(box))
            yield from _changes_in(box, before, owner)
        for how, first, second, value in self._places:
            if how is ITEM and id(first) not in noted:
                now = read((ITEM, first, second))
                if now is not value and type(first) in (dict, types.MappingProxyType):
                    yield Change(first, second, value, now, _setter(first, second, value))
            elif how == "read" and (put := _writer(first, second, value)) is not None:
                now = read((how, first, second))
                if now is not value:
                    yield Change(second, getattr(first, "__name__", "a variable"), value, now, put)
        for space, name in self.found.absent:
            if name in space:
                undo = _setter(space, name, MISSING)
                yield Change(space, name, MISSING, space[name], undo)

    def iterators(self) -> list[Any]:
        """The positions of the iterators in reach, for classes that show theirs."""
        return [_position(x) for x in self.found.held if issubclass(type(x), _ITERATORS)]

    def settle(self) -> None:
        """Undo all changes, and raise an error if user code made any.

        Raises:
            TracingError: A tensor of the trace has been left somewhere.
            Changed: A plain value has changed.
        """
        changes = self.counted()
        holders = [holder_of(change.owner, self.found) for change in changes]
        self.put_back(everything=True)
        for change, holder in zip(changes, holders):
            refuse_kept(Search([change.new]).tensors, holder, change.key)
        if changes:
            raise Changed(changes[0], holders[0])
        if filled := self.clear_caches():
            raise Changed(
                Change(filled[0], "the cache", MISSING, filled[0], lambda: None), filled[0]
            )

    def counted(self) -> list[Change]:
        """The changes that user code has made."""
        return [change for change in self.changes() if self._is_counted(change)]

    def _is_counted(self, change: Change) -> bool:
        # A running thread (tqdm has one) changes its own attributes during the trace, and the
        # conditions on which it waits. The function did not make these changes.
        is_threads = issubclass(type(change.owner), threading.Thread)
        if is_threads and change.key not in Ran({*self._codes}).names:
            return False
        if type(holder_of(change.owner, self.found)) is threading.Condition:
            return False
        return _is_of_program(change)

    def put_back(self, everything: bool) -> None:
        """Undo all changes, or only those that have left tensors of a trace."""
        for change in [*self.changes()]:
            if everything or any(map(is_traced, Search([change.new]).tensors)):
                change.undo()

    def clear_caches(self) -> list[Any]:
        """Empty each `functools.cache` that holds tensors of the trace; returns these caches.

        Raises:
            KeptError: A cache held other results before, which are lost now.
        """
        filled = []
        for cache, before in self._caches:
            if cache.cache_info().misses == before.misses:
                continue
            if any(map(is_traced, Search(gc.get_referents(cache)).tensors)):
                cache.cache_clear()
                filled.append(cache)
                if before.currsize:
                    raise KeptError(
                        f"functx.jit: a tensor that the function makes is kept by the cache of "
                        f"{name_of(cache)} (functools.cache). A tensor of a trace has no values, "
                        "so functx has emptied the cache (J4). Call the function once before, in "
                        "eager."
                    )
        return filled


_CONTAINERS: Any = [[], (), range(0), {}, {}.values(), {}.items(), "", (0 for _ in ())]
_ITERATORS = tuple(type(iter(x)) for x in _CONTAINERS)


def _position(x: Any) -> Any:
    if isinstance(x, types.GeneratorType):
        return None if x.gi_frame is None else x.gi_frame.f_lasti
    return operator.length_hint(x)


def _changes_in(box: Any, before: Any, owner: Any) -> Iterator[Change]:
    if isinstance(before, dict):
        is_proxy = type(box) is types.MappingProxyType
        now: Any = box if is_proxy else dict(dict.items(box))
        for key in [*before, *(k for k in now if k not in before)]:
            old, new = before.get(key, MISSING), now.get(key, MISSING)
            if old is not new:
                yield Change(owner, key, old, new, _setter(owner_of(box, owner), key, old))
        return
    base: Any = next(b for b in (list, set, collections.deque) if isinstance(box, b))
    items = [*base.__iter__(box)]
    is_same = len(items) == len(before) and all(a is b for a, b in zip(items, before))
    if base is set:
        is_same = {*map(id, items)} == {*map(id, before)}
    if not is_same:

        def undo() -> None:
            base.clear(box)
            (base.update if base is set else base.extend)(box, before)

        key = f"the items of a {base.__name__}"
        new = [v for v in items if all(v is not b for b in before)]
        yield Change(owner, key, before, new or items, undo)


def owner_of(box: Any, owner: Any) -> Any:
    """The object to write to: for the ``__dict__`` of a class, a read-only proxy, the class."""
    return owner if type(box) is types.MappingProxyType else box


def _setter(box: Any, key: Any, value: Any) -> Callable[[], None]:
    def undo() -> None:
        if isinstance(box, type):
            if value is MISSING:
                type.__delattr__(box, key)
            else:
                type.__setattr__(box, key, value)
        elif value is MISSING:
            dict.pop(box, key, None)
        else:
            dict.__setitem__(box, key, value)

    return undo


def _writer(function: Any, x: Any, value: Any) -> Callable[[], None] | None:
    """A function that puts a value back into a cell or a slot."""
    if function is CELL or function is in_cell:

        def put() -> None:
            if value is MISSING:
                del x.cell_contents
            else:
                x.cell_contents = value

        return put
    member = member_of(function)
    if member is not None:
        return lambda: member.__delete__(x) if value is MISSING else member.__set__(x, value)
    return None


def _is_of_program(change: Change) -> bool:
    """Whether user code made a change, rather than torch or functx for its own notes."""
    module = type(change.owner).__module__
    if module.startswith("functx."):
        return False
    if isinstance(change.owner, nn.Module):
        if change.key in _NOTED_BY_TORCH:
            return False
    elif module.startswith("torch.") and change.old is MISSING:
        return False  # a lazy attribute, set when first read (`torch.distributions`)
    if type(change.key) is weakref.ref and change.key() is _torch.FakeTensor:
        return False  # `functools.singledispatch` caches the function for a class
    old, new = change.old, change.new
    return not (type(old) is type(new) and type(old) in PLAIN and repr(old) == repr(new))


@contextmanager
def watched(before: Before) -> Iterator[None]:
    """Around a trace: undo its effects, and raise an error for those that a graph can't have.

    If the function raises an error of its own, it runs again in eager. So functx undoes its effects
    in that case too. This is impossible if it has taken items of an iterator. Then the effects
    stay, and the error gets the attribute ``functx_went_on``, so that the function does not run
    again.

    Args:
        before: The state in reach.

    Raises:
        TracingError: The function has an effect that a graph can't have.
        Changed: The function changes plain values.
    """
    found = before.found
    if any(map(is_lazy, found.tensors)):
        raise TracingError(
            "functx.jit: a lazy module has no parameters yet. Call it once in eager first."
        )
    gradients = [(t, t.grad) for t in found.tensors if t.is_leaf]
    iterators = before.iterators()
    hook = register_optimizer_step_pre_hook(_refuse_step)
    try:
        with nothing_drawn(found), in_words():
            yield
    except BaseException as error:
        is_refusal = isinstance(error, REFUSALS) or graphs.reads_values(error)
        changes = before.counted()
        # After another error the function runs again in eager, which has all its effects once more.
        # That is right only if no iterator has moved on.
        is_repeated = isinstance(error, Exception) and before.iterators() == iterators
        before.put_back(everything=is_refusal or is_repeated)
        before.clear_caches()
        if not is_refusal and not is_repeated:
            error.functx_went_on = True  # type: ignore[attr-defined]
        if isinstance(
            error, KeptError
        ):  # raise it with the name of the object that holds the tensor
            for change in changes:
                holder = holder_of(change.owner, found)
                refuse_kept(Search([change.new]).tensors, holder, change.key)
        raise
    finally:
        hook.remove()
        changed = [(t, gradient) for t, gradient in gradients if t.grad is not gradient]
        for t, gradient in changed:
            t.grad = gradient
    try:
        before.settle()
    finally:
        before.put_back(everything=True)
    if before.iterators() != iterators:
        raise TracingError(
            "functx.jit: the function takes items of an iterator that existed before the call. A "
            "graph can't do that at each call. Take the items outside, and pass them as arguments."
        )
    if changed:
        raise sets_gradients()


def sets_gradients() -> TracingError:
    """The error for a function that sets ``.grad``."""
    return TracingError(
        "functx.jit: the function sets .grad of a tensor that it reads, for example by .backward() "
        "or zero_grad(). A graph can't do that (J4). Take gradients by functx.grad or "
        "torch.autograd.grad, or call these methods outside."
    )


@contextmanager
def settings_kept() -> Iterator[None]:
    """Around a function in a trace: raise if it leaves grad mode or a flag of torch changed."""
    settings, values = surroundings(), _torch.flags_now()
    try:
        yield
    finally:
        left = surroundings() != settings
        if left:
            torch.set_grad_enabled(settings[0])
            for (_, write), value in zip(_torch.FLAGS, values):
                write(value)
    if left:
        raise TracingError(
            "functx.jit: the function leaves grad mode, a default or a flag of torch changed (J4). "
            "Set it outside, or in a with block (with torch.no_grad(): ...) that resets it."
        )


def _refuse_step(optimizer: Any, *_: Any) -> None:
    """Runs before each optimizer step of the process, in any thread."""
    if _torch.tracing():
        raise TracingError(
            f"functx.jit: the function calls {name_of(optimizer)}.step(), which reads .grad and "
            "keeps its state outside of the graph. Call step() outside, or compute the update in "
            "the function."
        )


_HINTS = {  # by the attribute that holds the tensor: hooks of weight_norm set it in each call
    "weight": " Use weight_norm and spectral_norm of torch.nn.utils.parametrizations in place of "
    "those of torch.nn.utils."
}


class KeptError(TracingError):
    """A tensor of a trace outlives it."""


def refuse_kept(tensors: Iterable[Tensor], owner: Any = None, key: Any = None) -> None:
    """Raise if a tensor belongs to a trace, this one or an earlier one."""
    for t in filter(is_traced, tensors):
        by = "" if owner is None else f" by {_owner_name(owner)}"
        by += f" ({key})" if isinstance(key, str) else ""
        raise KeptError(
            f"functx.jit: a tensor that the function makes, {t.dtype} of shape {(*t.shape,)}, "
            f"is kept{by}, but a tensor of a trace has no values (J4). Return it; or, if it is in "
            "a table that a first call fills: clear that, and call the function once before, in "
            f"eager.{_HINTS.get(key, '')}"
        )


def holder_of(x: Any, found: Search) -> Any:
    """The object, or the function, that holds a container or a variable."""
    for _ in range(9):  # a limit, since containers may hold each other in a cycle
        if isinstance(x, types.CellType):
            functions = (f for f in found.held if type(f) is types.FunctionType)
            holds = (f for f in functions if any(c is x for c in f.__closure__ or ()))
            return next(holds, x)
        if not isinstance(x, (dict, list, tuple, set, collections.deque)):
            return x
        owners = (owner for box, _, owner in found.snapshots if box is x and owner is not x)
        boxes = (box for box, _, value in found.items if value is x)
        objects = (y for _, y, value in found.reads if value is x)
        x = next((y for some in (owners, objects, boxes) for y in some), x)
    return x


def _owner_name(owner: Any) -> str:
    if isinstance(owner, dict):
        return f"a dict ({owner['__name__']})" if "__name__" in owner else "a dict"
    return "a variable" if isinstance(owner, types.CellType) else name_of(owner)


# -- random numbers


@contextmanager
def nothing_drawn(found: Search) -> Iterator[None]:
    """Refuse seeding, and random numbers that are not torch's.

    Operators in a trace draw nothing. So each generator keeps the known state that it gets here,
    unless the function seeds it. This is checked at each operation that draws, and at the end.
    """
    generators = [torch.default_generator, *found.generators]
    states = [g.get_state() for g in generators]
    for i, g in enumerate(generators):
        g.manual_seed(_SEED + i)
    own = [g.get_state() for g in generators]
    others = [x for x in found.held if issubclass(type(x), random.Random)]
    pythons: list[Any] = [
        (random.getstate, random.setstate),
        *((x.getstate, x.setstate) for x in others),
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        pythons.append((numpy.random.get_state, numpy.random.set_state))
    for x in found.held:  # NumPy's generator objects
        if type(x).__module__.startswith("numpy.random") and hasattr(x, "bit_generator"):
            get = functools.partial(getattr, x.bit_generator, "state")
            pythons.append((get, functools.partial(setattr, x.bit_generator, "state")))
    before = [get() for get, _ in pythons]

    def are_seeded() -> bool:
        with _torch.without_dispatch_modes(), _torch.cleared_interpreter_stack():
            return not all(torch.equal(g.get_state(), state) for g, state in zip(generators, own))

    def check() -> None:
        if are_seeded():
            raise refused("seeds a generator, or sets its state", "Do it outside.")
        with _torch.without_dispatch_modes(), _torch.cleared_interpreter_stack():
            # Advance the generators, so that a later check notices if an earlier state is set.
            for i, g in enumerate(generators):
                torch.empty(1).uniform_(generator=g)
                own[i] = g.get_state()

    try:
        with graphs.asked_at_draws(check):
            yield
        if are_seeded():
            raise TracingError(
                "functx.jit: the function seeds a generator, or sets its state. A graph can't do "
                "that (J4). Do it outside."
            )
        if any(repr(get()) != repr(kept) for (get, _), kept in zip(pythons, before)):
            raise TracingError(
                "functx.jit: the function draws from Python's or NumPy's random. A graph can't do "
                "that (J4). Draw outside, or with torch."
            )
    finally:
        for g, state in zip(generators, states):
            g.set_state(state)
        for (_, put), kept in zip(pythons, before):
            put(kept)
