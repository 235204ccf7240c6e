"""How many programs held what, and how often their regions ran again."""

from __future__ import annotations

from collections import Counter

from .runner import Result
from .writer import Program

FEATURES = [
    *(
        "view",
        "write",
        "state",
        "random",
        "no gradient",
        "module",
        "module region",
        "custom function",
    ),
    *(
        "hook",
        "rebound",
        "rebound number",
        "nested",
        "no arguments",
        "closure",
        "closure of several levels",
    ),
    *("closure of a leaf", "static argument", "several results", "pytree argument"),
    *("inner transform", "remat around transforms"),
    *("depth 0", "depth 1", "depth 2", "depth 3"),
    *("grad", "vmap", "jvp", "vjp", "jacrev", "jacfwd"),
]


class Census:
    """How many programs held what, and how often regions ran again."""

    def __init__(self) -> None:
        self.programs = self.refused = 0
        self.features: Counter[str] = Counter()
        self.reached = self.forward = self.again = 0

    def add(self, program: Program, ours: Result, expected: Result) -> None:
        self.programs += 1
        self.features.update(program.features)
        self.reached += expected.reached
        self.forward += expected.markers
        self.again += ours.markers - expected.markers

    def __str__(self) -> str:
        lines = [f"{self.programs} programs, {self.refused} more that torch refuses"]
        lines += [f"  {self.features[name] / self.programs:6.1%}  {name}" for name in FEATURES]
        lines.append(
            f"  {self.reached / self.programs:6.1%}  with a gradient through a region; in all, "
            f"regions ran {self.forward} times forward, and {self.again} times again"
        )
        return "\n".join(lines)

    def check(self) -> None:
        """Every feature in one program of twenty, and regions are recomputed."""
        print(self)
        rare = [n for n in FEATURES if self.features[n] < 0.05 * self.programs]
        assert not rare, f"rare features: {rare}"
        assert self.refused < 0.2 * self.programs
        assert self.reached > 0.5 * self.programs
