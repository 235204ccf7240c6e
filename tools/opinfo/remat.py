"""Each entry of torch's operator database behind remat, under transforms, against itself without.

The reference is the operator under the same transform without remat, so that the operator's own
mistakes cancel. What torch itself refuses (an operator without a derivative, a batching rule that
is missing) is no case. A region runs three times, since later runs follow the first one.
``make test`` judges a sample of entries, ``make sweep`` all of them, and
``python -m tools.opinfo.remat --every 10`` some, with the share of runs that were followed.
"""

import argparse
import itertools
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

import functx
from tools.fuzz.world import numbers
from tools.opinfo import database
from tools.opinfo.database import as_function, name_of, one_line
from tools.share import counting, report

TRANSFORMS = ("value", "backward", "grad", "vmap(grad)", "jvp", "grad(grad)")
ROUNDINGS = 16
RUNS = 3
# Of outcomes, the worst first: within a few roundings, the same bit by bit, no case.
ORDER = ["raises", "differs", "rounded", "same", "not deterministic", "torch refuses"]
UNINITIALIZED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty")
UNINITIALIZED += ("new_empty_strided",)


@dataclass(frozen=True)
class Verdict:
    """What came of one entry under one transform: one of `ORDER`, and why."""

    name: str
    transform: str
    outcome: str
    detail: str = ""

    @property
    def counts(self):
        """Whether torch itself passes, so that remat has to."""
        return self.outcome in ("same", "rounded", "differs", "raises")

    @property
    def passes(self):
        """Whether remat gives what it should."""
        return self.outcome in ("same", "rounded")


def entries():
    """The entries with samples in float64 or float32 on a CPU."""
    return database.entries(torch.float64, torch.float32)


def judge(op, samples=8, runs=None):
    """Verdicts on one entry, the worst of its samples for each transform.

    How regions run is counted in ``runs``.
    """
    runs = Counter() if runs is None else runs
    dtype = torch.float64 if torch.float64 in op.supported_dtypes("cpu") else torch.float32
    name = name_of(op)
    try:
        chosen = _samples(op, dtype, samples)
    except Exception as error:
        return [Verdict(name, t, "torch refuses", _line(error)) for t in TRANSFORMS]
    worst = []
    for transform in TRANSFORMS:
        verdicts = [_judge(op, sample, transform, runs) for sample in chosen]
        verdicts.sort(key=lambda v: ORDER.index(v.outcome))
        worst.append(verdicts[0] if verdicts else Verdict(name, transform, "torch refuses", "-"))
    return worst


def _samples(op, dtype, n):
    torch.manual_seed(0)
    found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 40))
    places = sorted({round(i * (len(found) - 1) / max(n - 1, 1)) for i in range(n)})
    return [found[i] for i in places] if found else []


def _judge(op, sample, transform, runs):
    name = name_of(op)
    verdict = lambda outcome, detail="": Verdict(name, transform, outcome, detail)
    call, leaves = as_function(op, sample, lambda t: t.is_floating_point() or t.is_complex())
    if not leaves and transform != "value":
        return verdict("torch refuses", "no floating point input")
    try:
        expected = _run(transform, call, leaves)
        again = _run(transform, call, leaves)
    except Exception as error:
        return verdict("torch refuses", _line(error))
    region = functx.remat(call)
    try:
        with counting(runs):
            found = [_run(transform, region, leaves) for _ in range(RUNS)]
    except Exception as error:
        return verdict("raises", f"{type(error).__name__}: {_line(error)}")
    if op.name in UNINITIALIZED:
        like = lambda tensors: [(t.shape, t.dtype) for t in tensors]
        return verdict("same" if all(like(got) == like(expected) for got in found) else "differs")
    if _compare(again, expected) != "same":
        return verdict("not deterministic")
    outcomes = [_split(_compare(got, expected)) for got in found]
    return verdict(*min(outcomes, key=lambda outcome: ORDER.index(outcome[0])))


def _split(outcome):
    return (outcome, "") if outcome in ("same", "rounded") else ("differs", outcome)


def _tensors(tree):
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _number(out):
    """One real number from all results that can be differentiated, each entry weighted."""
    total = torch.zeros((), dtype=torch.float64)
    for i, t in enumerate(_tensors(out)):
        if t.is_complex():
            t = torch.view_as_real(t)
        if t.is_floating_point() and t.layout is torch.strided:
            total = total + (t.double() * numbers(t.shape, start=3 * i)).sum()
    return total


