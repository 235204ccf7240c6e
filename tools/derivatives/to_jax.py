"""The sweep of derivatives in JAX: a table in ``bench/results``, and the page made of it."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import jax
import torch

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax
from functx.compat._bridge import array_from_torch
from functx.compat._to_jax.rules import table
from tools.derivatives import by_hand, complex_cases, database_cases, from_jax
from tools.derivatives.causes import CAUSES, NOT_SWEPT, OF_JAX
from tools.derivatives.judge import JAX, KINK, UNCLEAR, as_list, judge
from tools.opinfo.database import one_line

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "bench" / "results" / "derivatives" / "to_jax.json"
PAGE = ROOT / "docs" / "derivatives_in_jax.md"
KEPT = ROOT / ".sweep"
PARTS = 8


def cases():
    """All, in the order in which they are shared out to the parts of the sweep."""
    return [*by_hand.cases(), *database_cases.cases(), *complex_cases.cases()]


def base(name):
    """The name without the number of the sample."""
    return name.partition(", sample ")[0]


def rule_names():
    """All names of each rule, by one of them."""
    by_rule = defaultdict(list)
    for name, rule in table.named().items():
        by_rule[id(rule)].append(name.removeprefix("aten::"))
    return {min(names): sorted(names) for names in by_rule.values()}


def drawing_rules():
    """Those that draw random numbers, which are compared by distribution elsewhere."""
    drawing = {name.removeprefix("aten::") for name, r in table.named().items() if r.random}
    return {first for first, names in rule_names().items() if drawing & set(names)}


def rules_of(case):
    """The rules that a case is lowered to, with those of its gradient by torch."""
    firsts = {name: first for first, names in rule_names().items() for name in names}
    named = {id(rule): name.removeprefix("aten::") for name, rule in table.named().items()}
    xs = next(iter(case.points.values()))
    functions = [case.f]
    if case.differentiable:
        at = tuple(i for i, x in enumerate(xs) if x.dtype == torch.float64)
        functions.append(functx.grad(lambda *xs: _total(case.f(*xs)), at))
    found = set()
    for f in functions:
        try:
            program = to_jax(f, rng=True).program(*map(array_from_torch, xs))
        except (LoweringError, RuntimeError, TypeError):
            continue
        for node in program.module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                rule = table.lookup(node.target)
                found |= {firsts[named[id(rule)]]} if rule is not None else set()
    return sorted(found)


def _total(out):
    tensors = [x for x in as_list(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(x.double().sum() for x in tensors)


def row(case):
    """One case as it is written down; it has no points if it can't be lowered."""
    try:
        points, verdicts = judge(case)
    except Exception as error:  # above all a LoweringError; what else there is, the table names
        message = str(error).replace(f"{ROOT}/", "")  # the table is the same in any folder
        said = f"{type(error).__name__}: {one_line(message)}"
        return {"name": case.name, "points": 0, "refused": said, "verdicts": []}
    return {
        "name": case.name,
        "points": points,
        "rules": rules_of(case) if points else [],
        "verdicts": [list(v) for v in verdicts],
    }


def rows(chosen):
    found = []
    for count, case in enumerate(chosen):
        found.append(row(case))
        if count % 32 == 31:
            jax.clear_caches()
    return found


def versions():
    torch_s = torch.__version__.split("+")[0]
    return f"torch {torch_s}, JAX {jax.__version__}, functx {functx.__version__}"


def paths():
    return [KEPT / f"derivatives-{part}" for part in range(PARTS)]


def run_part(part):
    """The rows of one part, kept; with the last of all parts the table and the page are written."""
    KEPT.mkdir(exist_ok=True)
    found = rows(cases()[part::PARTS])
    paths()[part].write_text("\n".join([versions(), *map(json.dumps, found)]) + "\n")
    of = joined(paths())
    if of is not None:
        table_of = written(of)
        TABLE.write_text(json.dumps(table_of, indent=1) + "\n")
        PAGE.write_text(page(table_of, json.loads(from_jax.TABLE.read_text())))
    return found


def differing(verdicts):
    """The points at which something differs."""
    return {point for _, point, *_ in verdicts}


def without_a_cause(found):
    """Names of cases that differ, and have no cause."""
    return sorted({base(r["name"]) for r in found if r["verdicts"]} - CAUSES.keys())


def joined(paths):
    """The rows of all parts; None while some are missing, or of other versions."""
    if not all(path.exists() for path in paths):
        return None
    texts = [path.read_text().splitlines() for path in paths]
    heads = {head for head, *_ in texts}
    if len(heads) > 1:
        return None
    versions = heads.pop()
    found = [json.loads(line) for _, *lines in texts for line in lines]
    return {"versions": versions, "rows": found}


def written(of):
    """The table: of each rule and case how many points there are, and at how many all agree."""
    rules = defaultdict(lambda: [0, 0])
    by_case = defaultdict(lambda: {"points": 0, "agree": 0, "verdicts": []})
    for r in of["rows"]:
        if not r["points"]:
            continue
        agree = r["points"] - len(differing(r["verdicts"]))
        for rule in r["rules"]:
            rules[rule][0] += r["points"]
            rules[rule][1] += agree
        case = by_case[base(r["name"])]
        case["points"] += r["points"]
        case["agree"] += agree
        sample = r["name"].removeprefix(base(r["name"])).removeprefix(", ")
        where = f"{sample}, " if sample else ""
        case["verdicts"] += [[v[0], where + v[1], *v[2:]] for v in r["verdicts"]]
    return {
        "versions": of["versions"],
        "refused": {r["name"]: r["refused"] for r in of["rows"] if "refused" in r},
        "rules": {name: rules[name] for name in sorted(rules)},
        "cases": {name: by_case[name] for name in sorted(by_case)},
    }


