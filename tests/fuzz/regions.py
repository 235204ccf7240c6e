"""Regions at random places: functions that read what is around them, and ways to call them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .forms import POLICIES
from .program import Scope
from .small_regions import SmallRegions


@dataclass
class Definition:
    """A function that was written.

    Attributes:
        name: of the function.
        signature: shapes of its arguments.
        results: shapes of its results; ``i`` and ``b`` are integers and truths.
    """

    name: str
    signature: str
    results: list[str] = field(default_factory=list)

    def spread(self, of: str) -> list[str]:
        """The parts of ``of`` that go to its arguments."""
        return [f"{of}[{i}]" for i in range(len(self.signature))]


class Regions(SmallRegions):
    """Writes regions, and transforms of regions."""

    policies = False
    saving = 0
    twice = False
    statement: Callable[[Scope], None]

    def region(self, scope: Scope) -> None:
        """A region: a function with tensors and static arguments, and its call."""
        region = self.definition(scope, arguments=self.choose(3))
        name, options = region.name, self.options()
        tensors = [self.operand(scope, s) for s in region.signature]
        static = f"n={self.pick([1, 2, 3])}, flag={self.pick([True, False])}"
        how = self.pick(["plain", "positional", "partial", "lambda", "twice", "tree", "holder"])
        given = ", ".join([*tensors, static])
        if how == "tree":
            return self._tree(scope, region, tensors, static, options)
        if how == "partial":
            call = f"remat(functools.partial({name}, {static}){options})"
            given = ", ".join(tensors)
        elif how == "lambda":
            call = f"remat(lambda *a: {name}(*a, {static}){options})"
            given = ", ".join(tensors)
        elif how == "twice":
            call = f"remat(remat({name}){options})"
        elif how == "holder":
            call = f"remat(env.holder({name}, {static}){options})"
            given = ", ".join(tensors)
        elif how == "positional":
            call = f"remat({name}{options})"
            given = ", ".join([*tensors, re.sub(r"\w+=", "", static)])
        else:
            call = f"remat({name}{options})"
        if len(region.results) == 1:
            return self._bind(scope, region, [f"{call}({given})"])
        names = [self.fresh("r") for _ in region.results]
        self.emit(scope, f"{', '.join(names)} = {call}({given})")
        return self._bind(scope, region, names)

    def _tree(
        self, scope: Scope, region: Definition, tensors: list[str], static: str, options: str
    ) -> None:
        """Arguments and results in nested structures, beside numbers, strings and None."""
        self.features |= {"pytree argument", "pytree result"}
        a, name, out = self.fresh("a"), self.fresh("region"), self.fresh("out")
        n, flag = re.sub(r"\w+=", "", static).split(", ")
        inner = [f"{a}['k'][{i}][0]" for i in range(len(tensors))]
        steered = f"n={a}['n'], flag={a}['how']['flag'] == 'yes'"
        results = ", ".join(f"r{i}" for i in range(len(region.results)))
        self.emit(
            scope,
            f"def {name}({a}, nothing=None):",
            f"    {results} = {region.name}({', '.join([*inner, steered])})",
            f"    return {{'r': [({results},), 'text'], 'n': {a}['n'], 'nothing': nothing}}",
        )
        how = {"flag": "yes" if flag == "True" else "no", "why": None}
        parts = ", ".join(f"({t}, None, 2.5)" for t in tensors)
        argument = f"{{'k': [{parts}], 'n': {n}, 'how': {how}}}"
        self.emit(scope, f"{out} = remat({name}{options})({argument})")
        self._bind(scope, region, [f"{out}['r'][0][{i}]" for i in range(len(region.results))])

    def _bind(self, scope: Scope, region: Definition, results: list[str]) -> None:
        """Names for the results, of which some may stay unused."""
        self.define(scope, results[0], region.results[0])
        if len(results) > 1:
            self.features.add("several results")
        for text, shape in zip(results[1:], region.results[1:]):
            if self.chance(3):
                self.features.add("unused result")
            elif shape == "b":
                vector = self.operand(scope, "v")
                self.define(scope, f"torch.where({text}, {vector}, {vector} * 0.5)", "v")
            elif shape == "i":
                self.define(scope, f"{self.operand(scope, 'v')} * ({text} + 1)", "v")
            else:
                self.define(scope, text, shape)

    def options(self) -> str:
        """A policy, in programs that have any."""
        if not self.policies or self.chance(3):
            return ""
        self.features.add("policy")
        policy = self.pick([*POLICIES, *["everything_saveable"] * self.saving])
        return f", policy=functx.checkpoint_policies.{policy}"

    def definition(self, scope: Scope, arguments: int) -> Definition:
        """A function that reads what is around it."""
        name = self.fresh("region")
        signature = [self.pick("vvm") for _ in range(arguments)]
        parameters = [self.fresh("p") for _ in signature]
        self.emit(scope, f"def {name}({', '.join([*parameters, 'n=1', 'flag=False'])}):")
        inner = Scope(
            scope.names + list(zip(parameters, signature)), scope.depth + 1, len(scope.names)
        )
        if inner.depth > 3:
            self.features.add("nested")
        if not signature:
            self.features.add("no arguments")
        outside = {n for n, _ in scope.names}
        start = len(self.lines)
        for _ in range(1 + self.choose(3)):
            self.statement(inner)
        if self.chance(2):
            self.static(inner)
        # Its derivative reads its result, so each replay has to compute it once more; what is done
        # with it then may be left out.
        half = self.pick(["", " * 0.5"])
        out = self.define(inner, f"torch.sigmoid({self.operand(inner, 'v')}){half}", "v")
        results, shapes = [out], ["v"]
        while self.chance(3):
            shape, text = self._extra(inner, out, dict(zip(parameters, signature)))
            results.append(text)
            shapes.append(shape)
        self.emit(inner, f"return {', '.join(results)}")
        self._closures("\n".join(self.lines[start:]), scope, outside)
        return Definition(name, "".join(signature), shapes)

    def _extra(self, scope: Scope, out: str, parameters: dict[str, str]) -> tuple[str, str]:
        """One more result: its shape, and what is returned."""
        kind = self.pick(["v", "m", "input", "int", "bool", "again"])
        if kind == "int":
            self.features.add("integer or bool result")
            return "i", f"{out}.argmax()"
        if kind == "bool":
            self.features.add("integer or bool result")
            return "b", f"{out} > {self.operand(scope, 'v')}"
        if kind == "again":
            return "v", out
        if kind == "input" and parameters:
            self.features.add("result that is an input")
            name = next(iter(parameters))
            return parameters[name], name
        shape = kind if kind in ("v", "m") else "v"
        return shape, self.operand(scope, shape)

    def _closures(self, body: str, scope: Scope, outside: set[str]) -> None:
        read = {n for n in outside if _mentions(body, n)}
        if read:
            self.features.add("closure")
        if any(n in read for n, _ in scope.names[: scope.own]):
            self.features.add("closure of several levels")
        if "env.leaf" in body or any(n.startswith("leaf") for n in read):
            self.features.add("closure of a leaf")

    def static(self, scope: Scope) -> None:
        """Code that static arguments steer."""
        self.features.add("static argument")
        old = self.operand(scope, "v")
        name = self.define(scope, f"{old}.sin() if flag else {old}.cos()", "v")
        self.emit(scope, "for _ in range(n):", f"    {name} = torch.tanh({name} * 1.4)")

    def inner_transform(self, scope: Scope) -> None:
        """A transform inside the program, of a region that may close over what is around it.

        The region may be given what is differentiated or mapped, and those in it with it.
        """
        self.inside += 1
        region = self.definition(scope, arguments=self.choose(2))
        self.inside -= 1
        first = "[0]" if len(region.results) > 1 else ""
        t = self.fresh("t")
        given = "".join({"v": t, "m": f"torch.outer({t}, {t})"}[s] for s in region.signature)
        place = f"remat(lambda {t}: {region.name}({given}){first} * {t}.sin(){self.options()})"
        vector = self.operand(scope, "v")
        kind = self.pick(["grad", "jvp", "vmap"])
        library = self.pick(["functx", "torch.func"])
        self.features |= {"inner transform", f"inner {kind}", f"{library} inside"}
        if kind == "grad":
            text = f"{library}.grad(lambda t: {place}(t).sum())({vector})"
        elif kind == "jvp":
            text = f"{library}.jvp({place}, ({vector},), ({self.operand(scope, 'v')},))[1]"
        else:
            rows = self.operand(scope, "m")
            text = f"{library}.vmap({place}, randomness=env.randomness)({rows}).sum(0) * 0.3"
        self.define(scope, text, "v")


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None
