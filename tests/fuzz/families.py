"""Programs of one shape each: what statements at random places rarely make meet."""

from __future__ import annotations

from .program import Scope
from .regions import Regions

# What a region ends in that no derivative reads, so that replays leave it out.
ENDS = ["dropout({0}, 0.4)", "{0} * 0.5", "{0} + {0}", "{0} - 0.3"]


class Families(Regions):
    """Shapes of programs, with random statements in them."""

    def gradient_of_regions(self, scope: Scope) -> None:
        """A region that keeps what it may, around a gradient of regions in regions.

        What the innermost ones end in is left out of their replays, and the region around them is
        told of it.
        """
        self.features |= {"policy", "nested", "inner grad", "inner transform"}
        outer, p = self.fresh("region"), self.fresh("p")
        self.emit(scope, f"def {outer}({p}):")
        inside = Scope([*scope.names, (p, "v")], scope.depth + 1, len(scope.names))
        for _ in range(self.choose(2)):
            self.statement(inside)
        self.inside += 1
        place = self._ending_unread(inside, 2 + self.choose(2))
        self.inside -= 1
        t = self.fresh("t")
        vector = self.pick([p, self.operand(inside, "v")])
        if self.at_base and self.chance(2):
            self.features.add("autograd.grad inside")
            start = self.define(inside, f"{vector} + {scope.names[0][0]}.sum()", "v")
            gradient = f"torch.autograd.grad({place}({start}).sum(), {start}, create_graph=True)[0]"
        else:
            library = self.pick(["functx", "torch.func"])
            self.features.add(f"{library} inside")
            gradient = f"{library}.grad(lambda {t}: {place}({t}).sum())({vector})"
        found = self.define(inside, gradient, "v")
        for _ in range(self.choose(2)):
            self.statement(inside)
        self.emit(inside, f"return torch.sigmoid({found} * {self.operand(inside, 'v')})")
        policy = self.pick(["everything_saveable", "dots_saveable", "save_at_least(20)"])
        call = f"remat({outer}, policy=functx.checkpoint_policies.{policy})"
        self.define(scope, f"{call}({self.operand(scope, 'v')})", "v")

    def _ending_unread(self, scope: Scope, depth: int) -> str:
        """A region in regions."""
        name, p = self.fresh("region"), self.fresh("p")
        self.emit(scope, f"def {name}({p}):")
        inside = Scope([*scope.names, (p, "v")], scope.depth + 1, len(scope.names))
        if depth:
            v = self.define(inside, f"{self._ending_unread(inside, depth - 1)}({p})", "v")
        else:
            for _ in range(self.choose(3)):
                self.statement(inside)
            v = self.pick([p, self.operand(inside, "v")])
        end = self.pick(ENDS).format(v)
        if end.startswith("dropout"):
            self.features |= {"random", "random in nested regions"}
            end = f"torch.nn.functional.{end}"
        self.emit(inside, f"return {end}")
        return f"remat({name})"

    def memory_let_go(self, scope: Scope) -> None:
        """A region that lets go of another tensor over the memory of what it is given.

        Its tape comes to hold a view, and just as many hold that memory afterwards as before. The
        product itself is left out of the replay. (What a list or an iterator holds, the region
        would keep: what holds this is garbage, which is collected in the region.)
        """
        self.features.add("not differentiated")
        matrix = self.define(scope, f"{self.operand(scope, 'm')}.detach().sin()", "m")
        held, name = self.fresh("held"), self.fresh("region")
        a, b = self.fresh("p"), self.fresh("p")
        row = f"{matrix}[{self.pick([0, 2])}]"
        self.emit(scope, f"{held} = [{row}]", f"{held}.append({held})", f"del {held}")
        self.emit(scope, f"def {name}({a}, {b}):")
        inside = Scope([*scope.names, (b, "v")], scope.depth + 1, len(scope.names))
        self.emit(inside, "env.collect_garbage()")
        views = ["{0}.mT @ {1}", "{0}[1] * {1}", "{0}.diagonal() * {1}", "{0}[1].detach() * {1}"]
        view = self.pick(views).format(a, b)
        product = self.define(inside, view, "v")
        for _ in range(self.choose(2)):
            self.statement(inside)
        self.emit(inside, f"return {product} * 0.5")
        self.define(scope, f"remat({name})({matrix}, {self.operand(scope, 'v')})", "v")

    def result_beyond_a_hook(self, scope: Scope) -> None:
        """A region two of whose results are behind nodes of their own, as an input has a hook."""
        self.features |= {"hook", "several results", "unused result"}
        hooked, vector = self.fresh(), self.operand(scope, "v")
        self.emit(scope, f"{hooked} = {vector} * 0.9", f"env.hook({hooked})")
        name, a, b = self.fresh("region"), self.fresh("p"), self.fresh("p")
        self.emit(scope, f"def {name}({a}, {b}):")
        inside = Scope([*scope.names, (a, "v"), (b, "v")], scope.depth + 1, len(scope.names))
        for _ in range(self.choose(2)):
            self.statement(inside)
        self.emit(inside, f"return torch.sigmoid({b}), {a}.tanh() * {self.pick([a, b])}")
        first, second = self.fresh("r"), self.fresh("r")
        given = f"{hooked}, {self.operand(scope, 'v')}"
        self.emit(scope, f"{first}, {second} = remat({name})({given})")
        scope.names.append((first, "v"))
        if self.chance(2):
            self.define(scope, second, "v")

    def cache(self, scope: Scope) -> None:
        """Regions that read what a later one writes to: what they found there stays theirs."""
        if not self.at_base:
            return self.result_beyond_a_hook(scope)
        self.features.add("state")
        for i in range(2 + self.choose(2)):
            name, p = self.fresh("region"), self.fresh("p")
            self.emit(scope, f"def {name}({p}):")
            inside = Scope([*scope.names, (p, "v")], scope.depth + 1, len(scope.names))
            if i and self.chance(2):
                self.emit(inside, f"env.buffer.mul_(0.5).add_({p}.detach())")
            if self.chance(2):
                self.statement(inside)
            self.emit(inside, f"return torch.sigmoid({p} * env.buffer.clone())")
            self.define(scope, f"remat({name})({self.operand(scope, 'v')})", "v")
        name = self.fresh("region")
        self.emit(
            scope,
            f"def {name}({p}):",
            f"    env.buffer.add_({p}.detach().sin())",
            f"    return torch.sigmoid({p} * env.buffer.clone())",
        )
        self.define(scope, f"remat({name})({self.operand(scope, 'v')})", "v")
        return None

    def constant_by_two_names(self, scope: Scope) -> None:
        """A region is given what no derivative flows to, and one inside knows it by both names."""
        self.features |= {"not differentiated", "nested", "closure of several levels"}
        text = self.pick([f"{self.operand(scope, 'v')}.detach().sin()", "env.constant.sin()"])
        constant = self.define(scope, text, "v")
        outer, inner, p = self.fresh("region"), self.fresh("region"), self.fresh("p")
        inside = Scope([*scope.names, (p, "v")], scope.depth + 1, len(scope.names))
        self.emit(scope, f"def {outer}({p}):")
        for _ in range(self.choose(2)):
            self.statement(inside)
        a, b = self.pick([constant, p]), self.pick([p, constant, self.operand(scope, "v")])
        how = self.pick(["closes over them", "reads their shapes", "is given them"])
        if how == "closes over them":
            self.emit(inside, f"def {inner}():", f"    return torch.sigmoid({a}) * {b}.cos()")
            found = self.define(inside, f"remat({inner})()", "v")
        elif how == "is given them":
            self.features.add("several results")
            first, second, unread = self.fresh("p"), self.fresh("p"), self.fresh("r")
            self.emit(inside, f"def {inner}({first}, {second}):")
            result = f"torch.sigmoid({self.operand(scope, 'v')})"
            self.emit(inside, f"    return {result}, {first}.sin() * {second}")
            found = self.fresh("r")
            self.emit(inside, f"{found}, {unread} = remat({inner})({p}, {constant})")
        else:
            self.emit(inside, f"{constant}.clamp(-0.7, 0.9)")
            found = self.operand(scope, "v")
        self.emit(inside, f"return torch.sigmoid({self.operand(scope, 'v')} * {found})")
        call = f"remat(remat({outer}))"
        if how != "reads their shapes":
            call = self.pick([f"remat({outer})", call])
        self.define(scope, f"{call}({constant})", "v")

    def expanded_capture(self, scope: Scope) -> None:
        """A region closes over a view that has less memory than entries; forward mode copies it."""
        self.features |= {"view", "closure"}
        view = self.define(scope, f"{self.operand(scope, 'v')}.sum().expand(3)", "v")
        rows = self.define(scope, f"{self.operand(scope, 'v')}[None].expand(3, 3)", "m")
        name = self.fresh("region")
        self.emit(scope, f"def {name}():")
        inside = Scope([*scope.names], scope.depth + 1, len(scope.names))
        for _ in range(self.choose(2)):
            self.statement(inside)
        self.emit(inside, f"return torch.sigmoid({self.pick([view, f'{rows}[1]'])})")
        self.define(scope, f"remat({name})()", "v")

    def keeps_all_that_it_may(self, scope: Scope) -> None:
        """A region that may keep everything, and keeps what a tape would."""
        self.features.add("policy")
        name, p = self.fresh("region"), self.fresh("p")
        self.emit(scope, f"def {name}({p}):")
        inside = Scope([*scope.names, (p, "v")], scope.depth + 1, len(scope.names))
        for _ in range(self.choose(3)):
            self.statement(inside)
        ends = [*ENDS[1:], "{0}.sin() * 0.5 + 0.1"]
        v = self.define(inside, self.pick(ends).format(self.operand(inside, "v")), "v")
        self.emit(inside, f"return torch.sigmoid({v})")
        call = f"remat({name}, policy=functx.checkpoint_policies.everything_saveable)"
        self.define(scope, f"{call}({self.operand(scope, 'v')})", "v")

    def writes_to_what_is_kept(self, scope: Scope) -> None:
        """Policies of nested regions keep what is written to later; it is pulled back twice."""
        self.features |= {"policy", "nested", "write"}
        self.twice = True
        policies = ["everything_saveable", "dots_saveable", "save_at_least(20)"]
        call = self._kept_and_written(scope, 1 + self.choose(2), policies)
        self.define(scope, f"{call}({self.operand(scope, 'v')})", "v")

    def _kept_and_written(self, scope: Scope, depth: int, policies: list[str]) -> str:
        name, p = self.fresh("region"), self.fresh("p")
        self.emit(scope, f"def {name}({p}):")
        inside = Scope([*scope.names, (p, "v")], scope.depth + 1, len(scope.names))
        reads = self.operand(inside, "v")
        # In no scope: a region that reads what is written to later can't run again.
        kept, vector = self.fresh(), self.operand(inside, "v")
        self.emit(inside, f"{kept} = torch.addmv({reads}, torch.outer({p}, {p}), {vector})")
        found = kept
        if depth:
            call = self._kept_and_written(inside, depth - 1, policies)
            found = self.define(inside, f"{call}({kept} * 1.2)", "v")
        elif self.chance(2):
            self.statement(inside)
        write = self.pick(["{0}.mul_({1})", "{0} += {1}.sin()", "{0}.tanh_()", "{0}[1:].mul_(0.5)"])
        self.emit(inside, write.format(kept, reads))
        self.emit(inside, f"return torch.sigmoid({kept} * {found}.cos())")
        return f"remat({name}, policy=functx.checkpoint_policies.{self.pick(policies)})"

    def kept_by_python(self, scope: Scope) -> None:
        """What a region is given is an attribute of a context, and nothing else reads it."""
        if not self.at_base:
            return self.named_after_a_write(scope)
        self.features.add("custom function of the old style")
        name, p = self.fresh("region"), self.fresh("p")
        self.emit(scope, f"def {name}({p}):")
        inside = Scope(
            [*scope.names], scope.depth + 1, len(scope.names)
        )  # without what it is given
        v = self.define(inside, f"env.old_style({p}, 1.0)", "v")
        self.emit(inside, f"return torch.sigmoid({v} * {self.pick(['0.5', v, '2'])})")
        self.define(scope, f"remat({name})({self.operand(scope, 'v')})", "v")
        return None

    def named_after_a_write(self, scope: Scope) -> None:
        """A value has a name that a policy keeps, and was written to together with others."""
        self.features |= {"policy", "write", "named value"}
        name, p, v, w = (self.fresh(prefix) for prefix in ("region", "p", "v", "v"))
        self.emit(scope, f"def {name}({p}):")
        inside = Scope([*scope.names, (p, "v")], scope.depth + 1, len(scope.names))
        self.emit(inside, f"{v}, {w} = {p}.detach() * 0.5, {p}.detach().square() + 1")
        norm = f"batch_norm(torch.outer({p}, {p}).detach(), {v}, {w}, training=True)"
        write = f"torch.nn.functional.{norm}"
        if self.at_base:
            write = self.pick([write, f"torch._foreach_mul_([{v}, {w}], 1.5)"])
        self.emit(inside, write, f"functx.checkpoint_name({v}, 'a')")
        self.emit(
            inside, f"return torch.sigmoid({self.pick([p, self.operand(inside, 'v')])} * {v})"
        )
        policy = self.pick(["save_only_these_names('a')", "save_any_names_but_these('b')"])
        call = f"remat({name}, policy=functx.checkpoint_policies.{policy})"
        self.define(scope, f"{call}({self.operand(scope, 'v')})", "v")

    def one_inside_two_wrappers(self, scope: Scope) -> None:
        """A region is done with one wrapper of a tensor when its tape holds that by another one."""
        self.features |= {"not differentiated", "inner vmap", "inner transform", "functx inside"}
        matrix = self.define(scope, f"{self.operand(scope, 'm')}.detach().sin()", "m")
        rows, name = self.fresh("rows"), self.fresh("region")
        a, b, p = (self.fresh("p") for _ in range(3))
        gone, vector = self.fresh(), self.operand(scope, "v")
        self.emit(scope, f"def {rows}({a}, {b}):")
        inside = Scope([], scope.depth + 1, 0)
        given, *_ = call = self.pick([(p, a), ("", "")])
        self.emit(inside, f"def {name}({given}):")
        self.emit(Scope([], scope.depth + 2, 0), f"{gone} = {vector} * {given or a}")
        end = self.pick([f"{vector}.sin() * {b}", f"{vector} * {b}.cos()"])
        # No result read: a sigmoid would keep its own, and nobody would have let go of anything.
        result = gone if end.endswith(b) else f"torch.sigmoid({gone})"
        self.emit(Scope([], scope.depth + 2, 0), f"{gone} = {end}", f"return {result}")
        self.emit(inside, f"return remat({name})({call[1]})")
        self.define(scope, f"functx.vmap({rows})({matrix}, {matrix}).sum(0)", "v")


# As often as they are listed.
FAMILIES = [
    *("gradient_of_regions", "memory_let_go", "gradient_of_regions", "result_beyond_a_hook"),
    *("cache", "constant_by_two_names", "writes_to_what_is_kept", "gradient_of_regions"),
    *("expanded_capture", "keeps_all_that_it_may"),
]
# Drawn last, behind all else.
LATE = ["kept_by_python", "named_after_a_write", "one_inside_two_wrappers"]
