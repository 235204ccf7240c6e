"""The data of one call of a region. The seven rules are in the docstring of the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from functx import _torch
from functx._remat import departures, levels
from functx._remat.calls import Call
from functx._remat.guard import Settings

if TYPE_CHECKING:
    from functx._remat.script import Script


class Plans(dict[Any, Any]):
    """The plans of a function with a budget, by the kinds of its runs. A pickled copy is empty."""

    def __reduce__(self) -> Any:
        return Plans, ()


NEVER = 1 << 60  # the number of a call that is not made


@dataclass(frozen=True)
class Options:
    """The options of a region."""

    policy: Any = None  # which values to save in addition to the inputs; ``None`` for none
    preserve_rng_state: bool | str = True  # or "all"
    determinism_check: str = "default"  # or "none"
    debug: bool = False  # whether errors show both logs
    name: str = "a function"  # the name of the function in messages
    early_stop: bool = True  # whether a replay leaves out operations that the pullback doesn't need
    is_pullback: bool = False  # whether it is the pullback of another region
    budget: Any = None  # bytes, a share of the peak without remat, or a plan
    contexts: Any = None  # the policy in the form for ``torch.compile``; ``None`` without a policy
    static: Any = None  # positions and names of arguments that are not tensors
    varies: bool = False  # whether most runs make other calls, so that each run is recorded
    plans: Plans | None = field(default=None, compare=False, repr=False)  # plans for the budget
    follows: bool = field(init=False, compare=False, repr=False)  # whether runs follow scripts
    scripts: Any = field(default=None, compare=False, repr=False)  # of earlier runs; see `script`

    def of(self, name: str, scripts: Any) -> Options:
        """A copy with another name and scripts, in less time than with `dataclasses.replace`."""
        new: Options = object.__new__(Options)
        new.__dict__.update(self.__dict__, name=name, scripts=scripts)
        return new

    def __post_init__(self) -> None:
        follows = self.policy is None and self.determinism_check != "none" and not self.varies
        object.__setattr__(self, "follows", follows)


class Region:
    """The data that a replay needs. It does not hold tensors of user code."""

    # Set when it is called:
    title: Any  # for messages: the function, and the line that called it
    options: Options
    scripts: Any  # of earlier runs; ``None`` if each run is recorded
    body: Any  # takes tensors, returns the results of the function
    cells: Any = None  # the cells of the closure and their contents; see `cells`
    n_args: int  # the number of inputs that are arguments; the other inputs were captured
    settings: Settings  # the settings of torch at the call
    frames: Sequence[levels.Frame] = ()  # the levels at the call, outermost first
    draws: Any = None  # the generators that it drew from; ``None`` if no state is restored
    # Set when it has run:
    script: Script  # its calls and its operations
    slots: list[Any]  # for each level above 0, how its values are made of those below
    # For each storage of inputs that it wrote to, the inputs in that storage:
    written: Sequence[list[int]] = ()
    changed: Mapping[int, Call] = {}  # calls with other numbers than those of the script
    kept: Any = None  # the entries whose values the policy saved; ``None`` without a policy
    further: Sequence[int] = ()  # the numbers of tensors that left without being returned
    # Weak references to leaves on the tape that no mode saw. A replay reads them by itself, and
    # must find the same leaves.
    leaves: Sequence[Any] = ()
    left_behind: Sequence[Any] = ()  # weak references to tensors that it made

    def calls(self) -> list[Call]:
        """The log of its forward."""
        if not self.changed:
            return self.script.calls
        return [self.changed.get(i, call) for i, call in enumerate(self.script.calls)]

    def written_outside(self) -> list[int]:
        """The inputs that the region writes to, except for those made inside, of data."""
        made = self.script.made
        return [i for numbers in self.written for i in numbers if i not in made]


class Inputs:
    """The inputs of a forward, level by level, and their stand-ins.

    ``values[k]`` are the inputs at level k. A stand-in is the input, taken off the tape of every
    level that differentiates it, and made a leaf there. A constant is its own stand-in.
    """

    __slots__ = (
        *("frames", "has_inference", "kinds", "leaves", "lowest", "nodes", "places", "reached"),
        *("slots", "standins", "stored", "values"),
    )

    def __init__(self, frames: Sequence[levels.Frame]) -> None:
        self.frames = frames
        n = len(frames)
        self.values: list[list[Tensor]] = [[]]
        self.slots: list[list[Any]] = [[]]  # at level 0: whether each value requires grad
        for _ in frames:
            self.values.append([])
            self.slots.append([])
        self.standins: list[Tensor] = []
        self.has_inference = False  # whether an inference tensor is among them
        # For each input its wrappers, and the shape, dtype, device and requires_grad inside:
        self.kinds: list[Any] = []
        # For each input the plain tensors inside its wrappers (two for a dual):
        self.stored: list[Sequence[Tensor]] = []
        self.lowest = n + 1  # the lowest level that differentiates something
        self.leaves: dict[int, Tensor] = {}  # the leaves of all levels, by id
        self.places: dict[int, tuple[int, int]] = {}  # of each leaf, by id: its level and index
        # The places of the leaves that the results' tape leads to; ``None`` for all:
        self.reached: set[tuple[int, int]] | None = None
        self.nodes = 0  # the number of nodes that making stand-ins has made, in forward mode

    @classmethod
    def at_the_base(cls, values: list[Tensor], standins: list[Tensor]) -> Inputs:
        """Inputs without levels, for stand-ins that exist already. The lists are not copied."""
        inputs = cls(())
        inputs.values, inputs.standins = [values], standins
        for i, (t, standin) in enumerate(zip(values, standins)):
            required = t.requires_grad
            inputs.kinds.append((t.shape, t.dtype, t.device, required))
            inputs.stored.append((t,))
            inputs.slots[0].append(required)
            inputs.has_inference = inputs.has_inference or t.is_inference()
            if required:
                inputs.leaves[id(standin)], inputs.places[id(standin)] = standin, (0, i)
                inputs.lowest = 0
        return inputs

    def admit(self, t: Tensor) -> Tensor:
        """Add a further input; returns its stand-in."""
        if self.frames:
            kind, stored = list[Any](), list[Tensor]()
            first_node = _torch.next_sequence_number()
            standin = self._cut(t, len(self.frames), kind, stored)
            self.nodes += _torch.next_sequence_number() - first_node
            self.kinds.append(tuple(kind))
            self.stored.append(stored)
        else:  # the same as in `_cut` at level 0
            standin, required = t, t.requires_grad
            if t.is_inference():
                self.has_inference = True
            self.kinds.append((t.shape, t.dtype, t.device, required))
            self.stored.append((t,))
            self.values[0].append(t)
            self.slots[0].append(required)
            if required:
                standin = levels.detached(t) if _torch.dispatch_depth() else t.detach()
                standin.requires_grad_()
                self.leaves[id(standin)] = standin
                self.places[id(standin)] = 0, len(self.values[0]) - 1
                self.lowest = 0
        self.standins.append(standin)
        return standin

    def memory(self) -> list[list[int]]:
        """The memory of each input."""
        return [[*map(_torch.storage_of, stored)] for stored in self.stored]

    def take_back(self, sizes: list[int]) -> None:
        """Undo the last `admit`. ``sizes`` has the number of values of each level before it."""
        self.standins.pop()
        self.kinds.pop()
        self.stored.pop()
        for n, values, slots in zip(sizes, self.values, self.slots):
            del values[n:], slots[n:]
        for key in [key for key, (k, i) in self.places.items() if i >= sizes[k]]:
            del self.places[key], self.leaves[key]

    def _cut(self, t: Tensor, k: int, kind: list[Any], stored: list[Tensor]) -> Tensor:
        self.values[k].append(t)
        if k == 0:
            required = t.requires_grad
            self.slots[0].append(required)
            stored.append(t)
            self.has_inference = self.has_inference or t.is_inference()
            kind += t.shape, t.dtype, t.device, required
            return self._leaf(levels.detached(t), 0) if required else t
        frame = self.frames[k - 1]
        if frame.kind is levels.JVP and t.requires_grad and _torch.level_of(t) == k:
            raise departures.requires_grad_in_forward_mode(t)
        below, slot = frame.lower(t, k)
        self.slots[k].append(slot)
        kind.append(slot)
        cut = [self._cut(value, k - 1, kind, stored) for value in below]
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

    def has_tangent(self, i: int) -> bool:
        """Whether input ``i`` has a tangent at some level of forward mode."""
        n = len(self.frames)
        kinds = [frame.kind for frame in self.frames]
        return any(
            kinds[k - 1] is levels.JVP and self.slots[k][self.position(i, k)]
            for k in range(1, n + 1)
        )

    def requiring(self, k: int) -> list[int]:
        """The values at level k that require grad there and that the results depend on."""
        leaves, reached = self.leaves_at(k), self.reached
        return [i for i in leaves if (k, i) in reached] if reached else leaves

    def leaves_at(self, k: int) -> list[int]:
        """The values at level k that require grad there."""
        if k and self.frames[k - 1].kind is not levels.GRAD:
            return []
        return [i for i, slot in enumerate(self.slots[k]) if slot]

    def position(self, i: int, k: int) -> int:
        """The index among the values of level k of input ``i``, which must not have tangents."""
        at = i
        for j in range(len(self.frames), k, -1):
            at = sum(self.frames[j - 1].width(slot) for slot in self.slots[j][:at])
        return at
