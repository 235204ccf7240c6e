"""How many programs held what, and how often their regions ran again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from .program import Program
from .runner import Result

KNOWN = "known from a run before"
WITHOUT_REPLAY = "a pullback without a replay"
FEATURES = {
    "operations": (
        *("view", "write", "write to a view", "random", "generator", "random in nested regions"),
        *("no gradient", "hook", "custom function", "custom function of the old style"),
        *("complex", "autocast", "state", "module", "batch norm", "batch norm of given buffers"),
        *("functional call", "autograd.grad inside", "named value", "loop of functx"),
        *("not differentiated", "values read by Python", "tied weights", "parametrization"),
        *("frozen parameter", "custom operator", "tensor subclass", "several dtypes"),
        *("default dtype", "mode", "tensor of size zero", "state of backward passes"),
    ),
    "regions": (
        *("nested", "no arguments", "module region", "static argument", "pytree argument"),
        *("pytree result", "several results", "unused result", "integer or bool result"),
        *("result without a gradient", "empty result"),
        *("result that is an input", "policy", "write to an argument", "escape"),
        *("run before", KNOWN, WITHOUT_REPLAY),
    ),
    "closures": (
        *("closure", "closure of several levels", "closure of a leaf", "rebound"),
        *("rebound number", "closures made in a loop"),
    ),
    "transforms": (
        *("depth 0", "depth 1", "depth 2", "depth 3", "grad", "vmap", "jvp", "vjp", "jacrev"),
        *("jacfwd", "inner grad", "inner vmap", "inner jvp", "functx inside"),
        *("torch.func inside", "remat around transforms"),
        *("random under vmap", "pulled back twice"),
    ),
}
NAMES = [name for names in FEATURES.values() for name in names]


@dataclass
class Census:
    """How many programs held what, how often regions ran again, and what differed.

    Attributes:
        programs: that ran with and without remat.
        refused: further ones that torch itself refuses.
        refusals: further ones that functx refuses, as documented, by what it says.
        features: what was in them.
        stacks: their transforms, innermost first.
        reached: in how many a gradient reached the result of a region that keeps nothing.
        forward: how often regions ran without remat.
        again: how often they ran more often with it.
        failures: programs that differed, and how.
    """

    programs: int = 0
    refused: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    stacks: Counter[str] = field(default_factory=Counter)
    reached: int = 0
    forward: int = 0
    again: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, program: Program, ours: Result, expected: Result) -> None:
        """A program that agreed."""
        self.holds(program)
        self.features.update([KNOWN] if ours.known else [])
        self.features.update([WITHOUT_REPLAY] if ours.without_replay else [])
        self.reached += expected.reached
        self.forward += expected.markers
        self.again += ours.markers - expected.markers

    def holds(self, program: Program) -> None:
        """A program that ran, however it ended."""
        self.programs += 1
        self.features.update(program.features)
        self.stacks[" of ".join(reversed(program.stack)) or "none"] += 1

    def __iadd__(self, other: Census) -> Census:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, Counter):
                mine.update(value)
            elif isinstance(value, dict):
                mine |= value
            else:
                setattr(self, name, mine + value)
        return self

    def share(self, name: str) -> float:
        """Of a feature."""
        return self.features[name] / self.programs

    def __str__(self) -> str:
        lines = [
            f"{self.programs} programs, {self.refused} more that torch refuses, "
            f"{self.refusals.total()} that functx does"
        ]
        lines += [f"  {self.share(name):6.1%}  {name}" for name in NAMES]
        lines.append(
            f"  {self.reached / self.programs:6.1%}  with a gradient through a region; in all, "
            f"regions ran {self.forward} times forward, and {self.again} times again"
        )
        return "\n".join(lines)

    def check(self) -> None:
        """Every feature in one program of twenty, and regions are recomputed."""
        print(self)
        rare = [name for name in NAMES if self.share(name) < 0.05]
        assert not rare, f"rare features: {rare}"
        assert self.refused < 0.1 * self.programs
        assert self.refusals.total() < 0.1 * self.programs
        assert self.reached > 0.25 * self.programs  # without a policy
        assert self.again > self.forward

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(vars(self), indent=1)

    @staticmethod
    def loads(text: str) -> Census:
        """From JSON."""
        read = json.loads(text)
        for name in ("refusals", "features", "stacks"):
            read[name] = Counter(read[name])
        return Census(**read)