def _from_jax(of):
    count, points, differ = from_jax.figures(of)
    return [
        "Derivatives of functions that `from_jax` has made are JAX's own, and the judge is JAX.",
        "Values and derivatives are compared in the same modes; of while loops, which have only a",
        "forward mode, in forward over forward mode and by `functx.linearize`.",
        f"{of['versions']}.",
        "",
        "| | |",
        "|---|---:|",
        f"| functions | {count} |",
        f"| points | {points:,} |",
        f"| points at which all quantities agree | {points - differ:,} |",
        "",
        *(
            f"- `{name}`: {from_jax.CAUSES[name]}."
            for name, case in of["functions"].items()
            if case["differ"]
        ),
    ]


PARTIES = ("torch", "neither", "JAX")  # who is wrong


def _who(case):
    """The number of points at which each is wrong."""
    found = Counter()
    for point in differing(case["verdicts"]):
        outcomes = {outcome for _, at, outcome, _ in case["verdicts"] if at == point}
        neither = outcomes & {KINK, UNCLEAR}
        found["JAX" if JAX in outcomes else "neither" if neither else "torch"] += 1
    return found


def _by_reason(reasons, what=""):
    groups = defaultdict(list)
    for name, why in reasons.items():
        groups[why].append(f"`{name}`")
    return [f"- {what}{', '.join(names)}: {why}." for why, names in groups.items()]


_INTRODUCTION = """
`make sweep` compares functions that `to_jax` has lowered with torch, in float64, at points where
formulas change: zero, ties, equal arguments, targets of 0 and 1, repeated singular values and
eigenvalues, bounds of clamps and windows, large and tiny numbers, empty sizes. At each point these
are compared: the value; the gradient; the product of the Hessian with a vector, in reverse over
reverse and in forward over reverse mode; the gradient that `functx.grad` takes in torch, lowered;
and its derivative in forward mode. torch is the judge. Where it and JAX differ, differences of
torch's values and gradients tell who is right, if the function is smooth there.
Functions named `complex ...` have complex arguments and are differentiated by real and imaginary
parts.
""".strip().splitlines()


def page(of, other):
    """The documentation page, from the table of `to_jax` and that of `from_jax`."""
    swept, listed = of["rules"], rule_names()
    points = sum(case["points"] for case in of["cases"].values())
    agree = sum(case["agree"] for case in of["cases"].values())
    whole = sum(n == same for n, same in swept.values())
    wrong = {name: case for name, case in of["cases"].items() if case["verdicts"]}
    total = sum((_who(case) for case in wrong.values()), Counter())
    missing = sorted(listed.keys() - swept.keys() - drawing_rules())
    lines = [
        "# Derivatives in JAX, to second order",
        "",
        *_INTRODUCTION,
        "",
        f"{of['versions']}. All points that differ are in `bench/results/derivatives/to_jax.json`.",
        "",
        "| | |",
        "|---|---:|",
        f"| rules of `to_jax` | {len(listed)} |",
        f"| swept | {len(swept)} |",
        f"| rules all of whose functions agree at all points | {whole} |",
        f"| functions | {len(of['cases'])} |",
        f"| points | {points:,} |",
        f"| points at which all quantities agree | {agree:,} |",
        f"| points at which one differs, each with a cause below | {points - agree:,} |",
        f"| - of these JAX is right | {total['torch']} |",
        f"| - there is no derivative, or both have lost all digits | {total['neither']} |",
        f"| - torch is right, or takes another one of several equal results | {total['JAX']} |",
        "",
        "## Where something differs",
        "",
        "Who is wrong: torch; neither, where no derivative exists and each has its own choice, or",
        "both have lost all digits; or JAX.",
        "",
        "| function | points | that differ | torch, neither, JAX | cause |",
        "|---|---:|---:|---|---|",
    ]
    for name, case in wrong.items():
        who = _who(case)
        parts = ", ".join(str(who[part]) for part in PARTIES)
        lines.append(
            f"| `{name}` | {case['points']} | {who.total()} | {parts} | {CAUSES.get(name, '?')} |"
        )
    lines += [
        "",
        "## The other direction",
        "",
        *_from_jax(other),
        "",
        "## What is JAX's own fault",
        "",
        "Derivatives of JAX's functions that are wrong. `to_jax` has definitions of its own in",
        "their place, unless the table above says otherwise.",
        "",
        "| function | what is wrong |",
        "|---|---|",
        *(f"| `{name}` | {what} |" for name, (what, _) in OF_JAX.items()),
        "",
        "## What is not swept",
        "",
        f"- {len(drawing_rules())} rules draw random numbers:"
        " [compared by distribution](opinfo_jax.md).",
        *_by_reason({name: NOT_SWEPT.get(name, "?") for name in missing}),
        *_by_reason(database_cases.LEFT_OUT, "entries of torch's database: "),
        "",
    ]
    return "\n".join(lines)
