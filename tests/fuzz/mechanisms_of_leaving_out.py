"""How to take out what the engine does about what replays leave out, keep and let go of.

Each function is a mutation: its documentation says what holds without the mechanism.
"""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from functx import _torch
from functx._remat import (
    _capture,
    _computed,
    _holders,
    _ledger,
    _node,
    _prune,
    _pullback,
    _pulled_back,
    _region,
    _saving,
    _tracker,
    _watch,
    _whole,
)


def _whole_replays(patch: pytest.MonkeyPatch) -> None:
    """A replay that runs other ATen operations than its forward does not begin again."""

    def once(again: Any, tensors: Any, pruned: Any, passing: Any, _: Any, name: str) -> Any:
        try:
            return again(tensors, pruned, passing)
        except _prune.Departed as departure:
            _given_up(name, departure)

    patch.setattr(_region, "replayed", once)


def _given_up(name: str, departure: _prune.Departed) -> NoReturn:
    raise _whole._error(name, str(departure)) from None


def _inputs_that_are_read(patch: pytest.MonkeyPatch) -> None:
    """An input that no tape holds is not kept, whatever reads it."""
    patch.setattr(_ledger.Ledger, "needs", lambda self, storage: False)


def _inputs_on_the_tape(patch: pytest.MonkeyPatch) -> None:
    """An input that nothing reads any more is not kept, though a tape holds it."""
    patch.setattr(_holders.Holders, "grown", lambda self, accumulators: False)


def _views_of_inputs(patch: pytest.MonkeyPatch) -> None:
    """A view that a tape holds is not seen where another tensor over the memory has gone."""

    class Nothing(set[int]):
        def add(self, storage: int) -> None:
            pass

    init = _computed.Computed.__init__

    def forgetful(self: Any) -> None:
        init(self)
        self.viewed = Nothing()

    patch.setattr(_computed.Computed, "__init__", forgetful)
    patch.setattr(_computed.Computed, "take_view", lambda self, t: None)


def _one_inside(patch: pytest.MonkeyPatch) -> None:
    """Who holds a tensor that is inside two wrappers is told as of any other."""
    patch.setattr(_capture, "trust_no_twins", lambda holders: None)


def _what_the_engine_holds(patch: pytest.MonkeyPatch) -> None:
    """Aliases that the engine holds, as a policy may keep them, are taken for a tape's."""
    patch.setattr(_ledger, "engine_holds", lambda: False)


def _nested_regions_draw(patch: pytest.MonkeyPatch) -> None:
    """Draws that no pullback reads are left out, though a region inside comes after them."""
    never = property(lambda self: False, lambda self, value: None)
    patch.setattr(_watch.Watcher, "holds_regions", never)


def _lost_memory(patch: pytest.MonkeyPatch) -> None:
    """What was written to by an operation that did not run is taken for what it was."""
    patch.setattr(_saving.Saver, "lost", lambda self, storage: None)


def _what_can_be_let_go(patch: pytest.MonkeyPatch) -> None:
    """The memory of cotangents goes when it was read, though a derivative may read it again."""
    patch.setattr(_pulled_back, "nobody_differentiates", lambda tensors: True)


def _nodes_apart(patch: pytest.MonkeyPatch) -> None:
    """All results of a region are behind one node."""
    patch.setattr(_node, "nodes_apart", lambda frame, tensors, places: [([*places], set())])


def _what_requires_grad(patch: pytest.MonkeyPatch) -> None:
    """In a replay only that requires grad which a gradient is asked for."""
    init = _pullback.Pullback.__init__

    def asked_for(self: Any, *args: Any) -> None:
        init(self, *args)
        self.requires = self.needs

    patch.setattr(_pullback.Pullback, "__init__", asked_for)


def _transforms_inside(patch: pytest.MonkeyPatch) -> None:
    """What a transform of torch.func in a region wraps is what it was given."""
    patch.setattr(_tracker, "_wrap", _torch.wrap_for_grad)
