"""Draws a program from a seed: text, which is Python, and transforms around it."""

import random
import re
import textwrap
from dataclasses import dataclass, field, replace

from tools.fuzz.templates import ALIASES, NEVER, TABLE

POLICIES = (
    "cp.dots_saveable", "cp.dots_with_no_batch_dims_saveable", "cp.everything_saveable",
    "cp.nothing_saveable", "cp.save_only_these_names('a')",
    "cp.dots_saveable | cp.save_only_these_names('b')", "[aten.mm.default, aten.sin.default]",
    "[aten.mul.Tensor]", "lambda ctx, op, *args, **kwargs: op is aten.tanh.default",
)  # fmt: skip
WORLD = {
    "m": ("self.linear.weight", "self.constant", "box.t"),
    "v": ("self.linear.bias", "self.scale"),
    "s": ("v0.sum()", "m0.mean()"),
    "i": ("idx",),
}
CHEAP_ENDS = ("values", "values", "backward", "of the input only")
ENDS = ("backward", "backward", "autograd.grad", "of the input only", "double", "twice", "batched",
        "first only", "values")  # fmt: skip
# In each, scripts are left, followed and departed from.
RUNS = ((True, True, False, True), (True, False, True, False), (True, True, False, False))
DERIVATIVES = {"gradient", "pullback", "pushforward", "jacobian", "hessian"}
# Transforms inside: kinds of argument, value and result, the call, its target, what is around.
INSIDE = {
    "grad": ("m", "s", "m", "fx.grad(F)(ARG)", "OUT", ""),
    "value_and_grad": ("v", "s", "v", "fx.value_and_grad(F)(ARG)", "_, OUT", ""),
    "vjp": ("m", "v", "m", "fx.vjp(F, ARG)", "_, pull", ""),
    "jvp": ("m", "m", "m", "fx.jvp(F, (ARG,), (OTHER,))", "_, OUT", "jvp"),
    "vmap": ("v", "v", "m", "fx.vmap(F, DIMS=1, randomness='different')(ARG)", "OUT", "vmap"),
    "vmap of one": ("v", "s", "v", "fx.vmap(F, randomness='same')(ARG)", "OUT", "vmap"),
    "jacrev": ("v", "v", "m", "fx.jacrev(F)(ARG)", "OUT", ""),
    "jacfwd": ("v", "v", "m", "fx.jacfwd(F, randomness='different')(ARG)", "OUT", "jvp vmap"),
    "hessian": ("v", "s", "m", "fx.hessian(F)(ARG)", "OUT", "jvp vmap,no draws"),
}


def block(head, body):
    """Statements under a ``with``, a ``for``, an ``if`` or a ``def``."""
    text = "\n".join(body)
    return f"{head}\n{textwrap.indent(text, '    ')}"


def function(name, parameters, body, result, region, call, target, after=()):
    """A function, its region (``remat({})`` or ``{}``), and a call, in which ``F`` stands for both.

    The result is assigned to ``target``; lines ``after`` it take it apart.
    """
    inside = region.replace("{}", name, 1)
    call = re.sub(r"\bF\b(?!\.)", lambda _: inside, call)
    defined = block(f"def {name}({parameters}):", [*body, f"return {result}"])
    return "\n".join([defined, f"{target} = {call}", *after])


@dataclass
class Program:
    """A function of a matrix and a vector, transforms and regions around it, the innermost first.

    ``end`` says how the result is differentiated outside of them (`judge.finish`), ``runs`` which
    of its runs find the world as the first one does (`world.change`), ``may_refuse`` that rule 4
    may refuse it, ``loose`` that half precision is differentiated more than once.
    """

    body: list[str]
    result: str
    stack: list[str]
    end: str
    runs: tuple[bool, ...] = RUNS[0]
    features: set[str] = field(default_factory=set)
    may_refuse: bool = False
    loose: bool = False

    def __str__(self):
        transformed = "program"
        for layer in self.stack:
            transformed = layer.replace("{}", transformed, 1)
        defined = block("def program(m0, v0):", [*self.body, f"return {self.result}"])
        runs = ", ".join("as the first" if first else "another" for first in self.runs)
        return f"{defined}\n\ntransformed = {transformed}  # end: {self.end}; runs: {runs}"

    def compiled(self, namespace):
        """The transformed function, with these globals."""
        exec(compile(str(self), "<program>", "exec"), namespace)
        return namespace["transformed"]