def _run(transform, f, leaves):
    torch.manual_seed(1)
    leaves = [t.detach().clone() for t in leaves]
    argnums = tuple(range(len(leaves)))
    loss = lambda *tensors: _number(f(*tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if transform == "value":
            out = f(*(t.requires_grad_() for t in leaves))
        elif transform == "backward":
            leaves = [t.requires_grad_() for t in leaves]
            out = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True)
            out = [torch.zeros_like(t) if g is None else g for g, t in zip(out, leaves)]
        elif transform == "grad":
            out = functx.grad(loss, argnums)(*leaves)
        elif transform == "vmap(grad)":
            batched = [torch.stack([t, t]) for t in leaves]
            out = functx.vmap(functx.grad(loss, argnums), randomness="different")(*batched)
        elif transform == "jvp":
            tangents = tuple(_like(t, float(i)) for i, t in enumerate(leaves))
            out = functx.jvp(lambda *t: _tensors(f(*t)), tuple(leaves), tangents)
        else:
            first = functx.grad(loss, argnums)
            out = functx.grad(lambda *t: _number(first(*t)), argnums)(*leaves)
        state = torch.get_rng_state()
    return [*(t.detach() for t in _tensors(out)), state]


def _like(t, start):
    return numbers(t.shape, start=start).to(t.dtype)


def _compare(actual, expected):
    if len(actual) != len(expected):
        return f"{len(actual)} results instead of {len(expected)}"
    outcome = "same"
    for a, b in zip(actual, expected):
        if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
            return f"{a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if a.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return "another integer result, or another state of the generator"
            continue
        if torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()):
            continue
        outcome = "rounded"
        finite = b[b.isfinite()].abs()
        scale = max(1.0, finite.max().item() if finite.numel() else 1.0)
        bound = ROUNDINGS * torch.finfo(b.dtype).eps
        if not torch.allclose(a, b, rtol=bound, atol=bound * scale, equal_nan=True):
            return f"off by {(a - b).abs().nan_to_num().max().item():.3g} of {scale:.3g}"
    return outcome


def _line(error):
    return one_line(error).replace("|", "\\|")


def table(verdicts, reasons):
    """The report, in Markdown."""
    by_transform = defaultdict(list)
    for verdict in verdicts:
        by_transform[verdict.transform].append(verdict)
    lines = [
        "# remat of every operator of torch",
        "",
        f"torch {torch.__version__.split('+')[0]}, {len({v.name for v in verdicts})} entries of "
        "its operator database with float64 or float32 samples on a CPU. Each runs behind `remat` "
        "and without, under the transform; an entry is a case where torch passes, and passes if "
        "values and derivatives are the same bit by bit, or within a few roundings. Written by "
        "`make sweep`.",
        "",
        "| transform | passes | of | of these bit by bit | torch refuses | not deterministic |",
        "|---|---|---|---|---|---|",
    ]
    for transform in TRANSFORMS:
        outcomes = Counter(v.outcome for v in by_transform[transform])
        cases = [v for v in by_transform[transform] if v.counts]
        lines.append(
            f"| {transform} | {sum(v.passes for v in cases)} | {len(cases)} | {outcomes['same']} "
            f"| {outcomes['torch refuses']} | {outcomes['not deterministic']} |"
        )
    wrong = [v for v in verdicts if v.counts and not v.passes]
    lines += ["", f"## Exceptions: {len(wrong)}", ""]
    if wrong:
        lines += ["| entry | transform | outcome | reason |", "|---|---|---|---|"]
    for v in wrong:
        reason = reasons.get((v.name, v.transform), f"{v.outcome}: {v.detail}")
        lines.append(f"| `{v.name}` | {v.transform} | {v.outcome} | {reason} |")
    return "\n".join(lines) + "\n"


# (entry, transform) -> why remat of it is not what it is without; none may be silently wrong.
EXCEPTIONS = {
    (f"nn.functional.{name}", transform): "max_norm writes to weights that require grad: rule 4"
    for name in ("embedding", "embedding_bag")
    for transform in ("value", "backward", "grad", "vmap(grad)", "grad(grad)")
} | {("linspace.tensor_overload", "vmap(grad)"): "of no steps torch refuses it in dispatch modes"}


def main():
    parser = argparse.ArgumentParser(prog="tools.opinfo.remat", description=__doc__.split(".")[0])
    parser.add_argument("--every", type=int, default=1, help="judge one entry of so many")
    parser.add_argument("--samples", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    runs = Counter()
    chosen = list(entries())[:: options.every]
    verdicts = [v for op in chosen for v in judge(op, options.samples, runs)]
    print(table(verdicts, EXCEPTIONS))
    print(report(runs))


if __name__ == "__main__":
    main()
