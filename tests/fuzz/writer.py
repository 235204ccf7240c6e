"""Write random programs as Python source, so that a failure prints as something to run.

A program is ``build(remat, env) -> f``, with ``f`` from a vector of three numbers to one or more
tensors. Every choice is drawn from ``choose``, so that it can be shrunk. Names are never used
twice, and every tensor has one of three shapes: no dimension, ``(3,)`` or ``(3, 3)``.

Each program has a few kinds of statements that it uses often, and lacks most of the others: so
rare things meet, which they would not if all programs had a little of everything (Groce et al.,
*Swarm testing*, ISSTA 2012).
"""

from __future__ import annotations

import random

from .families import FAMILIES, LATE
from .forms import SHAPES
from .further import FURTHER, Further
from .program import Program, Scope

# Depth of the stack of transforms to how many statements may hold others: time grows with both.
BUDGETS = {0: 12, 1: 10, 2: 7, 3: 4}
DEPTHS = [0, 1, 2, 0, 1, 0, 2, 1, 0, 1, 3, 0]
BEFORE = ["same", "leaf", "input", "batch"]
TRANSFORMS = ["grad", "vmap", "jvp", "vjp", "jacrev", "vmap", "jvp", "jacfwd"]


class Writer(Further):
    """Draws a program."""

    def program(self) -> Program:
        """The whole."""
        family = self.pick(FAMILIES) if self.chance(8) else None
        depth = self.pick(DEPTHS)
        self.budget = BUDGETS[depth]
        self.stack = tuple(self.pick(TRANSFORMS) for _ in range(depth))
        self.policies = self.chance(3)
        self._choose_kinds()
        self.lines = ["def build(remat, env):", "    kept = env.kept"]
        outer = Scope([], 1, 0)
        for i in range(1 + self.choose(2)):
            shape = self.pick("vms") if i else "v"
            self.emit(outer, f"leaf{i} = env.leaf({SHAPES[shape]})")
            outer.names.append((f"leaf{i}", shape))
        if self.chance(3):
            self.features.add("not differentiated")
            self.emit(outer, "constant = env.constant")
            outer.names.append(("constant", "v"))
        self.emit(outer, "def f(x):")
        names = [*outer.names, ("x", "v")]
        if self.chance(3):
            # As the input, under the same transforms; but no derivative flows to it.
            self.features.add("not differentiated")
            self.emit(Scope(names, 2, 0), "given = x.detach()")
            names.append(("given", "v"))
        body = Scope(names, 2, len(names))
        for _ in range(1 + self.choose(3)):
            self.statement(body)
        getattr(self, family or "region")(body)
        used = next(
            n
            for n, s in body.names[::-1]
            if s == "v" and n not in ("x", "leaf0", "constant", "given")
        )
        for _ in range(self.choose(3)):
            self.statement(body)
        results = [f"{self.operand(body, 'v')} * 0.5 + {used}.sin()"]
        if self.chance(3):
            results.append(self.operand(body, "m"))
        program = self._around(depth)
        # Drawn when all else has been: a number whose program lacks it has the program that it had
        # before there was any.
        if self.more and self.chance(10):
            getattr(self, self.pick(LATE))(body)
            results[0] += f" + {body.names[-1][0]}.sin()"
        # And this behind that: less of it where transforms make all of it take longer.
        for _ in range((2 if depth < 2 else 1) if self.more and self.chance(2) else 0):
            getattr(self, self.pick(FURTHER))(body)
            results[0] += f" + {body.names[-1][0]}.cos()"
        # Last, so that all other numbers mean what they meant: it was in less than 5 % of them.
        if self.more and self.chance(25):
            self.empty_result(body)
            results[0] += f" + {body.names[-1][0]}.tanh()"
        # And this, where each backward pass calls each hook once, and there are two of them.
        if self.more and self.at_base and self.chance(4):
            self.counted(body)
            results[0] += f" + {body.names[-1][0]}.sinh()"
            program.twice = True
            program.features.add("pulled back twice")
        self.emit(body, f"return {', '.join(results)}")
        self.emit(outer, "return f")
        program.source = "\n".join(self.lines) + "\n"
        return program

    def _choose_kinds(self) -> None:
        special = [
            *(self.write, self.view_write, self.noise, self.generator, self.cut, self.module),
            *(self.function, self.hook, self.rebind, self.late, self.in_a_loop, self.norm),
            *(self.autocast, self.complex, self.swapped, self.loop, self.overwritten),
            *(self.named, self.inner_transform, self.inner_transform),
        ]
        at_base = [
            *(self.state, self.norm, self.old_function, self.export, self.autograd, self.escape),
            *(self.old_function, self.export, self.escape),
        ]
        chosen = [self.pick(special) for _ in range(3)]
        if self.at_base:
            chosen += [self.pick(at_base) for _ in range(3)]
        if "vmap" in self.stack and not self.chance(3):
            chosen.append(self.noise)
        if self.policies and self.chance(2):
            # What regions inside a gradient leave out, a policy around it may keep.
            self.saving = 12
            chosen += [self.inner_transform] * 2
        self.kinds = [self.operation, self.operation, self.view, *chosen, *chosen]

    def statement(self, scope: Scope) -> None:
        """One statement of any kind."""
        self.budget -= 1
        kinds = list(self.kinds)
        if self.budget > 0 and scope.depth < 5:
            kinds += [self.region] * 4
        elif self.inner_transform in kinds:
            kinds = [k for k in kinds if k != self.inner_transform]
        self.pick(kinds)(scope)

    def _around(self, depth: int) -> Program:
        """The transforms around what is written, in a program that has no source yet."""
        places = tuple(p for p in range(depth + 1) if self.chance(4))
        if places:
            self.features.add("remat around transforms")
        randomness = self.pick(["different", "same", "different"])
        if self.features & {"random", "generator"} and "vmap" in (*self.stack, *self._inner()):
            self.features.add("random under vmap")
        twice = self.chance(6) or self.twice
        if twice:
            self.features.add("pulled back twice")
        before = "" if self.chance(3) else self.pick(BEFORE)
        self.features |= {f"depth {depth}", *self.stack, *["run before"][: len(before)]}
        return Program(
            "",
            self.features,
            self.stack,
            places,
            randomness,
            self.pick(["functx", "torch.func"]),
            twice,
            before,
        )

    def _inner(self) -> set[str]:
        return {feature.removeprefix("inner ") for feature in self.features}


def numbered(number: int) -> Program:
    """The random program of a number: the same wherever it is written."""
    return from_choices(recorded(number))


def recorded(number: int) -> list[int]:
    """The choices of the program of a number."""
    numbers, choices = random.Random(number), []

    def choose(n: int) -> int:
        choices.append(int(numbers.random() * n))
        return choices[-1]

    Writer(choose, more=True).program()
    return choices


def from_choices(choices: list[int]) -> Program:
    """The program of these choices; the simplest where they end."""
    rest = iter(choices)
    return Writer(lambda n: min(next(rest, 0), n - 1), more=True).program()