@dataclass
class Scope:
    """Names that a function body may use.

    ``own`` ones it was given or made, ``outer`` ones it may close over; of ``writable`` ones nobody
    else has the memory. ``around`` says what is around it: ``levels`` of functorch, ``vmap``,
    ``jvp``, ``region``, ...; ``depth`` counts regions, and ``transforms`` transforms.
    """

    own: list[str]
    outer: list[str] = field(default_factory=list)
    writable: set[str] = field(default_factory=set)
    around: frozenset[str] = frozenset()
    depth: int = 0
    transforms: int = 0


class Writer:
    """Writes one program."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.pick = self.random.choice
        self.features = set()
        self.may_refuse = self.loose = False
        self.number = 0
        self.left = self.pick((3, 5, 7, 10))  # steps to write, in all

    def chance(self, p):
        return self.random.random() < p

    def name(self, kind):
        self.number += 1
        return f"{kind}{self.number}"

    def program(self):
        """The whole of it."""
        stack = self.stack()
        end = self.pick(ENDS if self.orders(stack) < 2 else CHEAP_ENDS)
        self.features.add("end: " + end)
        text, regions = " ".join(stack), sum(s.startswith("remat") for s in stack)
        orders = self.orders(stack) + (end != "values") + (end in ("double", "batched"))
        where = {
            "levels": len(stack) > regions,
            "region": regions,
            "vmap": re.search("per_example|jacfwd|hessian", text),
            "jvp": re.search("pushforward|jacfwd|hessian", text),
            "no draws": "hessian" in text or end == "batched",
            "second order": orders > 1,
            "third order": orders > 2,
        }
        scope = Scope(["m0", "v0"], around=frozenset(name for name in where if where[name]))
        scope.depth = min(2, regions + (orders > 2))
        scope.transforms = max(orders - 1, len(stack) - regions)
        body = self.body(scope, self.random.randint(2, 6))
        if "remat" not in text + " ".join(body):
            body += self.region(scope)
        names = [n for n in scope.own if n[0] in "mvs"]
        results = [names[-1], *self.random.choices(names, k=self.pick((0, 0, 1, 2)))]
        results = self.pick((results, names[2:]))
        form = self.pick((names[-1], "(RESULTS,)", "(RESULTS,)", "{'a': [RESULTS]}"))
        result = form.replace("RESULTS", ", ".join(results))
        given = stack, end, self.pick(RUNS), self.features, self.may_refuse, self.loose
        return Program(body, result, *given)

    def stack(self):
        """Transforms around the program, and regions around transforms."""
        stack = []
        for _ in range(self.pick((0, 0, 0, 1, 1, 1, 1, 2, 2, 3))):
            if "remat" not in " ".join(stack) and self.chance(0.25):
                stack.append(self.remat())
            stack.append(self.layer(" ".join(stack)))
            if self.orders(stack) > 2:
                break
        if stack and self.chance(0.15):
            stack.append(self.remat())
            self.features.add("remat around transforms")
        self.features.add(f"{len([s for s in stack if s[:5] != 'remat'])} transforms around")
        return stack

    @staticmethod
    def orders(stack):
        """How often these differentiate."""
        names = [s.split("(")[0] for s in stack]
        return sum(name in DERIVATIVES for name in names) + names.count("hessian")

    def layer(self, below):
        """A transform; one that makes results much larger is there once."""
        large = () if re.search("jac|hess", below) else ("hessian", "jacfwd", "jacrev", "jacrev")
        name = self.pick(("grad", "grad", "vjp", "jvp", "vmap", "vmap", *large))
        self.features.add("around: " + name)
        argnums = self.pick(("0", "0", "1", "(0, 1)"))
        form = self.pick(("grad", "grad", "value_and_grad", "grad_and_value", "has_aux"))
        dims = self.pick(((0, 0), (0, None), (None, 0), (1, 0), (2, -1)))
        randomness = self.pick(("different", "different", "same", "same", "error"))
        return {
            "grad": f"gradient({{}}, {argnums}, {form!r})",
            "vjp": f"pullback({{}}, {self.pick((1, 1, 2))})",
            "jvp": "pushforward({})",
            "vmap": f"per_example({{}}, {dims}, randomness={randomness!r})",
            "hessian": f"hessian({{}}, {argnums})",
            "jacrev": f"jacobian({{}}, 'jacrev', {argnums})",
            "jacfwd": f"jacobian({{}}, 'jacfwd', {argnums}, randomness='different')",
        }[name]

    def remat(self):
        """The text of a region."""
        if self.chance(0.6):
            return "remat({})"
        self.features.add("a policy")
        return f"remat({{}}, policy={self.pick(POLICIES)})"

    def body(self, scope, steps):
        """Statements that bind names of the scope."""
        return [s for _ in range(steps if self.left > 0 else 1) for s in self.step(scope)]

    def step(self, scope):
        """A line or more."""
        self.left -= 1
        draw = self.random.random() if self.left > 0 else 1.0
        if scope.depth < 3 and draw < (0.4 if scope.depth == 0 else 0.25):
            return self.region(scope)
        if draw < 0.48 and scope.transforms < 3:
            return self.transform(scope)
        if draw < 0.56:
            return self.block(scope)
        return self.change(scope) if draw < 0.7 else [self.line(scope)]

    def line(self, scope, group=""):
        """A line of the table, of this group if one is named, which binds a new name."""
        groups = [n for n in TABLE if not NEVER.get(n, set()) & scope.around]
        weights = [4 if "levels" in NEVER.get(n, ()) else 1 for n in groups]
        weights = [2 * w if "another run" in n else w for n, w in zip(groups, weights)]
        group = group if group in groups else self.random.choices(groups, weights)[0]
        kind, text = self.pick(TABLE[group])
        self.features.add(group)
        self.loose |= "half" in group and "second order" in scope.around
        out = self.name(kind)
        operands = {"k": f"{self.random.uniform(0.3, 1.7):.2f}", "out": out}

        def operand(match):
            slot = match[1]
            if slot not in operands:
                operands[slot] = self.operand(slot.lstrip("o")[0], scope, slot[0] == "o")
                if group in ALIASES:
                    scope.writable.discard(operands[slot])
            return operands[slot]

        text = text if "{out}" in text else f"{{out}} = {text}"
        text = re.sub(r"\{([a-z]+[0-9]?)\}", operand, text)
        scope.own.append(out)
        scope.writable |= {out} if group not in ALIASES else set()
        return text

    def operand(self, kind, scope, own=False):
        """A name, or a text, of this kind."""
        mine = [n for n in scope.own if n[0] == kind]
        others = [n for n in scope.outer if n[0] == kind]
        draw = self.random.random()
        if mine and (own or draw < 0.7):
            return self.pick(mine[-3:])
        if own:
            return f"torch.clone({self.operand(kind, scope)})"
        if others and (draw < 0.9 or kind in "si"):
            self.features.add("closure")
            return self.pick(others[-4:])
        return self.pick(mine if mine and draw < 0.9 else WORLD[kind])

    def block(self, scope):
        """Statements under ``no_grad``, autocast, a loop or a branch."""
        kind = self.pick(("no_grad", "autocast", "for", "if"))
        self.features.add("block: " + kind)
        if kind in ("no_grad", "if"):
            head = "with torch.no_grad():" if kind == "no_grad" else f"if {scope.own[0]}.ndim < 3:"
            return [block(head, self.body(scope, 1))]
        if kind == "for":
            inside = replace(scope, writable=set())  # it may be read in the pass before
            body = self.body(inside, self.random.randint(1, 2))
            scope.writable.clear()
            return [block("for _ in range(2):", body)]
        body = self.region(scope, half=True) if scope.depth < 3 and self.chance(0.6) else []
        body.append(self.line(scope, "half under autocast"))
        head = "with torch.autocast('cpu', torch.bfloat16, cache_enabled=False):"
        return [block(head, body)]

    def change(self, scope):
        """Something that is not the same afterwards: a name, an attribute, a tensor."""
        kinds = ("name", "attribute", "write", "state", "rule 4")
        kind = self.random.choices(kinds, (3, 6, 15, 2, 4))[0]
        name = self.pick([n for n in scope.own if n[0] != "i"])
        if kind == "name":
            scope.writable.discard(name)
            self.features.add("name bound again")
            return [f"{name} = torch.cos({name}) * {self.operand(name[0], scope)}"]
        if kind == "attribute" and not {"region", "inner"} & scope.around:
            self.features.add("attribute bound again")
            return [f"box.t = torch.cos(box.t) * {self.operand('m', scope)}"]
        if kind == "write" and name in scope.writable:
            self.features.add("write")
            return [f"{name}.add_({self.operand(name[0], scope)})"]
        if scope.depth < 3 and kind in ("state", self.pick(("rule 4", ""))):
            return self.advance(scope, kind)
        return [self.line(scope)]

    def advance(self, scope, kind):
        """A region that advances a tensor, or what rule 4 may refuse: a write, an escape."""
        self.features.add(kind)
        m, t, f = self.operand("m", scope, own=True), self.name("t"), self.name("f")
        outs = [self.name("m"), self.name("m")]
        scope.own += outs
        scope.writable.discard(m)
        if kind == "state":
            made, after = f"{m}.detach().clone()", f"{t}.clone()"
            body = [f"m = torch.sin(p + {t}.clone())", f"{t}.mul_(0.9).add_(p.detach())"]
        elif self.chance(0.5):
            made, body, after = "[]", [f"{t}.append(torch.sin(p))", "m = p * 2"], f"{t}[0]"
        else:
            made, body, after = f"{m} * 2", [f"{t}.mul_(p)", "m = torch.sin(p)"], f"{t} + 1"
        self.may_refuse |= kind != "state"
        given = made != "[]" and self.chance(0.5)
        parameters, arguments = (f"p, {t}", f"{m}, {t}") if given else ("p", m)
        after = [f"{outs[1]} = {outs[0]} * ({after})"]
        call = self.remat(), f"F({arguments})", outs[0], after
        return [f"{t} = {made}", function(f, parameters, body, "m", *call)]

    def inside(self, scope, own, *around):
        """The scope of a function defined in this one."""
        scope.writable.clear()  # what it closes over may be what a replay reads
        depth = scope.depth + ("region" in around)
        transforms = scope.transforms + ("levels" in around)
        flags = scope.around | set(around) | {"inner"}
        return Scope(own, scope.outer + scope.own, set(), flags, depth, transforms)

    def region(self, scope, half=False):
        """A function under remat, given tensors in some form, and its call."""
        candidates = [n for n in scope.own + scope.outer[-2:] if n[0] != "i"]
        kinds = [(n, n[0]) for n in candidates] + [(self.pick(WORLD[k]), k) for k in "mv"]
        given = [self.pick(kinds) for _ in range(self.pick((1, 1, 2, 2, 3)))]
        if self.chance(0.1):
            given.append(given[0])
            self.features.add("the same tensor twice")
        names = [self.name(kind) for _, kind in given]
        inside = self.inside(scope, list(names), "region")
        if len(names) > 1 and self.chance(0.15):
            inside.own.remove(names[1])
            self.features.add("unused input")
        parameters, arguments, body = self.passed(names, [a for a, _ in given])
        if half:
            body.append(self.line(inside, "half under autocast"))
        elif self.chance(0.1):
            self.features.add("linear region")
            body += [self.line(inside, "linear only") for _ in range(2)]
        if not half or self.chance(0.5):
            body += self.body(inside, self.pick((1, 1, 2, 3)))
        if self.chance(0.15):
            self.features.add("a number given")
            parameters, arguments = f"k, {parameters}", f"{self.pick((2.0, 0.5))}, {arguments}"
            body.append(f"{names[0]} = {names[0]} * k")
        self.features.add(f"regions nested {scope.depth}")
        name, region = self.name("f"), self.remat()
        result, target, after = self.unpack(inside, scope, names)
        call = region, f"F({arguments})", target, after
        return [function(name, parameters, body, result, *call)]

    def passed(self, names, given):
        """Parameters, arguments, and lines that take containers apart."""
        form = self.pick(("positional", "positional", "keywords", "list", "dict", "nested"))
        self.features.add("arguments: " + form)
        items = ", ".join(f"'{n}': {a}" for n, a in zip(names, given))
        taken = ", ".join(names) + " = " + ", ".join(f"p['{n}']" for n in names)
        pairs = ", ".join(f"{n}={a}" for n, a in zip(names, given))
        return {
            "positional": (", ".join(names), ", ".join(given), []),
            "keywords": (", ".join(names), pairs, []),
            "list": ("p", f"[{', '.join(given)}]", [f"[{', '.join(names)}] = p"]),
            "dict": ("p", f"{{{items}}}", [taken]),
            "nested": ("q, p=None", f"({given[0]}, [None, 3]), p={{{items}}}", [taken]),
        }[form]

    def unpack(self, inside, scope, names):
        """Choose what a region returns, and bind names to it: result, target, lines after it."""
        made = [n for n in inside.own if n not in names]
        results = [made[-1] if made else inside.own[-1]]
        while self.chance(0.5):
            results.append(self.pick(inside.own))
        if set(results) & set(names):
            self.features.add("argument returned")
        outs = [self.name(n[0]) for n in results]
        form = self.pick(("tuple", "dict", "nested", *["one"] * (6 if len(outs) == 1 else 0)))
        self.features.add("results: " + form)
        items = ", ".join(f"'{o}': {n}" for o, n in zip(outs, results))
        targets, values = ", ".join(outs), ", ".join(results)
        target, result = {
            "one": (targets, values),
            "tuple": (f"{targets},", f"({values},)"),
            "dict": ("r", f"{{{items}}}"),
            "nested": (f"({targets},), _, _", f"[({values},), None, 3]"),
        }[form]
        if len(set(results)) == len(results):
            scope.writable |= {o for o, n in zip(outs, results) if n in inside.writable}
        scope.own += outs
        return result, target, [f"{o} = r['{o}']" for o in outs] if form == "dict" else []

    def transform(self, scope):
        """A function under a transform of functx, maybe with regions in and around it."""
        name = self.pick([n for n in INSIDE if n != "hessian" or scope.transforms < 2])
        self.features.add("inside: " + name)
        given, result, kind, call, target, around = INSIDE[name]
        argument = self.operand("m" if "vmap" in name else given, scope)
        parameter, region = self.name(given), scope.depth < 3 and self.chance(0.5)
        orders = ["second order", "third order"][: 1 + ("second order" in scope.around)]
        flags = ["levels", *re.split("[ ,](?!draws)", around), *([] if "vmap" in name else orders)]
        inside = self.inside(scope, [parameter], *flags, *(["region"] if region else []))
        body = self.body(inside, self.pick((1, 2, 2, 3)))
        made = [n for n in inside.own[1:] if n[0] in "mvs"] or [parameter]
        value = " + ".join(f"torch.sin({n}).sum()" for n in made[-2:])
        if result != "s":
            value = f"{parameter if given == result else parameter + '.sum(0)'} * ({value})"
        out = self.name(kind)
        call = call.replace("ARG", argument).replace("OTHER", self.operand("m", scope))
        call = call.replace("DIMS", self.pick(("in_dims", "out_dims")))
        if "F)" in call and scope.depth < 2 and self.chance(0.25):
            self.features.add("remat around a transform inside")
            call = re.sub(r"(fx\.\w+\(F\))", r"remat(\1)", call)
        target = target.replace("OUT", out)
        around = "remat({})" if region else "{}"
        f = self.name("f")
        after = [f"({out},) = pull({self.operand('v', scope)})"] if name == "vjp" else []
        scope.own.append(out)
        return [function(f, parameter, body, value, around, call, target, after)]


def write(seed):
    """The program of a seed."""
    return Writer(seed).program()
