"""What torch operations of a running region are shown to: the mode and its trackers.

While a body runs, a torch-function mode shows every operation to the *tracker* of the region: a
`_capture.FirstRun` or a `_replay.Replay`. One mode serves a whole nest: an inner region's tracker
takes the outer one's place until it ends; the outer sees the inner region as a single operation.

NOTE [transforms of torch.func]
Those wrap their arguments in C++. While a region runs, the one function that they do it with asks
for stand-ins first; elsewhere it is as ever. So is the one that ``vmap`` expands results with.

NOTE [custom functions]
``Function.apply`` passes through no torch-function mode: the class below it asks who is running.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx import _torch, _torch_compiler, _torch_modes, _torch_observed, _torch_vmap
from functx._remat._aliases import Aliases
from functx._remat._answers import Answering
from functx._remat._arguments import LIST, SCALARS, SLICE, TENSOR, token
from functx._remat._custom import applied, is_of_the_users, kept_numbers, nodes_of_function, running
from functx._remat._entry import custom_function, custom_state, nested_transform, results
from functx._remat._functions import asked, known_of
from functx._remat._functions import known as known_functions
from functx._remat._gradients import on_the_tape
from functx._remat._hung_on_given import LEFT
from functx._remat._past_torch import AllHeld
from functx._remat._users_code import OVERRIDING, is_given_code, overridden, seen_again
from functx._remat._watch import python_on_tape, tell_of_an_export, tell_of_indices, watching
from functx._torch import current_graph_task_id, dispatch_mode_depth


class Tracker(Answering):
    """What the first run and a replay do alike for each operation."""

    inside: Any = None  # what the regions inside keep
    # Fewer dispatch modes than where the body began: this is the inside of one of them.
    modes = 0
    seed = 0  # of the generator when the body began
    silent = False  # whether regions and transforms that begin are none of its business
    pulls_back = False  # whether a node's tape is, for none of the functions that users wrote
    looks = False  # whether the body asked how a tensor lies in memory, or wrapped one
    odd = False  # whether it took something whose contents are not compared, or entered a mode
    aliases: Aliases = MappingProxyType({})  # NOTE [aliases] in `_aliases`

    def __init__(self) -> None:
        self._sources: list[int] = []
        self._scalars: list[Any] = []

    def resolve(self, t: Tensor) -> Tensor:
        """The tensor an operation gets for its argument ``t``; notes where it came from."""
        raise NotImplementedError

    def close(self, func: Any) -> None:
        """The arguments of an operation are complete."""
        raise NotImplementedError

    def drawn_from(self, generator: torch.Generator) -> None:
        """An operation is given a generator."""

    def written(self, tensors: Sequence[Tensor]) -> None:
        """Some of these are about to be written to in a region inside this one."""

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operation is about to run on resolved arguments."""

    def enters(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An operation is given code of the user's: its arguments. See `_users_code`."""
        return seen_again(args, kwargs, functools.partial(tracking, self))

    def made(self, t: Tensor) -> None:
        """A tensor was made here."""
        raise NotImplementedError

    def note(self, out: Any) -> None:
        """Remember tensors as made here."""
        if isinstance(out, Tensor):
            self.made(out)
        elif isinstance(out, (list, tuple)):
            for o in out:
                self.note(o)
        elif isinstance(out, dict):
            self.note([*out.values()])

    def swap(self, a: Any) -> Any:
        """``a`` with every tensor resolved."""
        if isinstance(a, Tensor):
            if self._scalars:
                self._scalars.append(TENSOR)
            return self.resolve(a)
        cls = type(a)
        if cls is tuple or isinstance(a, list):
            parts = [self.swap(x) for x in a]
            if cls is not tuple:
                self._scalars.append(LIST)
            if len(a) > 31 or list in map(type, a):  # fewer tensors in a list index as a tuple
                tell_of_indices(parts, cls is tuple)
            # A custom Function may keep a list, and change it. (Others' classes of lists nobody
            # knows how to make.)
            return a if all(map(is_, parts, a)) else tuple(parts) if cls is tuple else parts
        if isinstance(a, SCALARS):
            self._scalars.append(a)
            return a
        if isinstance(a, dict):
            self._scalars += a
            named = {k: self.swap(v) for k, v in a.items()}
            return a if all(map(is_, named.values(), a.values())) else named
        if isinstance(a, torch.Generator):
            self.drawn_from(a)
            self._scalars.append(a.initial_seed())  # of one made here, and seeded otherwise
            return a
        if isinstance(a, slice):
            self._scalars.append(SLICE)
            return slice(self.swap(a.start), self.swap(a.stop), self.swap(a.step))
        if isinstance(a, tuple):  # a named tuple, or torch.Size, which can't be made of stand-ins
            parts = [self.swap(x) for x in a]
            new = hasattr(a, "_fields") and any(p is not x for p, x in zip(parts, a))
            return cls(*parts) if new else a
        if (held := token(a)) is not None:
            self._scalars.append(held)
        self.odd = self.odd or held is None or held.__class__ is AllHeld
        return a

    def operands(self, func: Any, values: Sequence[Any]) -> Any:
        """Resolve the arguments of something that torch-function modes do not see."""
        with tracking(SILENT):  # what finding stand-ins takes is no operation of the body
            swapped = self.swap(values)
        self.close(func)
        return swapped

    def compared(self, func: Any, *numbers: Any) -> None:
        """Numbers that are to be the same in replays."""
        self._scalars += numbers
        self.close(func)

    def returned(self, outs: Sequence[Any]) -> Any:
        """Resolve the results of the body, which has ended."""
        swapped = [None if o is None else self.resolve(o) for o in outs]
        self.close(results)
        return swapped

    def swap_all(self, values: Sequence[Any]) -> list[Any]:
        """``values`` with every tensor resolved."""
        return [self.swap(a) for a in values]

    def swap_named(self, values: dict[str, Any]) -> dict[str, Any]:
        """``values`` with every tensor resolved; their names count, too."""
        self._scalars += values
        return {key: self.swap(a) for key, a in values.items()}

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One operation."""
        try:
            known = known_functions[func]
        except (KeyError, TypeError):
            known = known_of(func)
        if known.python:
            python_on_tape()
        if known.gradients and (done := self.about_gradients(func, args)) is not LEFT:
            return done
        if known.passive:
            if known.instead is not None:
                with tracking(self):
                    return known.instead(*args, **kwargs)
            self.looks = self.looks or known.looks
            if known.exports:
                tell_of_an_export(args[0])
            return func(*args, **kwargs)
        if known.label:
            self.labelled(str(args[0]))
        given, args = args, self.swap_all(args)
        kwargs = self.swap_named(kwargs) if kwargs else kwargs
        if known.draws and (seed := torch.default_generator.initial_seed()) != self.seed:
            self._scalars.append(seed)  # which the body has given it. NOTE [seeds]
        self.close(func)
        if known.given_code and is_given_code(args, kwargs):
            args, kwargs = self.enters(args, kwargs)
        if kwargs or known.writes:
            self.before(func, args, kwargs)
        if known.exports:
            for t in known.exports(args, kwargs):
                tell_of_an_export(t)
        if known.differentiates:
            args, kwargs, func = on_the_tape(given, args, kwargs)
        out = self.execute(func, args, kwargs)
        if out.__class__ is Tensor:
            self.made(out)
        else:
            self.note(out)
        if known.custom:
            if known.gradients:
                self.hung(out)
            else:
                self.keeps_numbers(out, (args, kwargs))
        return out

    def keeps_numbers(self, out: Any, args: Any) -> None:
        """What a custom Function, or operator, keeps is to be the same in replays."""
        with tracking(SILENT):
            nodes = nodes_of_function(out)
            kept = kept_numbers(nodes, out, args)
            self.keepers = [*self.keepers, *filter(is_of_the_users, nodes)]
        if kept:
            self._scalars += kept
            self.close(custom_state)

    def labelled(self, label: str) -> None:
        """What begins is called so in profiles."""

    def execute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An operation that was recorded, on resolved arguments."""
        return func(*args, **kwargs)


class Silent(Tracker):
    """The engine's own operations: nobody watches."""

    silent = True

    def operands(self, func: Any, values: Sequence[Any]) -> Any:
        return values

    def note(self, out: Any) -> None:
        pass

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


SILENT = Silent()
_NOTHING: dict[str, Any] = {}


class RegionMode(TorchFunctionMode):
    """Shows every operation of this thread to the region that is running."""

    tracker: Tracker
    only_observes = True

    @_torch_compiler.uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Hand the operation to the tracker.

        Dispatch modes, and operators written in Python that the engine runs, come by here with
        what they work on; only their callers' operations count.
        """
        tracker = self.tracker
        if (depth := dispatch_mode_depth()) > tracker.modes:
            tracker.odd = True  # the body has entered one
        if depth < tracker.modes or (
            current_graph_task_id() != -1 and _torch.inside_dispatcher() and not asked(func)
        ):
            return func(*args, **(kwargs or {}))
        if types and OVERRIDING[types] and not tracker.silent:
            with tracking(tracker):
                return overridden(func, types, args, kwargs or _NOTHING)
        return tracker.run(func, args, kwargs or _NOTHING)


def _active_mode() -> RegionMode | None:
    for i in range(_torch.function_mode_depth() - 1, -1, -1):
        if isinstance(mode := _torch.get_function_mode_at(i), RegionMode):
            return mode
    return None


def active_tracker() -> Tracker | None:
    """The tracker of the region that is running in this context, if any."""
    mode = _active_mode()
    return None if mode is None or mode.tracker.silent else mode.tracker


def listener() -> Tracker | None:
    """Who is told what a region that has ended ran: that tracker, or one that only listens."""
    mode = _active_mode()
    return None if mode is None or mode.tracker is SILENT else mode.tracker


class tracking:
    """Run the enclosed code as the body of a region, watched by ``tracker`` alone."""

    _lower: RegionMode | None = None
    _watching: watching | None = None
    _idle = _pushed = False

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        tracker = self._tracker
        silent = tracker is SILENT
        depth, dispatching = _torch.function_mode_depth(), _torch.dispatch_mode_depth()
        if silent and not (depth or dispatching):
            self._idle = True  # there is nobody to watch
            return
        if not silent:
            tracker.seed = torch.default_generator.initial_seed()
        self._engine, running.engine = running.engine, silent
        if dispatching:
            self._watching = watching(not silent)
            self._watching.__enter__()
        if depth:
            lower = _active_mode()
            on_top = lower is not None and _torch.get_function_mode_at(depth - 1) is lower
            if lower is not None:
                self._lower, self._outer = lower, lower.tracker
                # Under a mode of the user's, which works on what it is shown: that is not for it.
                lower.tracker = tracker if on_top else SILENT
            if on_top:
                return
        if not silent:
            while OBSERVERS:
                OBSERVERS.pop()()
            mode = RegionMode.__new__(RegionMode)
            mode.tracker = tracker
            _torch_modes.push_function_mode(mode)
            self._pushed = True
            _torch_observed.observe_wrapping(_wrap)

    def __exit__(self, *exc: Any) -> None:
        if self._idle:
            return
        if self._pushed:
            _torch_observed.stop_observing_wrapping()
            _torch_modes.pop_function_mode()
        if self._lower is not None:
            self._lower.tracker = self._outer
        running.engine = self._engine
        if self._watching is not None:
            self._watching.__exit__(*exc)


def _wrap(t: Any, level: int) -> Any:
    """What a transform of torch.func wraps for its level: never a foreign tensor itself."""
    tracker = active_tracker()
    t = t if tracker is None else tracker.operands(nested_transform, [t])[0]
    return _torch.wrap_for_grad(t, level)


def _unbatched(t: Tensor, remove: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``vmap`` returns for ``t``: an operation like any other."""
    if (tracker := active_tracker()) is None:
        return remove(t)
    out = remove(tracker.operands(nested_transform, [t])[0])
    tracker.note(out)
    return out


def observe_custom_functions() -> None:
    """NOTE [custom functions]."""
    base = _torch.SingleLevelFunction
    if "apply" in base.__dict__:
        return

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        plain = super(base, cls).apply  # type: ignore[misc]
        plain = functools.partial(plain, **kwargs) if kwargs else plain
        tracker = active_tracker()
        if tracker is None:
            return applied(cls, plain, args)
        python_on_tape()
        out = applied(cls, plain, args := tracker.operands(custom_function, args))
        tracker.note(out)
        tracker.keeps_numbers(out, args)
        return out

    base.apply = classmethod(apply)  # type: ignore[attr-defined]


def _unseen(make: Callable[[], Any]) -> Any:
    with tracking(SILENT):
        return make()


OBSERVERS = [
    observe_custom_functions,
    lambda: _torch_vmap.observe_results(_unbatched),
    lambda: _torch_observed.wrap_what_is_made_once(lambda make: functools.partial(_unseen, make)),
]
"""What is called when the first region runs, and never again."""
