"""Statements that need no region of their own."""

from __future__ import annotations

from .forms import CUT, GENERATOR, MIXED, RANDOM, SAME, SHAPES, VIEW_WRITES, VIEWS, WRITES
from .pen import Pen
from .program import Scope


class Statements(Pen):
    """Operations, views, writes, random numbers, modules, Functions, hooks, names."""

    def operation(self, scope: Scope) -> None:
        """An operation without side effects."""
        self.define(scope, *self.fill(scope, self.pick(SAME + MIXED)))

    def view(self, scope: Scope) -> None:
        """A view."""
        self.features.add("view")
        self.define(scope, *self.fill(scope, self.pick(VIEWS)))

    def write(self, scope: Scope) -> None:
        """A fresh tensor, and a write to it."""
        self.features.add("write")
        self._write(scope, self.pick(WRITES))

    def view_write(self, scope: Scope) -> None:
        """A fresh tensor, and a write to a view of it."""
        self.features.add("write to a view")
        self._write(scope, self.pick(VIEW_WRITES))

    def _write(self, scope: Scope, form: tuple[str, str, str]) -> None:
        text, target, source = form
        shape = self.pick("vms") if target == "x" else target
        reads = self.operand(scope, shape if source == "x" else source)
        name = self.fresh_tensor(scope, shape, reads)
        self.emit(scope, text.format(name, reads))

    def fresh_tensor(self, scope: Scope, shape: str, reads: str) -> str:
        """A new tensor, as batched as what is going to be written to it, or vmap refuses."""
        return self.define(
            scope, f"{self.operand(scope, shape)} * 0.7 + {reads}.sum() * 0.1", shape
        )

    def noise(self, scope: Scope) -> None:
        """A random number."""
        self.features.add("random")
        if scope.depth > 3:
            self.features.add("random in nested regions")
        shape = self.pick("vms")
        text = self.pick(RANDOM).format(self.operand(scope, shape), shape=SHAPES[shape])
        self.define(scope, text, shape)

    def generator(self, scope: Scope) -> None:
        """A random number of a generator that the program has."""
        self.features.add("generator")
        shape = self.pick("vms")
        text = self.pick(GENERATOR).format(self.operand(scope, shape), shape=SHAPES[shape])
        self.define(scope, text, shape)

    def cut(self, scope: Scope) -> None:
        """Detached values, and blocks without gradient."""
        self.features.add("no gradient")
        shape = self.pick("vms")
        if self.chance(2):
            name = self.fresh()
            text, shape = self.fill(scope, self.pick(SAME))
            self.emit(scope, "with torch.no_grad():", f"    {name} = {text}")
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
        if not self.chance(3):
            call = f"remat({net})({self.operand(scope, 'v')})"
            self.features.add("module region")
        self.define(scope, call, "v")

    def function(self, scope: Scope) -> None:
        """An autograd.Function with a backward of its own."""
        self.features.add("custom function")
        if self.chance(3):
            first, order = self.fresh(), self.fresh("i")
            self.emit(scope, f"{first}, {order} = env.pair({self.operand(scope, 'v')})")
            self.define(scope, f"{first}.gather(-1, {order}) * {self.operand(scope, 'v')}", "v")
            return
        shape = self.pick("vms")
        a, b = self.operand(scope, shape), self.operand(scope, shape)
        self.define(scope, f"env.function({a}, {b})", shape)

    def old_function(self, scope: Scope) -> None:
        """One whose forward is given the context, which no transform knows."""
        if not self.at_base:
            return self.function(scope)
        self.features.add("custom function of the old style")
        shape = self.pick("vms")
        factor = self.pick([1.0, 0.5])
        self.define(scope, f"env.old_style({self.operand(scope, shape)}, {factor})", shape)
        return None

    def hook(self, scope: Scope) -> None:
        """A hook on an intermediate."""
        self.features.add("hook")
        name = self.define(scope, *self.fill(scope, self.pick(SAME)))
        self.emit(scope, f"env.hook({name})")

    def named(self, scope: Scope) -> None:
        """A name for a value, which policies may know."""
        self.features.add("named value")
        shape = self.pick("vm")
        text, name = self.operand(scope, shape), self.pick("ab")
        self.define(scope, f"functx.checkpoint_name({text}.sin(), {name!r})", shape)

    def export(self, scope: Scope) -> None:
        """Values that are read by what is no operation."""
        if not self.at_base:
            return self.operation(scope)
        self.features.add("values read by Python")
        value = f"{self.operand(scope, 'v')}.detach()"
        how = self.pick(
            [
                f"torch.tensor({value}.tolist(), dtype=torch.float64)",
                f"torch.tensor({value}.numpy())",
                f"torch.full((3,), float({value}.numpy().sum()), dtype=torch.float64)",
            ]
        )
        self.define(scope, f"{how} * {self.operand(scope, 'v')}", "v")
        return None

    def rebind(self, scope: Scope) -> None:
        """A name that means something else from here on: closures of regions before must not."""
        own = scope.names[scope.own :]
        if not own:
            return self.operation(scope)
        self.features.add("rebound")
        name, _ = self.pick(own[::-1])
        return self.emit(scope, f"{name} = {name} * 0.9 + 0.05")

    def state(self, scope: Scope) -> None:
        """A buffer that advances, or is bound anew."""
        if not self.at_base:  # torch refuses to write to what a transformed function closes over
            return self.operation(scope)
        self.features.add("state")
        vector = self.operand(scope, "v")
        if self.chance(3):
            net = self.pick(["env.turning", "remat(env.turning)"])
            self.define(scope, f"{net}({vector})", "v")
            return None
        self.emit(scope, f"env.buffer.mul_(0.5).add_({vector}.detach())")
        self.define(scope, f"{self.operand(scope, 'v')} * env.buffer.clone()", "v")
        return None
