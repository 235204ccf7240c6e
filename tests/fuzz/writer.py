"""Write random programs as Python source, so that a failure prints as something to run.

A program is ``build(remat, env) -> f``, with ``f`` from a vector of three numbers to one or more
tensors. Every choice is drawn from ``choose``, so that hypothesis can shrink it. Names are never
used twice, and every tensor has one of three shapes: no dimension, ``(3,)`` or ``(3, 3)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .forms import CUT, MIXED, RANDOM, SAME, SHAPES, VIEWS, WRITES


@dataclass
class Scope:
    """Names visible in a function body, with their shapes; the last are its own."""

    names: list[tuple[str, str]]
    depth: int
    own: int  # names from here on may be rebound


@dataclass
class Program:
    """A random program.

    Attributes:
        source: defines ``build``.
        features: what is in it.
        stack: transforms around it, innermost first.
        places: where remat goes around: 0 around the function, ``i`` around ``i`` transforms.
        randomness: of every vmap.
        library: ``functx`` or ``torch.func``, for the transforms of the stack.
    """

    source: str
    features: set[str]
    stack: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    randomness: str = "different"
    library: str = "functx"

    def __str__(self) -> str:
        return (
            f"# transforms {self.stack} of {self.library}, innermost first; remat at "
            f"{self.places}; randomness={self.randomness!r}\n{self.source}"
        )

    __repr__ = __str__


@dataclass
class Writer:
    """Draws a program."""

    choose: Callable[[int], int]
    lines: list[str] = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    count: int = 0
    budget: int = 26
    stateful: bool = False

    def pick(self, options: Sequence[Any]) -> Any:
        """One of the options; the first is the simplest."""
        return options[self.choose(len(options))]

    def chance(self, one_in: int) -> bool:
        """True once in so many times."""
        return self.choose(one_in) == one_in - 1

    def fresh(self, prefix: str = "v") -> str:
        """A name that was not used yet."""
        self.count += 1
        return f"{prefix}{self.count}"

    def emit(self, scope: Scope, text: str) -> None:
        """Write one line in the body of a scope."""
        self.lines.append("    " * scope.depth + text)

    def operand(self, scope: Scope, shape: str) -> str:
        """A name of that shape, or an expression that makes one of what there is."""
        names = [n for n, s in scope.names if s == shape]
        if names:
            # The newest ones more often, so that results are used.
            return self.pick(names[::-1][:3]) if not self.chance(3) else self.pick(names)
        vector = self.operand(scope, "v")
        return {"s": f"{vector}.sum()", "m": f"torch.outer({vector}, {vector})"}[shape]

    def fill(self, scope: Scope, form: tuple[str, str, str]) -> tuple[str, str]:
        """An expression of a form, and its shape."""
        text, operands, result = form
        shape = self.pick("vms") if "x" in operands else ""
        names = [self.operand(scope, shape or s) for s in operands]
        return text.format(*names, shape=SHAPES[shape or result]), shape or result

    def define(self, scope: Scope, text: str, shape: str) -> str:
        """A new name for an expression."""
        name = self.fresh()
        self.emit(scope, f"{name} = {text}")
        scope.names.append((name, shape))
        return name

    def statement(self, scope: Scope) -> None:
        """One statement of any kind."""
        self.budget -= 1
        kinds = [
            self.operation,
            self.operation,
            self.operation,
            self.view,
            self.write,
            self.noise,
            self.cut,
            self.module,
            self.function,
            self.hook,
            self.rebind,
            self.late,
        ]
        if self.stateful:
            kinds += [self.state, self.state]
        if self.budget > 0 and scope.depth < 5:
            kinds += [self.region] * 4 + [self.inner_transform]
        self.pick(kinds)(scope)

    def operation(self, scope: Scope) -> None:
        """An operation without side effects."""
        self.define(scope, *self.fill(scope, self.pick(SAME + MIXED)))

    def view(self, scope: Scope) -> None:
        """A view."""
        self.features.add("view")
        self.define(scope, *self.fill(scope, self.pick(VIEWS)))

    def write(self, scope: Scope) -> None:
        """A fresh tensor, and a write to it or to a view of it."""
        self.features.add("write")
        text, target, source = self.pick(WRITES)
        shape = self.pick("vms") if target == "x" else target
        reads = self.operand(scope, shape if source == "x" else source)
        # As batched as what is written to it, or vmap refuses.
        name = self.define(
            scope, f"{self.operand(scope, shape)} * 0.7 + {reads}.sum() * 0.1", shape
        )
        self.emit(scope, text.format(name, reads))

    def noise(self, scope: Scope) -> None:
        """A random number."""
        self.features.add("random")
        shape = self.pick("vms")
        text = self.pick(RANDOM).format(self.operand(scope, shape), shape=SHAPES[shape])
        self.define(scope, text, shape)

    def cut(self, scope: Scope) -> None:
        """Detached values, and blocks without gradient."""
        self.features.add("no gradient")
        shape = self.pick("vms")
        if self.chance(2):
            name = self.fresh()
            text, shape = self.fill(scope, self.pick(SAME))
            self.emit(scope, "with torch.no_grad():")
            self.emit(scope, f"    {name} = {text}")
            scope.names.append((name, shape))
        else:
            self.define(scope, self.pick(CUT).format(self.operand(scope, shape)), shape)

    def module(self, scope: Scope) -> None:
        """A module with parameters: as a region, or inside one."""
        self.features.add("module")
        net = self.pick(["env.linear", "env.mlp", "env.noisy"])
        if net == "env.noisy":
            self.features.add("random")
        call = f"{net}({self.operand(scope, 'v')})"
        if self.chance(2):
            call = f"remat({net})({self.operand(scope, 'v')})"
            self.features.add("module region")
        self.define(scope, call, "v")

    def state(self, scope: Scope) -> None:
        """A buffer that advances."""
        self.features.add("state")
        vector = self.operand(scope, "v")
        self.emit(scope, f"env.buffer.mul_(0.5).add_({vector}.detach())")
        self.define(scope, f"{self.operand(scope, 'v')} * env.buffer.clone()", "v")

    def function(self, scope: Scope) -> None:
        """An autograd.Function with a backward of its own."""
        self.features.add("custom function")
        shape = self.pick("vms")
        a, b = self.operand(scope, shape), self.operand(scope, shape)
        self.define(scope, f"env.function({a}, {b})", shape)

    def hook(self, scope: Scope) -> None:
        """A hook on an intermediate."""
        self.features.add("hook")
        name = self.define(scope, *self.fill(scope, self.pick(SAME)))
        self.emit(scope, f"env.hook({name})")

    def rebind(self, scope: Scope) -> None:
        """A name that means something else from here on: closures of regions before must not."""
        own = scope.names[scope.own :]
        if not own:
            return self.operation(scope)
        self.features.add("rebound")
        name, _ = self.pick(own[::-1])
        return self.emit(scope, f"{name} = {name} * 0.9 + 0.05")

    def late(self, scope: Scope) -> None:
        """A number that a region closes over, and that means something else from here on."""
        self.features.add("rebound number")
        number, name = self.fresh("k"), self.fresh("region")
        vector = self.operand(scope, "v")
        self.emit(scope, f"{number} = {self.pick([0.8, 1.2])}")
        self.emit(scope, f"def {name}():")
        self.emit(scope, f"    return torch.sigmoid({vector} * {number})")
        self.define(scope, f"remat({name})()", "v")
        self.emit(scope, f"{number} = -0.4")

    def region(self, scope: Scope) -> None:
        """A region: a function with tensors and static arguments, and its call."""
        name, results = self.definition(scope, arguments=self.choose(3))
        call = f"remat({name})"
        tensors = [self.operand(scope, s) for s in self.signature]
        static = f"n={self.pick([1, 2, 3])}, flag={self.pick([True, False])}"
        how = self.pick(["plain", "positional", "partial", "lambda", "twice", "tree", "holder"])
        if how == "tree" and tensors:
            self.features.add("pytree argument")
            a = self.fresh("a")
            spread = ", ".join(f"{a}['k'][{i}]" for i in range(len(tensors)))
            call = f"remat(lambda {a}: {name}({spread}, {static}))"
            tensors, static = [f"{{'k': [{', '.join(tensors)}]}}"], ""
        elif how == "partial":
            call, static = f"remat(functools.partial({name}, {static}))", ""
        elif how == "lambda":
            call, static = f"remat(lambda *a: {name}(*a, {static}))", ""
        elif how == "twice":
            call = f"remat(remat({name}))"
        elif how == "holder":
            call, static = f"remat(env.holder({name}, {static}))", ""
        elif how == "positional":
            tensors += [static.split(",")[0][2:], static.split("=")[2]]
            static = ""
        arguments = ", ".join([*tensors, static] if static else tensors)
        if len(results) == 1:
            self.define(scope, f"{call}({arguments})", results[0])
            return
        self.features.add("several results")
        names = [self.fresh() for _ in results]
        self.emit(scope, f"{', '.join(names)} = {call}({arguments})")
        scope.names += [(n, s) for n, s in zip(names, results) if s != "-"]

    signature = ""

    def definition(self, scope: Scope, arguments: int) -> tuple[str, list[str]]:
        """A function that reads what is around it; its name, and the shapes of its results."""
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
        # Its derivative reads its result, so each replay has to compute it once more.
        result = self.operand(inner, "v")
        out = self.define(inner, f"torch.sigmoid({result})", "v")
        results, shapes = [out], ["v"]
        if self.chance(3):
            extra = self.pick(["v", "m", "input", "int", "again"])
            if extra == "int":
                results.append(f"{out}.argmax()")
                shapes.append("-")
            elif extra == "again":
                results.append(out)
                shapes.append("v")
            elif extra == "input" and parameters:
                results.append(parameters[0])
                shapes.append(signature[0])
            else:
                shape = extra if extra in "vm" else "v"
                results.append(self.operand(inner, shape))
                shapes.append(shape)
        self.emit(inner, f"return {', '.join(results)}")
        body = "\n".join(self.lines[start:])
        read = {n for n in outside if _mentions(body, n)}
        if read:
            self.features.add("closure")
        if any(n in read for n, _ in scope.names[: scope.own]):
            self.features.add("closure of several levels")
        if "env.leaf" in body or any(n.startswith("leaf") for n in read):
            self.features.add("closure of a leaf")
        self.signature = "".join(signature)
        return name, shapes

    def static(self, scope: Scope) -> None:
        """Code that static arguments steer."""
        self.features.add("static argument")
        old = self.operand(scope, "v")
        name = self.define(scope, f"{old}.sin() if flag else {old}.cos()", "v")
        self.emit(scope, "for _ in range(n):")
        self.emit(scope, f"    {name} = torch.tanh({name} * 1.4)")

    def inner_transform(self, scope: Scope) -> None:
        """A transform inside the program, of a region that may close over what is around it."""
        self.features.add("inner transform")
        stateful, self.stateful = self.stateful, False
        name, results = self.definition(scope, arguments=0)
        self.stateful = stateful
        first = "[0]" if len(results) > 1 else ""
        t = self.fresh("t")
        place = f"remat(lambda {t}: {name}(){first} * {t}.sin())"
        vector = self.operand(scope, "v")
        kind = self.pick(["grad", "jvp", "vmap"])
        if kind == "grad":
            text = f"functx.grad(lambda t: {place}(t).sum())({vector})"
        elif kind == "jvp":
            text = f"functx.jvp({place}, ({vector},), ({self.operand(scope, 'v')},))[1]"
        else:
            rows = self.operand(scope, "m")
            text = f"functx.vmap({place}, randomness=env.randomness)({rows}).sum(0) * 0.3"
        self.define(scope, text, "v")

    def program(self) -> Program:
        """The whole."""
        transforms = ["grad", "vmap", "jvp", "vjp", "jacrev", "jvp", "jacfwd"]
        depth = self.pick([0, 1, 2, 3, 1, 0])
        stack = tuple(self.pick(transforms) for _ in range(depth))
        # Torch refuses to write to what a transformed function closes over.
        self.stateful = not stack
        self.lines = ["def build(remat, env):"]
        outer = Scope([], 1, 0)
        for i in range(1 + self.choose(2)):
            self.emit(outer, f"leaf{i} = env.leaf({SHAPES[self.pick('vms') if i else 'v']})")
            outer.names.append((f"leaf{i}", "v" if i == 0 else _shape_of(self.lines[-1])))
        self.emit(outer, "def f(x):")
        body = Scope([*outer.names, ("x", "v")], 2, len(outer.names) + 1)
        for _ in range(1 + self.choose(3)):
            self.statement(body)
        self.region(body)
        used = next(n for n, s in body.names[::-1] if s == "v" and n not in ("x", "leaf0"))
        for _ in range(self.choose(3)):
            self.statement(body)
        results = [f"{self.operand(body, 'v')} * 0.5 + {used}.sin()"]
        if self.chance(3):
            results.append(self.operand(body, "m"))
        self.emit(body, f"return {', '.join(results)}")
        self.emit(outer, "return f")
        places = tuple(p for p in range(len(stack) + 1) if self.chance(4))
        if places:
            self.features.add("remat around transforms")
        self.features |= {f"depth {depth}", *stack}
        return Program(
            "\n".join(self.lines) + "\n",
            self.features,
            stack,
            places,
            self.pick(["different", "same"]),
            self.pick(["functx", "torch.func"]),
        )


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def _shape_of(line: str) -> str:
    return next(k for k, v in SHAPES.items() if f"env.leaf({v})" in line)
