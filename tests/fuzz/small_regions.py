"""Statements around one small region each, for what regions have to get right."""

from __future__ import annotations

from .forms import AUTOCAST, COMPLEX, COMPLEX_REGION
from .program import Scope
from .statements import Statements


class SmallRegions(Statements):
    """Batch norm, autocast, complex numbers, swapped parameters, loops, closures, escapes."""

    def late(self, scope: Scope) -> None:
        """A number that a region closes over, and that means something else from here on."""
        self.features.add("rebound number")
        number, name = self.fresh("k"), self.fresh("region")
        vector = self.operand(scope, "v")
        self.emit(
            scope,
            f"{number} = {self.pick([0.8, 1.2])}",
            f"def {name}():",
            f"    return torch.sigmoid({vector} * {number})",
        )
        self.define(scope, f"remat({name})()", "v")
        self.emit(scope, f"{number} = -0.4")

    def in_a_loop(self, scope: Scope) -> None:
        """Closures made at each step of a loop, over what the next step rebinds."""
        self.features.add("closures made in a loop")
        i = self.fresh("i")
        name = self.define(scope, f"{self.operand(scope, 'v')} * 1.1", "v")
        other = self.operand(scope, "v")
        self.emit(
            scope,
            f"for {i} in range({self.pick([2, 3])}):",
            f"    {name} = remat(lambda: torch.sigmoid({name} * {other}.cos() - 0.2 * {i}))()",
        )

    def norm(self, scope: Scope) -> None:
        """Batch norm, whose statistics advance: its own, or under vmap those it is given."""
        net = self.pick(["remat(env.norm)", "env.norm"])
        matrix = self.operand(scope, "m")
        if self.at_base:
            self.features.add("batch norm")
            self.define(scope, f"{net}({matrix})", "m")
            return
        self.features.add("batch norm of given buffers")
        mean = self.define(
            scope, f"{self.operand(scope, 'v')}.detach() * 0.5 + {matrix}.detach().sum() * 0.1", "v"
        )
        variance = self.define(scope, f"{mean}.square() + 1.0", "v")
        buffers = self.fresh("buffers")
        self.emit(
            scope,
            f"{buffers} = {{'running_mean': {mean}, 'running_var': {variance}}}",
            f"{buffers}['num_batches_tracked'] = torch.zeros((), dtype=torch.int64)",
        )
        self.define(scope, f"torch.func.functional_call({net}, {buffers}, ({matrix},))", "m")

    def autocast(self, scope: Scope) -> None:
        """A block in lower precision: around a region, or in one."""
        self.features.add("autocast")
        vector, name, low = self.operand(scope, "v"), self.fresh(), self.fresh("low")
        text = self.pick(AUTOCAST).format(low)
        if self.chance(2):
            text = f"remat(lambda {low}: {text})({low})"
        # Where derivatives of it are differentiated again, its roundings depend on orders of sums.
        detached = "" if self.at_base else f".detach() * {self.operand(scope, 'v')}"
        self.emit(
            scope,
            f"{low} = {vector}.float()",
            "with torch.autocast('cpu', torch.bfloat16):",
            f"    {name} = {text}.double().tanh(){detached}",
        )
        scope.names.append((name, "v"))

    def complex(self, scope: Scope) -> None:
        """Complex numbers in between."""
        self.features.add("complex")
        if self.chance(2):
            a, b = self.operand(scope, "v"), self.operand(scope, "v")
            self.define(scope, COMPLEX_REGION.format(a, b), "v")
        else:
            self.define(scope, *self.fill(scope, self.pick(COMPLEX)))

    def swapped(self, scope: Scope) -> None:
        """A module with a region inside, with other parameters than its own."""
        self.features.add("functional call")
        given = [f"'weight': {self.operand(scope, 'm')}"]
        if self.chance(2):
            # Not the very tensor that it is called with, which a replay can't tell apart: an error.
            given.append(f"'bias': {self.operand(scope, 'v')} * 0.9")
        net = self.pick(["env.inner", "remat(env.inner)"])
        call = f"({net}, {{{', '.join(given)}}}, ({self.operand(scope, 'v')},))"
        self.define(scope, f"torch.func.functional_call{call}", "v")

    def loop(self, scope: Scope) -> None:
        """A loop that keeps some of its states."""
        self.features.add("loop of functx")
        other, vector = self.operand(scope, "v"), self.operand(scope, "v")
        if self.chance(2):
            t, y = self.fresh("t"), self.fresh("y")
            body = f"lambda {t}, {y}: (torch.sigmoid({t} * {other} + {y}), {t}.sin())"
            both = self.fresh()
            matrix = self.operand(scope, "m")
            self.emit(scope, f"{both} = env.scan({body}, {vector}, {matrix}, {self.pick([1, 2])})")
            self.define(scope, f"{both}[0] + {both}[1].sum(0) * 0.3", "v")
            return
        t = self.fresh("t")
        functions = f"lambda {t}: torch.sigmoid({t} * {other}), torch.sin, torch.tanh"
        self.define(scope, f"env.sequential([{functions}], {self.pick([1, 2, 3])}, {vector})", "v")

    def escape(self, scope: Scope) -> None:
        """A tensor that leaves a region otherwise than by return, where functx lets it."""
        if not self.at_base or scope.depth > 2:
            return self.in_a_loop(scope)
        self.features.add("escape")
        t, name = self.fresh("t"), self.fresh("region")
        box = self.pick(["env.box", "kept['list']"])
        self.emit(
            scope,
            f"def {name}({t}):",
            f"    {t} = {t} * {self.operand(scope, 'v')}.sin() + x",
            f"    {box}.append({t})",
            f"    return torch.sigmoid({t}.tanh())",
        )
        self.define(scope, f"remat({name})({self.operand(scope, 'v')})", "v")
        self.define(scope, f"{box}[-1].sin()", "v")
        return None

    def overwritten(self, scope: Scope) -> None:
        """A region that writes to its argument, or to what it closes over."""
        self.features.add("write to an argument")
        reads = self.operand(scope, "v")
        target = self.fresh_tensor(scope, "v", reads)
        t, name = self.fresh("t"), self.fresh("region")
        text = self.pick(["{0}.mul_({1}.sin())", "{0}[1:] += {1}[:2]", "{0}.tanh_()"])
        closes = self.chance(2)
        self.emit(
            scope,
            f"def {name}({'' if closes else t}):",
            f"    {text.format(target if closes else t, reads)}",
            f"    return torch.sigmoid({target if closes else t})",
        )
        self.define(scope, f"remat({name})({'' if closes else target})", "v")

    def autograd(self, scope: Scope) -> None:
        """`torch.autograd.grad` inside."""
        if not self.at_base:
            return self.complex(scope)
        self.features.add("autograd.grad inside")
        t, name = self.fresh("t"), self.fresh("region")
        self.emit(
            scope,
            f"def {name}({t}):",
            f"    return torch.sigmoid({t} * {self.operand(scope, 'v')})",
        )
        start = self.define(scope, f"{self.operand(scope, 'v')} + {scope.names[0][0]}.sum()", "v")
        value = f"remat({name})({start}).square().sum()"
        self.define(scope, f"torch.autograd.grad({value}, {start}, create_graph=True)[0]", "v")
        return None
