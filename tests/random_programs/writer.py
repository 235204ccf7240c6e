"""Draws a program from a seed."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace

from .program import Block, Inner, Line, Program
from .templates import ALIASES, NEVER, TEMPLATES, Template

POLICIES = (
    "cp.dots_saveable",
    "cp.dots_with_no_batch_dims_saveable",
    "cp.everything_saveable",
    "cp.nothing_saveable",
    "cp.save_only_these_names('a')",
    "cp.save_only_these_names('a', 'b')",
    "cp.dots_saveable | cp.save_only_these_names('b')",
    "[aten.mm.default, aten.sin.default]",
    "[aten.mul.Tensor]",
    "lambda ctx, op, *args, **kwargs: op is aten.tanh.default",
)
WORLD = {
    "m": ("self.linear.weight", "self.constant", "box.t"),
    "v": ("self.linear.bias", "self.scale"),
    "s": ("v0.sum()", "0.5 * m0.mean()"),
    "i": ("idx",),
}
ENDS = ("backward", "backward", "autograd.grad", "of the input only", "double", "twice", "values",
        "first only", "batched")  # fmt: skip
CHEAP_ENDS = ("values", "values", "backward", "of the input only")
DERIVATIVES = {"gradient", "pullback", "pushforward", "jacobian", "hessian"}
SECOND = {"double", "batched"}
GROUPS = sorted({t.feature for t in TEMPLATES})
BY_GROUP = {name: [t for t in TEMPLATES if t.feature == name] for name in GROUPS}


@dataclass
class Scope:
    """Names that a function body may use.

    Attributes:
        own: what it was given or made.
        outer: what it may close over.
        writable: own names, the memory of which nobody else has.
        around: what is around it: ``levels`` of functorch, ``vmap``, ``jvp``, ``second order``, ...
        depth: of regions.
        transforms: how many are around it.
    """

    own: list[str] = field(default_factory=list)
    outer: list[str] = field(default_factory=list)
    writable: set[str] = field(default_factory=set)
    around: frozenset[str] = frozenset()
    depth: int = 0
    transforms: int = 0


class Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.features: set[str] = set()
        self.may_refuse = self.loose = False
        self.number = 0
        self.left = self.random.choice((3, 5, 7, 10))  # steps to write, in all

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def name(self, kind: str) -> str:
        self.number += 1
        return f"{kind}{self.number}"

    def program(self) -> Program:
        """The whole of it."""
        stack = self.stack()
        end = self.random.choice(ENDS if self.orders(stack) < 2 else CHEAP_ENDS)
        if end != "values" or not stack:
            self.features.add("end: " + end)
        text = " ".join(stack)
        found = {s.split("(")[0] for s in stack}
        around = {"levels"} if found - {"remat"} else set()
        around |= (
            {"vmap"} if "per_example" in found or "jacfwd" in text or "hessian" in text else set()
        )
        around |= {"jvp"} if found & {"pushforward", "hessian"} or "jacfwd" in text else set()
        around |= {"no draws"} if "hessian" in found or end == "batched" else set()
        around |= {"region"} if "remat" in found else set()
        orders = self.orders(stack) + (end != "values") + (end in SECOND)
        around |= {"second order"} if orders > 1 else set()
        regions = sum(s.startswith("remat") for s in stack)
        regions += orders > 2
        scope = Scope(own=["m0", "v0"], around=frozenset(around), depth=min(2, regions))
        scope.transforms = max(orders - 1, len(found - {"remat"}))
        body = self.body(scope, self.random.randint(2, 6))
        if "remat" not in text + " ".join(map(str, body)):
            body += self.region(scope)
        result = self.returned(scope)
        return Program(body, result, stack, end, self.features, self.may_refuse, self.loose)

    def stack(self) -> list[str]:
        """Transforms around the program, and regions around transforms."""
        stack: list[str] = []
        for _ in range(self.random.choice((0, 0, 0, 1, 1, 1, 1, 2, 2, 3))):
            if "remat" not in " ".join(stack) and self.chance(0.25):
                stack.append(self.remat())
                self.features.add("remat around the program")
            stack.append(self.layer(" ".join(stack)))
            if self.orders(stack) > 2:
                break
        if stack and self.chance(0.15):
            stack.append(self.remat())
            self.features.add("remat around transforms")
        self.features.add(f"{len([s for s in stack if s[:5] != 'remat'])} transforms around")
        return stack

    @staticmethod
    def orders(stack: list[str]) -> int:
        """How often these differentiate."""
        names = [s.split("(")[0] for s in stack]
        return sum(name in DERIVATIVES for name in names) + names.count("hessian")

    def layer(self, below: str) -> str:
        """A transform; one that makes results much larger is there once."""
        pick = self.random.choice
        expensive = (
            () if re.search("jac|hess", below) else ("hessian", "jacfwd", "jacrev", "jacrev")
        )
        name = pick(("grad", "grad", "vjp", "jvp", "vmap", "vmap", *expensive))
        self.features.add("around: " + name)
        argnums = pick(("0", "0", "1", "(0, 1)"))
        if name == "grad":
            form = pick(("grad", "grad", "value_and_grad", "grad_and_value", "has_aux"))
            return f"gradient({{}}, {argnums}, {form!r})"
        if name == "vjp":
            return f"pullback({{}}, {pick((1, 1, 2))})"
        if name == "jvp":
            return "pushforward({})"
        if name == "vmap":
            dims = pick(((0, 0), (0, None), (None, 0), (1, 0), (2, -1)))
            randomness = pick(("different", "different", "same", "same", "error"))
            return f"per_example({{}}, {dims}, randomness={randomness!r})"
        if name == "hessian":
            return f"hessian({{}}, {argnums})"
        options = ", randomness='different'" if name == "jacfwd" else ""
        return f"jacobian({{}}, {name!r}, {argnums}{options})"

    def remat(self) -> str:
        """The text of a region."""
        if self.chance(0.6):
            return "remat({})"
        policy = self.random.choice(POLICIES)
        self.features.add("a policy")
        return f"remat({{}}, policy={policy})"

    def body(self, scope: Scope, lines: int) -> list:
        """Statements that bind names of the scope."""
        return [s for _ in range(lines if self.left > 0 else 1) for s in self.statements(scope)]

    def statements(self, scope: Scope) -> list:
        """A step."""
        self.left -= 1
        draw = self.random.random() if self.left > 0 else 1.0
        if scope.depth < 3 and draw < (0.4 if scope.depth == 0 else 0.25):
            return self.region(scope)
        if draw < 0.48 and scope.transforms < 3:
            return self.transform(scope)
        if draw < 0.56:
            return self.block(scope)
        if draw < 0.7:
            return self.change(scope)
        return [self.line(scope)]

    def line(self, scope: Scope, group: str | None = None) -> Line:
        """A line of the table, of this group if one is named."""
        groups = [n for n in GROUPS if not NEVER.get(n, set()) & scope.around]
        weights = [4 if NEVER.get(n, set()) & {"levels"} else 1 for n in groups]
        group = group or self.random.choices(groups, weights)[0]
        template = self.random.choice(BY_GROUP[group])
        self.features.add(template.feature)
        self.loose |= "half" in template.feature and "second order" in scope.around
        return self.filled(template, scope)

    def filled(self, template: Template, scope: Scope) -> Line:
        """A line from a template, which binds a new name."""
        out = self.name(template.kind)
        operands: dict[str, str] = {"k": f"{self.random.uniform(0.3, 1.7):.2f}", "out": out}

        def operand(match: re.Match) -> str:
            slot = match[1]
            if slot not in operands:
                own = slot[0] == "o"
                operands[slot] = self.operand(slot.lstrip("o")[0], scope, own)
                if not template.fresh:
                    scope.writable.discard(operands[slot])
            return operands[slot]

        text = template.text if "{out}" in template.text else f"{{out}} = {template.text}"
        text = re.sub(r"\{([a-z]+[0-9]?)\}", operand, text)
        scope.own.append(out)
        if template.fresh:
            scope.writable.add(out)
        return Line(text, out)

    def operand(self, kind: str, scope: Scope, own: bool = False) -> str:
        """A name, or a text, of this kind."""
        mine = [n for n in scope.own if n[0] == kind]
        others = [n for n in scope.outer if n[0] == kind]
        draw = self.random.random()
        if mine and (own or draw < 0.7):
            return self.random.choice(mine[-3:])
        if own:
            return f"torch.clone({self.operand(kind, scope)})"
        if others and (draw < 0.9 or kind in "si"):
            self.features.add("closure")
            return self.random.choice(others[-4:])
        return self.random.choice(mine if mine and draw < 0.9 else WORLD[kind])

    def block(self, scope: Scope) -> list:
        """Statements under ``no_grad``, autocast, a loop or a branch."""
        kind = self.random.choice(("no_grad", "autocast", "for", "if"))
        self.features.add("block: " + kind)
        if kind == "no_grad":
            return [Block("with torch.no_grad():", self.body(scope, 1))]
        if kind == "if":
            name = self.random.choice([n for n in scope.own if n[0] != "i"])
            return [Block(f"if {name}.ndim < 3:", self.body(scope, 1))]
        if kind == "for":
            inside = replace(scope, own=list(scope.own), writable=set())
            body = self.body(inside, self.random.randint(1, 2))
            scope.own[:] = inside.own
            scope.writable.clear()
            return [Block("for _ in range(2):", body)]
        body = self.region(scope, half=True) if scope.depth < 3 and self.chance(0.6) else []
        body.append(self.line(scope, "half under autocast"))
        head = "with torch.autocast('cpu', torch.bfloat16, cache_enabled=False):"
        return [Block(head, body)]

    def change(self, scope: Scope) -> list:
        """Something that is not the same afterwards: a name, an attribute, a tensor."""
        kind = self.random.choice(("name", "attribute", "write", "write", "state", "rule 4"))
        if kind == "name":
            name = self.random.choice([n for n in scope.own if n[0] != "i"])
            scope.writable.discard(name)
            self.features.add("name bound again")
            return [Line(f"{name} = torch.cos({name}) * {self.operand(name[0], scope)}", name)]
        if kind == "attribute" and not {"region", "inner"} & scope.around:
            self.features.add("attribute bound again")
            return [Line(f"box.t = torch.cos(box.t) * {self.operand('m', scope)}")]
        if kind == "write" and scope.writable:
            name = self.random.choice(sorted(scope.writable))
            if name[0] in "mv":
                self.features.add("write")
                return [Line(f"{name}.add_({self.operand(name[0], scope)})")]
        if kind == "state" and scope.depth < 3:
            return self.state(scope)
        if kind == "rule 4" and scope.depth < 3 and self.chance(0.5):
            return self.error(scope)
        return [self.line(scope)]

    def state(self, scope: Scope) -> list:
        """A tensor without history that a region reads, then advances."""
        self.features.add("state")
        state, m = self.name("state"), self.operand("m", scope, own=True)
        made = Line(f"{state} = {m}.detach().clone()", state)
        inner, out = f"f{state[5:]}", self.name("m")
        given = self.chance(0.5)
        body = [
            Line(f"{out} = torch.sin(p + {state}.clone())", out),
            Line(f"{state}.mul_(0.9).add_(p.detach())"),
        ]
        parameters, arguments = (f"p, {state}", f"{m}, {state}") if given else ("p", m)
        outs = [self.name("m"), self.name("m")]
        region = Inner(inner, parameters, body, out, [self.remat()], outs[0], arguments, [], outs)
        region.after.append(f"{outs[1]} = {outs[0]} * {state}.clone()")
        scope.own += outs
        scope.writable.discard(m)
        return [made, region]

    def error(self, scope: Scope) -> list:
        """Something that rule 4 may refuse: an escape, or a write to memory of the caller's."""
        self.features.add("rule 4")
        self.may_refuse = True
        kept, made, out = self.name("kept"), self.name("m"), self.name("m")
        m = self.operand("m", scope, own=True)
        scope.own += [made, out]
        scope.writable.discard(m)
        if self.chance(0.5):
            body = [Line(f"{kept}.append(torch.sin(p))")]
            region = Inner(f"f{kept[4:]}", "p", body, "p * 2", ["remat({})"], made, m)
            return [Line(f"{kept} = []"), region, Line(f"{out} = {kept}[0] * {made}", out)]
        body = [Line("p.mul_(q)")]
        region = Inner(
            f"f{kept[4:]}", "p, q", body, "torch.sin(p)", ["remat({})"], made, f"{kept}, {m}"
        )
        return [Line(f"{kept} = {m} * 2"), region, Line(f"{out} = {kept} + 1", out)]

    def inside(self, scope: Scope, own: list[str], around: set[str]) -> Scope:
        """The scope of a function defined in this one."""
        outer = scope.outer + scope.own
        scope.writable.clear()  # what it closes over may be what a replay reads
        transforms = scope.transforms + bool(around - {"region"})
        depth = scope.depth + ("region" in around)
        return Scope(own, outer, set(), scope.around | around | {"inner"}, depth, transforms)

    def region(self, scope: Scope, half: bool = False) -> list:
        """A function under remat, given tensors in some form, and its call."""
        pick = self.random.choice
        candidates = [n for n in scope.own + scope.outer[-2:] if n[0] != "i"] + ["self.linear.bias"]
        given = [pick(candidates) for _ in range(pick((1, 1, 2, 2, 3)))]
        given = [
            a if self.chance(0.9) else pick(WORLD[a[0] if "." not in a else "v"]) for a in given
        ]
        if self.chance(0.1):
            given.append(given[0])
            self.features.add("the same tensor twice")
        names = [self.name("v" if "bias" in a or "scale" in a else a[0]) for a in given]
        names = [("m" if a in WORLD["m"] else "s" if a in WORLD["s"] else n[0]) + n[1:]
                 for n, a in zip(names, given)]  # fmt: skip
        inside = self.inside(scope, list(names), {"region"})
        if len(names) > 1 and self.chance(0.15):
            inside.own.remove(names[1])
            self.features.add("unused input")
        body: list = []
        if half:
            body.append(self.line(inside, "half under autocast"))
        elif self.chance(0.1):
            self.features.add("linear region")
            body += [self.line(inside, "linear only") for _ in range(2)]
        if not half or self.chance(0.5):
            body += self.body(inside, pick((1, 1, 2, 3)))
        parameters, arguments, unpacked = self.passed(names, given)
        if self.chance(0.15):
            parameters, arguments = f"k, {parameters}", f"{pick((2.0, 0.5))}, {arguments}"
            body.append(Line(f"{inside.own[-1]} = {inside.own[-1]} * k") if inside.own[-1][0] != "i"
                        else self.line(inside, "linear only"))  # fmt: skip
        self.features.add("region in a region" if scope.depth else "region")
        self.features |= {"three regions deep"} if scope.depth == 2 else set()
        inner = Inner(
            f"f{self.name('')}", parameters, unpacked + body, "", [self.remat()], "", arguments
        )
        if scope.transforms and "vmap" in scope.around and self.chance(0.1):
            inner.wrappers = ["remat({})", "remat({})"]
        self.unpack(inner, inside, scope, names)
        return [inner]

    def passed(self, names: list[str], given: list[str]) -> tuple[str, str, list]:
        """Parameters, arguments, and lines that take containers apart."""
        form = self.random.choice(
            ("positional", "positional", "keywords", "list", "dict", "nested")
        )
        self.features.add("arguments: " + form)
        if form == "positional":
            return ", ".join(names), ", ".join(given), []
        if form == "keywords":
            return ", ".join(names), ", ".join(f"{n}={a}" for n, a in zip(names, given)), []
        if form == "list":
            return "p", f"[{', '.join(given)}]", [Line(f"[{', '.join(names)}] = p")]
        items = ", ".join(f"'{n}': {a}" for n, a in zip(names, given))
        taken = ", ".join(names) + " = " + ", ".join(f"p['{n}']" for n in names)
        if form == "dict":
            return "p", f"{{{items}}}", [Line(taken)]
        return "q, p=None", f"({given[0]}, [None, 3]), p={{{items}}}", [Line(taken)]

    def unpack(self, inner: Inner, inside: Scope, scope: Scope, names: list[str]) -> None:
        """Choose what the region returns, and bind names to it."""
        pick = self.random.choice
        made = [n for n in inside.own if n not in names]
        results = [made[-1] if made else inside.own[-1]]
        while self.chance(0.35):
            results.append(pick(inside.own))
        if set(results) & set(names):
            self.features.add("argument returned")
        outs = [self.name(n[0]) for n in results]
        form = "one" if len(outs) == 1 and self.chance(0.7) else pick(("tuple", "dict", "nested"))
        self.features.add("results: " + form)
        inner.target, inner.outs = ", ".join(outs), outs
        if form == "one":
            inner.result = results[0]
        elif form == "tuple":
            inner.result = f"({', '.join(results)},)"
            inner.target += ","
        elif form == "dict":
            inner.result = "{" + ", ".join(f"'{o}': {n}" for o, n in zip(outs, results)) + "}"
            inner.target = "r"
            inner.after = [f"{o} = r['{o}']" for o in outs]
        else:
            inner.result = f"[({', '.join(results)},), None, 3]"
            inner.target = f"({inner.target},), _, _"
        if len(set(results)) == len(results):
            fresh = [o for o, n in zip(outs, results) if n in inside.writable]
            scope.writable |= set(fresh)
        scope.own += outs

    def transform(self, scope: Scope) -> list:
        """A function under a transform of functx, maybe with regions in and around it."""
        pick = self.random.choice
        kinds = ["grad", "grad", "value_and_grad", "vjp", "jvp", "vmap", "vmap", "jacrev", "jacfwd"]
        kinds += ["hessian"] if scope.transforms < 2 else []
        name = pick(kinds)
        self.features.add("inside: " + name)
        given, result, out, wrapper, around = {
            "grad": ("m", "s", "m", "fx.grad({})", set()),
            "value_and_grad": ("v", "s", "v", "fx.value_and_grad({})", set()),
            "vjp": ("m", "v", "m", "fx.vjp({}, ARG)", set()),
            "jvp": ("m", "m", "m", "fx.jvp({}, (ARG,), (TANGENT,))", {"jvp"}),
            "vmap": ("v", "v", "m", "fx.vmap({}, RANDOM)", {"vmap"}),
            "jacrev": ("v", "v", "m", "fx.jacrev({})", set()),
            "jacfwd": ("v", "v", "m", "fx.jacfwd({}, RANDOM)", {"jvp", "vmap"}),
            "hessian": ("v", "s", "m", "fx.hessian({})", {"jvp", "vmap", "no draws"}),
        }[name]
        argument = self.operand("m" if name == "vmap" else given, scope)
        parameter = self.name(given)
        around = around | {"levels"} | ({"second order"} if name != "vmap" else set())
        regions = [self.chance(0.5) and scope.depth < 3, self.chance(0.25) and scope.depth < 2]
        inside = self.inside(scope, [parameter], around | ({"region"} if regions[0] else set()))
        body = self.body(inside, pick((1, 2, 2, 3)))
        mine = [n for n in inside.own if n[0] in "mvs" and n != parameter] or [parameter]
        last = mine[-1]
        if result == "s":
            value = f"(torch.sin({last}) * {last}).sum()"
        elif result == last[0]:
            value = f"{last} * torch.sin({parameter})" if given == result else f"torch.sin({last})"
        elif result == "v":
            value = (
                f"{parameter} * {last}.sum()"
                if given == "v"
                else f"{parameter}.sum(0) * {last}.sum()"
            )
        else:
            value = f"{parameter} * {last}.sum()"
        wrappers = ["remat({})"] if regions[0] else []
        bound = self.name(out)
        randomness = pick(("different", "same"))
        wrapper = wrapper.replace("RANDOM", f"randomness='{randomness}'")
        target, arguments, after = bound, argument, []
        if name == "value_and_grad":
            target = f"_, {bound}"
        elif name == "vjp":
            other = self.operand("v", scope)
            wrapper, target = "fx.vjp({}, " + argument + ")", "_, pull"
            after, arguments = [f"({bound},) = pull({other})"], None
        elif name == "jvp":
            tangent = self.operand("m", scope)
            wrapper, arguments = f"fx.jvp({{}}, ({argument},), ({tangent},))", None
            target = f"_, {bound}"
        elif name == "vmap" and self.chance(0.3):
            wrapper = wrapper.replace(
                "{}", f"{{}}, {pick(('in_dims=1', 'out_dims=1', 'in_dims=-1'))}"
            )
        function = f"f{self.name('')}"
        if arguments is None:  # the call is part of the wrapper
            inner = Inner(
                function, parameter, body, value, [*wrappers, wrapper], target, None, after
            )
        else:
            wrappers += [wrapper, *(["remat({})"] if regions[1] else [])]
            inner = Inner(function, parameter, body, value, wrappers, target, argument, after)
        inner.outs = [bound]
        scope.own.append(bound)
        return [inner]

    def returned(self, scope: Scope) -> str:
        """What the program returns: mostly what it made last."""
        names = [n for n in scope.own if n[0] in "mvs"]
        results = [names[-1]]
        while self.chance(0.5):
            results.append(self.random.choice(names))
        if len(results) == 1 and self.chance(0.5):
            return results[0]
        if self.chance(0.3):
            return "{" + ", ".join(f"'{n}': {r}" for n, r in enumerate(results)) + "}"
        return f"({', '.join(results)},)"


def write(seed: int) -> Program:
    """The program of a seed."""
    return Writer(seed).program()


__all__ = ["ALIASES", "write"]
