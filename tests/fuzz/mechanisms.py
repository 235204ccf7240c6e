"""The mechanisms of the engine, and how to take each one out.

A mutation that no random program notices is a mechanism that nothing tests, or that is not needed.
Names are those of the engine: who renames one changes it here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import functx
from functx import _torch
from functx._remat import (
    _bound,
    _capture,
    _environment,
    _foreign,
    _function,
    _ledger,
    _lenient,
    _prune,
    _pullback,
    _region,
    _step,
    _taken_off,
    _tracker,
)
from functx._remat import _known_runs as _known_runs_
from functx._remat._rules import base, jvp, vmap

from . import mechanisms_of_leaving_out, mechanisms_of_writes

Mutation = Callable[[pytest.MonkeyPatch], None]


def _captures(patch: pytest.MonkeyPatch) -> None:
    """Closed-over tensors stay what they are."""
    patch.setattr(_foreign, "tracked", lambda t: False)


def _nested_captures(patch: pytest.MonkeyPatch) -> None:
    """What an inner region captures is not known to the outer one."""
    patch.setattr(_capture.FirstRun, "_from_outside", lambda self, t: t)


def _custom_functions(patch: pytest.MonkeyPatch) -> None:
    """What ``Function.apply`` is given is not looked at."""

    def swap_nothing(self: Any, func: Any, values: Any) -> Any:
        return values if func is _tracker.custom_function else operands(self, func, values)

    operands = _tracker.Tracker.operands
    patch.setattr(_tracker.Tracker, "operands", swap_nothing)


def _externals(patch: pytest.MonkeyPatch) -> None:
    """A replay reads what it finds, and trusts it."""
    patch.setattr(functx, "remat", _with(determinism_check="none"))
    patch.setattr(_lenient.Lenient, "resolve", lambda self, t: t)


def _random_numbers(patch: pytest.MonkeyPatch) -> None:
    """A replay draws anew."""
    patch.setattr(functx, "remat", _with(preserve_rng_state=False))


def _generators_put_back(patch: pytest.MonkeyPatch) -> None:
    """A replay leaves the generator where the region found it."""
    keep = _environment.Environment._keep

    def moves_on(self: Any, key: Any, read: Any, write: Any) -> None:
        keep(self, key, read, write)
        if key in self._random and self._random[key][0] is read:
            before = self._random[key][2]
            first = [True]

            def only_to_the_start(state: Any) -> None:
                write(before)
                first.clear()

            self._random[key] = (read, only_to_the_start, before)

    patch.setattr(_environment.Environment, "_keep", moves_on)


def _late_binding(patch: pytest.MonkeyPatch) -> None:
    """A replay reads closed-over variables as they are now."""
    patch.setattr(_function, "snapshot", lambda f: {})


def _randomness(patch: pytest.MonkeyPatch) -> None:
    """Every vmap level is entered with one mode of randomness."""
    init = vmap.VmapFrame.__init__

    def same(self: Any, interpreter: Any, *args: Any) -> None:
        init(self, interpreter, *args)
        self.randomness = "same"

    patch.setattr(vmap.VmapFrame, "__init__", same)


def _batch_dimensions(patch: pytest.MonkeyPatch) -> None:
    """Results that are batched elsewhere than in front are taken for batched in front."""
    finish = vmap.VmapFrame.finish

    def unbatched(self: Any, outs: Any, inputs: Any) -> Any:
        return [o if d is None else finish(self, [o], inputs)[0] for o, d in _pairs(self, outs)]

    def _pairs(self: Any, outs: Any) -> Any:
        self.out_dims, dims = [None], self.out_dims
        return zip(outs, dims)

    patch.setattr(vmap.VmapFrame, "finish", unbatched)


def _tangents(patch: pytest.MonkeyPatch) -> None:
    """Results have no tangent."""
    patch.setattr(jvp, "make_dual", lambda primal, tangent: primal)


def _dead_wrappers(patch: pytest.MonkeyPatch) -> None:
    """A wrapper of a level that has ended stays one."""
    patch.setattr(_torch, "unwrap_if_dead", lambda t: t)


def _what_needs_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """Only the first input that needs one gets a gradient."""
    init = _pullback.Pullback.__init__

    def first_only(self: Any, fn: Any, needs: Any, *args: Any) -> None:
        init(self, fn, needs, *args)
        first = self.needs.index(True)
        self.needs = tuple(need and i == first for i, need in enumerate(self.needs))

    patch.setattr(_pullback.Pullback, "__init__", first_only)


def _writes(patch: pytest.MonkeyPatch) -> None:
    """A constant that the body writes to is replayed from what it has become."""
    patch.setattr(_region.Constant, "about_to_be_written", lambda self: None)
    patch.setattr(_region.Constant, "seal", lambda self, name: None)
    patch.setattr(_region.Constant, "for_replay", lambda self, name: self.value)


def _edges(patch: pytest.MonkeyPatch) -> None:
    """A node has an edge to every input, on which a result depends or not."""
    patch.setattr(base.Frame, "reached", lambda self: [True] * len(self.leaves))


def _inner_replays(patch: pytest.MonkeyPatch) -> None:
    """Outer regions are not told what replays inside them leave out."""
    patch.setattr(_prune, "watchers", lambda: iter(()))


def _saved_results(patch: pytest.MonkeyPatch) -> None:
    """A result that a tape holds is left out of replays like any other."""
    patch.setattr(_ledger, "held_by_a_tape", lambda results: False)


def _what_draws_runs(patch: pytest.MonkeyPatch) -> None:
    """Draws that no pullback reads are left out of replays."""
    never = property(lambda self: False, lambda self, value: None)
    patch.setattr(_step.Kind, "draws", never)


def _python_on_the_tape(patch: pytest.MonkeyPatch) -> None:
    """What hooks and custom Functions can reach is left out of replays."""
    patch.setattr(_tracker, "python_on_tape", lambda: None)


def _known_runs(patch: pytest.MonkeyPatch) -> None:
    """A run that calls the same functions as a run before is taken for one that is the same."""
    patch.setattr(_known_runs_.KnownRun, "describes", lambda self, first: True)


def _aliases(patch: pytest.MonkeyPatch) -> None:
    """A replay does not know what was one tensor in the forward, by two names."""
    patch.setattr(_capture.FirstRun, "passed_on", lambda self: [])


def _what_hooks_find(patch: pytest.MonkeyPatch) -> None:
    """Hooks, and backwards of custom Functions, find what the replay has made, as it made it."""
    patch.setattr(_bound.Bound, "give", lambda self, *args: [])


def _what_functions_keep(patch: pytest.MonkeyPatch) -> None:
    """So do the latter."""
    patch.setattr(_taken_off, "_keep", lambda *args: None)


def _recomputing(patch: pytest.MonkeyPatch) -> None:
    """Remat is the identity."""
    patch.setattr(functx, "remat", lambda f, **options: f)


def _with(**more: Any) -> Any:
    remat = functx.remat

    def wrapped(f: Any, **options: Any) -> Any:
        return remat(f, **more, **options)

    return wrapped


def _mutations(module: Any) -> dict[str, Mutation]:
    """Those of a module, by what they take out."""
    return {
        name.removeprefix("_").replace("_", " "): f
        for name, f in vars(module).items()
        if getattr(f, "__module__", None) == module.__name__
        and list(getattr(f, "__annotations__", ())) == ["patch", "return"]
    }


MECHANISMS: dict[str, Mutation] = {
    **_mutations(sys.modules[__name__]),
    **_mutations(mechanisms_of_leaving_out),
    **_mutations(mechanisms_of_writes),
}
