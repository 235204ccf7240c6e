"""One call of a region, as data. The seven rules are in the package's docstring."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from functx import _torch
from functx._remat import departures, levels


class Plans(dict[Any, Any]):
    """The plans of a function with a budget, by what it runs; a copy in a pickle has none."""

    def __reduce__(self) -> Any:
        return Plans, ()


NEVER = 1 << 60  # the number of a call that is not made


@dataclass(frozen=True)
class Options:
    """What a user can say about a region."""

    policy: Any = None  # what to keep beside the inputs; ``None`` for nothing
    preserve_rng_state: bool | str = True  # or "all"
    determinism_check: str = "default"  # or "none"
    debug: bool = False  # whether departures show both logs
    name: str = "a function"  # what messages call it
    early_stop: bool = True  # whether a replay leaves out what no pullback reads
    is_pullback: bool = False  # whether it is the pullback of another region
    budget: Any = None  # bytes, a share of the peak without remat, or a plan
    contexts: Any = None  # the policy as ``torch.compile`` takes it; ``None`` if there is none
    static: Any = None  # positions and names of arguments that are no tensors
    plans: Plans | None = field(default=None, compare=False, repr=False)  # for the budget so far


class Region:
    """What a replay needs to know; it holds no tensor of the program's."""

    title: str  # what messages call it: the function, and the line that called it
    options: Options
    body: Any  # tensors to tensors
    identity: Any  # what tells its function from others; ``None`` if nothing does
    n_args: int  # how many inputs are the body's arguments; the others are captured
    results: list[int]  # which results of the body are different ones
    # What it was called in, and given:
    settings: Any  # what torch had set
    frames: list[levels.Frame]  # the levels around, outermost first
    slots: list[Any]  # for each level above 0, how each of its values is made of those below
    draws: Any  # the generators that it drew from
    made: Any  # the inputs that were made of data, inside: their memory is the region's own
    written: Any  # by the memory that it wrote of its inputs, which inputs lie there
    # What ran:
    calls: list[Any]  # the log
    ran: Any  # the operations, and which of them a replay runs; see `ledger`
    kept: Any  # which entries' values the policy kept
    further: list[int]  # numbers of results that left otherwise than by return
    # Weakly, leaves on the tape that no mode saw. A replay, which reads them by itself, is to find
    # the same ones.
    leaves: Any = ()
    left_behind: Any = types.MappingProxyType({})  # what it made, weakly

    def written_outside(self) -> list[int]:
        """The inputs that the region writes, but those made of data inside."""
        return [i for numbers in self.written for i in numbers if i not in self.made]


class Inputs:
    """The inputs of a forward, level by level, and their stand-ins.

    ``values[k]`` are those at level k. A stand-in is the input taken off the tape of every level
    that differentiates it, and made a leaf there; a constant stands in for itself.
    """

    def __init__(self, frames: list[levels.Frame]) -> None:
        self.frames = frames
        n = len(frames)
        self.values: list[list[Tensor]] = [[] for _ in range(n + 1)]
        self.slots: list[list[Any]] = [[] for _ in range(n + 1)]  # at 0: whether it requires grad
        self.standins: list[Tensor] = []
        self.kinds: list[Any] = []  # of each, how its parts are wrapped, and what they are
        self.memory: list[list[int]] = []  # of each input; of a dual, also that of its tangents
        self.lowest = n + 1  # the lowest level that differentiates something
        self.leaves: dict[int, Tensor] = {}  # of all levels, by id
        self.places: dict[int, tuple[int, int]] = {}  # of each, its level and place there
        self.reached: set[tuple[int, int]] | None = None  # by the results' tape; ``None`` for all

    def admit(self, t: Tensor) -> Tensor:
        """A further input; returns its stand-in."""
        kind: list[Any] = []
        self.memory.append([])
        standin = self._cut(t, len(self.frames), kind)
        self.kinds.append(tuple(kind))
        self.standins.append(standin)
        return standin

    def _cut(self, t: Tensor, k: int, kind: list[Any]) -> Tensor:
        self.values[k].append(t)
        if k == 0:
            required = t.requires_grad
            self.slots[0].append(required)
            self.memory[-1].append(_torch.storage_of(t))
            kind += t.shape, t.dtype, t.device, required
            return self._leaf(levels.detached(t), 0) if required else t
        frame = self.frames[k - 1]
        if frame.kind is levels.JVP and t.requires_grad and _torch.level_of(t) == k:
            raise departures.requires_grad_in_forward_mode(t)
        below, slot = frame.lower(t, k)
        self.slots[k].append(slot)
        kind.append(slot)
        cut = [self._cut(value, k - 1, kind) for value in below]
        if slot and frame.kind is levels.GRAD:
            return self._leaf(_torch.wrap_grad(cut[0], k), k)
        if all(a is b for a, b in zip(cut, below)):
            return t
        return frame.lift(cut, slot, k)

    def _leaf(self, t: Tensor, k: int) -> Tensor:
        levels.require_grad(t)
        self.leaves[id(t)], self.places[id(t)] = t, (k, len(self.values[k]) - 1)
        self.lowest = min(self.lowest, k)
        return t

    def holds(self, t: Tensor) -> bool:
        """Whether a tensor is in the memory of an input."""
        storage = _torch.storage_of(levels.base_of(t))
        return storage != -1 and any(storage in memory for memory in self.memory)

    def has_tangent(self, i: int) -> bool:
        """Whether input ``i`` has a tangent at some level of forward mode."""
        n = len(self.frames)
        kinds = [frame.kind for frame in self.frames]
        return any(
            kinds[k - 1] is levels.JVP and self.slots[k][self.position(i, k)]
            for k in range(1, n + 1)
        )

    def requiring(self, k: int) -> list[int]:
        """Which of the values at level k require grad there, and are what the results depend on."""
        if k and self.frames[k - 1].kind is not levels.GRAD:
            return []
        leaves, reached = [i for i, slot in enumerate(self.slots[k]) if slot], self.reached
        return [i for i in leaves if (k, i) in reached] if reached else leaves

    def position(self, i: int, k: int) -> int:
        """Where input ``i``, which has no tangents, stands among the values of level k."""
        at = i
        for j in range(len(self.frames), k, -1):
            at = sum(self.frames[j - 1].width(slot) for slot in self.slots[j][:at])
        return at
