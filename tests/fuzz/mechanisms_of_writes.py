"""How to take out what the engine does about writes, about what leaves a region, or is around it.

Each function is a mutation: its documentation says what holds without the mechanism.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from functx import _torch
from functx._remat import (
    _constant,
    _environment,
    _function,
    _overwritten,
    _record,
    _region,
    _saving,
    _tracker,
    _within_reach,
)


def _writes_of_regions(patch: pytest.MonkeyPatch) -> None:
    """Nothing is done before a region writes to what it did not make."""
    patch.setattr(_overwritten.Writes, "about_to", lambda self, *_: None)


def _values_before_a_write(patch: pytest.MonkeyPatch) -> None:
    """Replays start from what a region has made of an input that no tape knew."""
    patch.setattr(_overwritten.Writes, "_keep_value", lambda self, *_: None)


def _history_before_a_write(patch: pytest.MonkeyPatch) -> None:
    """Nodes keep what has been written to as it has become."""

    def nothing(self: Any, position: int, kind: str, number: int) -> None:
        inputs = _overwritten._inputs(self._region.frames[-1], kind)
        self._owners.setdefault(position, inputs[number])

    patch.setattr(_overwritten.Writes, "_keep_history", nothing)


def _history_of_a_write(patch: pytest.MonkeyPatch) -> None:
    """What a region writes to keeps its history, as the caller sees it."""
    patch.setattr(_region.Region, "write_back", lambda self, distinct: None)


def _copies_to_write_to(patch: pytest.MonkeyPatch) -> None:
    """A replay writes to what the node keeps."""
    patch.setattr(_region, "to_be_written", lambda t: t)


def _readers_of_a_constant(patch: pytest.MonkeyPatch) -> None:
    """What a region found before another one wrote to it is not kept."""

    def alone(self: Any) -> None:
        if self.before is None:
            with _torch.cleared_interpreter_stack():
                self.before = self.value.detach().clone()

    patch.setattr(_constant.Constant, "about_to_be_written", alone)


def _writes_on_record(patch: pytest.MonkeyPatch) -> None:
    """The record takes a write for an operation that makes something."""

    def only_newest(self: Any, number: int, storage: int, before: Any, *, alone: bool) -> None:
        self._writers[storage] = _saving.key_of(number, _saving.IN_PLACE)

    patch.setattr(_record.Record, "_wrote", only_newest)


def _kept_from_before_a_write(patch: pytest.MonkeyPatch) -> None:
    """What a policy keeps is what it has become when the region has ended."""
    patch.setattr(_saving.Saver, "about_to_write", lambda self, written: None)


def _what_leaves(patch: pytest.MonkeyPatch) -> None:
    """What leaves a region otherwise than by return stays on the tape that is thrown away."""
    patch.setattr(_region.Region, "escaped", lambda self, returned: {})


def _containers(patch: pytest.MonkeyPatch) -> None:
    """A replay appends to the lists that the forward appended to."""
    patch.setattr(_function.Body, "forget", lambda self, owners, before: None)


def _results_handed_back(patch: pytest.MonkeyPatch) -> None:
    """A result that is an input is taken for one that the region made."""
    patch.setattr("functx._remat._capture.FirstRun.handed_back", lambda self, out: None)


def _generators_given(patch: pytest.MonkeyPatch) -> None:
    """Only default generators are put back."""
    patch.setattr(_environment.Environment, "given", lambda self, generator: None)


def _autocast(patch: pytest.MonkeyPatch) -> None:
    """A replay runs in what precision there is around it."""
    settings = _environment.settings_and_casts

    def without_casts() -> Any:
        found = [*settings()]
        return type(settings())([*found[:-3], False, torch.bfloat16, True])

    patch.setattr(_environment, "settings_and_casts", without_casts)
    patch.setattr(_environment, "casts", lambda kind: (False, torch.bfloat16, True))


def _state_of_modules(patch: pytest.MonkeyPatch) -> None:
    """What a module binds anew, it binds in each replay."""
    patch.setattr(_environment, "reach", lambda *_: _within_reach.Reached())


def _exported_values(patch: pytest.MonkeyPatch) -> None:
    """Values that Python reads are left out of replays like any other."""
    patch.setattr(_tracker, "tell_of_an_export", lambda t: None)
