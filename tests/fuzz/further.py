"""What one numbered program in two has behind all else: what only few programs would have."""

from __future__ import annotations

from .families import Families
from .program import Scope

FORWARD_MODE = {"jvp", "jacfwd"}


class Further(Families):
    """Statements around a region each, with random statements in it."""

    def tied(self, scope: Scope) -> None:
        """A module with one weight in two places."""
        self.features.add("tied weights")
        self._module(scope, "env.tied")

    def parametrized(self, scope: Scope) -> None:
        """A module whose weight is computed from another one; or normed, by what it remembers."""
        self.features.add("parametrization")
        nets = ["env.symmetric", "env.spectral"] if self.at_base else ["env.symmetric"]
        self._module(scope, self.pick(nets))

    def frozen(self, scope: Scope) -> None:
        """A module of which some parameters want no gradient."""
        self.features.add("frozen parameter")
        self._module(scope, "env.frozen")

    def _module(self, scope: Scope, net: str) -> None:
        vector = self.operand(scope, "v")
        if self.chance(2):
            self.define(scope, f"remat({net})({vector})", "v")
            return
        name, p, inside = self._begin(scope)
        self.emit(inside, f"return torch.sigmoid({net}({p}) * {self.operand(inside, 'v')})")
        self.define(scope, f"remat({name})({vector})", "v")

    def _begin(self, scope: Scope, *others: str) -> tuple[str, str, Scope]:
        """A function of a vector, and of others perhaps, with some statements in it."""
        name, p = self.fresh("region"), self.fresh("p")
        self.emit(scope, f"def {name}({', '.join((p, *others))}):")
        inside = Scope([*scope.names, (p, "v")], scope.depth + 1, len(scope.names))
        for _ in range(self.choose(3)):
            self.statement(inside)
        return name, p, inside

    def custom_operator(self, scope: Scope) -> None:
        """An operator of the user's, of which torch knows no derivative in forward mode."""
        if FORWARD_MODE & {*self.stack}:
            return self.ungraded(scope)
        self.features.add("custom operator")
        name, p, inside = self._begin(scope)
        v = self.define(inside, f"env.operator({p}, {self.pick([0.7, 1.3])})", "v")
        self.emit(inside, f"return torch.sigmoid({v} * {self.operand(inside, 'v')})")
        self.define(scope, f"remat({name})({self.operand(scope, 'v')})", "v")
        return None

    def ungraded(self, scope: Scope) -> None:
        """One result does not require grad."""
        self.features |= {"result without a gradient", "several results"}
        name, p, inside = self._begin(scope)
        second = self.pick([f"{p}.detach() * 2.0", f"{self.operand(inside, 'v')}.sin().detach()"])
        self.emit(inside, f"return torch.sigmoid({p} * {self.operand(inside, 'v')}), {second}")
        first, other = self.fresh("r"), self.fresh("r")
        self.emit(scope, f"{first}, {other} = remat({name})({self.operand(scope, 'v')})")
        self.define(scope, f"{first} * {other}", "v")

    def empty_result(self, scope: Scope) -> None:
        """A region gives nothing, or nothing beside something."""
        self.features.add("empty result")
        name, p, inside = self._begin(scope)
        nothing, vector = self.pick(["()", "None", "{}", "[]"]), self.operand(scope, "v")
        if self.chance(2):
            self.emit(inside, f"return torch.sigmoid({p} * {self.operand(inside, 'v')}), {nothing}")
            self.define(scope, f"remat({name})({vector})[0]", "v")
            return
        self.emit(inside, f"{p}.sin()", f"return {nothing}")
        self.emit(scope, f"assert not remat({name})({vector})")
        self.define(scope, f"{vector} * 0.9", "v")

    def zero_size(self, scope: Scope) -> None:
        """A region is given no entries, and gives none."""
        self.features |= {"tensor of size zero", "several results"}
        name, p, inside = self._begin(scope)
        none = f"{self.operand(inside, 'v')}[:0]"
        self.emit(inside, f"return torch.sigmoid({p}) + {none}.sum(), {none} * {p}[:0].exp()")
        first, other = self.fresh("r"), self.fresh("r")
        self.emit(scope, f"{first}, {other} = remat({name})({self.operand(scope, 'v')})")
        self.define(scope, f"torch.cat([{other}, {first}]) * 0.5", "v")

    def subclass(self, scope: Scope) -> None:
        """A region is given a tensor of a class of its own, and gives one."""
        if not self.at_base:
            return self.mixed_dtypes(scope)
        self.features.add("tensor subclass")
        name, p, inside = self._begin(scope)
        self.emit(inside, f"return torch.sigmoid({p} * {self.operand(inside, 'v')})")
        given = f"{self.operand(scope, 'v')}.as_subclass(env.subclass)"
        self.define(scope, f"remat({name})({given}).as_subclass(torch.Tensor)", "v")
        return None

    def mixed_dtypes(self, scope: Scope) -> None:
        """Of lower precision is what is not differentiated: else orders of sums show."""
        self.features.add("several dtypes")
        low, other = self.fresh("low"), self.fresh("p")
        dtype = self.pick(["bfloat16", "float32", "float16", "int64"])
        self.emit(scope, f"{low} = ({self.operand(scope, 'v')}.detach() * 4).to(torch.{dtype})")
        name, _, inside = self._begin(scope, other)
        read = self.pick([f"({other} * {other}).double()", f"{low}", f"({other} + 1)"])
        self.emit(inside, f"return torch.sigmoid({self.operand(inside, 'v')} * {read})")
        self.define(scope, f"remat({name})({self.operand(scope, 'v')}, {low})", "v")

    def default_dtype(self, scope: Scope) -> None:
        """What a region makes of nothing has the dtype that was the default then."""
        self.features.add("default dtype")
        name, p, inside = self._begin(scope)
        self.emit(inside, f"return torch.sigmoid({p} * torch.linspace(0.1, 0.9, 3).sin())")
        value = self.fresh()
        self.emit(
            scope,
            f"with env.default_dtype(torch.{self.pick(['float64', 'bfloat16'])}):",
            f"    {value} = remat({name})({self.operand(scope, 'v')})",
        )
        scope.names.append((value, "v"))

    def mode(self, scope: Scope) -> None:
        """A mode of the user's is around a region, or in it."""
        if not self.at_base:
            return self.ungraded(scope)
        self.features.add("mode")
        name, p, inside = self._begin(scope)
        value, mode = self.fresh(), self.pick(["env.function_mode", "env.dispatch_mode"])
        vector = self.operand(scope, "v")
        if self.chance(2):
            self.emit(inside, f"with {mode}():", f"    {value} = ({p} * 1.1).sinh()")
            self.emit(inside, f"return torch.sigmoid({value})")
            self.define(scope, f"remat({name})({vector})", "v")
            return None
        self.emit(inside, f"return torch.sigmoid(({p} * 1.1).sinh())")
        self.emit(scope, f"with {mode}():", f"    {value} = remat({name})({vector})")
        scope.names.append((value, "v"))
        return None

    def stored(self, scope: Scope) -> None:
        """A region stores what it is given, which what it gives may not depend on."""
        if not self.at_base:
            return self.zero_size(scope)
        self.features.add("escape")
        other, box = self.fresh("p"), self.pick(["env.box", "kept['list']"])
        name, p, inside = self._begin(scope, other)
        self.emit(inside, f"{box}.append({other})")
        read = self.pick(["", f" * {other}.cos()"])
        self.emit(inside, f"return torch.sigmoid({p} * {self.operand(inside, 'v')}){read}")
        first, second = self.operand(scope, "v"), self.operand(scope, "v")
        value = self.define(scope, f"remat({name})({first}, {second})", "v")
        if self.chance(3):
            self.features.add("hook")
            self.emit(scope, f"env.hook({box}[-1])")
        self.define(scope, f"{box}[-1] * {value}", "v")
        return None

    def counted(self, scope: Scope) -> None:
        """Backward passes count, in what a region makes and the program may have."""
        self.features.add("state of backward passes")
        name, p, inside = self._begin(scope)
        state = self.fresh("s")
        made = self.pick(["[1.0]", "{'k': 1.0}", "env.counter()"])
        self.emit(inside, f"{state} = {made}")
        if self.chance(2):
            self.emit(inside, f"kept['counts'].append({state})")
        who = self.pick(["counted_by_a_hook", "counted_by_a_function"])
        value = self.define(inside, f"env.{who}({p}, {state})", "v")
        self.emit(inside, f"return torch.sigmoid({value} * {self.operand(inside, 'v')})")
        self.define(scope, f"remat({name})({self.operand(scope, 'v')})", "v")


# As often as they are listed.
FURTHER = [
    *("tied", "parametrized", "frozen", "custom_operator", "custom_operator", "ungraded"),
    *("empty_result", "zero_size", "subclass", "subclass", "mixed_dtypes", "default_dtype"),
    *("mode", "mode", "stored", "stored"),
]
