"""Every model type of transformers with checkpointing in three ways, against itself without.

``python -m tools.models --jobs 2 --json FILE --page docs/models.md``. A type runs
in a process of its own, so that a crash or a hang costs only that type; a file of results, a line a
type, is gone on with. What torch itself refuses, of the model without remat, is no case.
"""

import contextlib
import random
import re
import textwrap
import time
from collections import Counter, defaultdict
from importlib.metadata import version

import numpy as np
import torch

import functx
from functx._remat import on_region
from functx.compat.testing import small_models
from tools.models import apart
from tools.models.apart import line, parts
from tools.share import counting
from tools.share import report as share

DERIVATIVES = (".backward()", "functx.grad", "functx.vmap(functx.grad)")
WAYS = ("patch", "apply", "whole")
CASES = ("same", "rounded", "differs", "raises")
NO_CASES = ("torch refuses", "no checkpointing", "no region", "not run")
WRONG = ("differs", "raises", *NO_CASES[2:])
LIMIT = 180  # seconds for a type
HEADING = "### What came of it\n"

# What is not as without remat: the outcome, in which ways, of which types, and why.
EXCEPTIONS = """
raises | whole | big_bird bigbird_pegasus clvp_encoder | its first call changes the model, so a \
replay makes other calls; passes if the model was called before
raises | whole | reformer | it calls `torch.seed()`, so a replay draws other numbers
differs | patch apply whole | switch_transformers | its first call turns a weight of float64 into \
float32; inside a region the weight stays what it was, and so does its gradient
no region | apply | reformer | its layers are never called as modules
no region | apply | xcodec | the layers that transformers marks run under `no_grad`
no region | patch | clvp_decoder clvp_encoder pp_ocrv5_server_rec | transformers says that it can \
be checkpointed, and checkpoints nothing of it
no region | patch apply | nemotron3_5_asr nemotron_asr_streaming nemotron_asr_streaming_encoder | \
layer drop leaves out both layers
"""
KNOWN = {
    (name, way, outcome): why
    for outcome, ways, names, why in (line.split(" | ") for line in EXCEPTIONS.split("\n")[1:-1])
    for name in names.split()
    for way in ways.split()
}


def judge(name):
    """Yields the class of the model, then a derivative, a way, an outcome and a detail for each.

    And in the end how often regions ran in which way (`tools.share`).
    Outcomes: ``same`` bit by bit; ``rounded``, gradients up to rounding, all else bit by bit; the
    others of `CASES` and `NO_CASES`.
    """
    cls, config, inputs = small_models.find(name)
    yield cls.__name__
    runs = Counter()
    for derivative in DERIVATIVES:
        try:
            expected = _run(derivative, small_models.make(cls, config), inputs)
        except Exception as error:
            yield from ([derivative, way, "torch refuses", line(error)] for way in WAYS)
            continue
        if derivative == DERIVATIVES[0] and not _usable(expected[1]):
            raise ValueError("without remat, its gradients are all zero or not finite")
        for way in WAYS:
            model = small_models.make(cls, config)
            yield [derivative, way, *_judge(derivative, way, model, inputs, expected, runs)]
    yield dict(runs)


def _usable(gradients):
    return all(g.isfinite().all() for g in gradients) and any(map(torch.any, gradients))


def _judge(derivative, way, model, inputs, expected, runs):
    ran, called = [], set()
    try:
        model, context = _checkpointed(model, way)
        regions = [m for m in model.modules() if way == "apply" and "forward" in vars(m)]
        for module in regions:
            module.register_forward_pre_hook(lambda module, args: called.add(module))
        with context, on_region(lambda inputs, name, level: ran.append(name)), counting(runs):
            outcome, detail = _compare(_run(derivative, model, inputs), expected)
            _run(derivative, model, inputs)  # a later run, which is to follow the first one
    except Exception as error:
        if way == "patch" and re.search(r"(gradient|activation) checkpointing", str(error)):
            return "no checkpointing", ""
        return "raises", f"{type(error).__name__}: {line(error)}"
    if len(called) < len(regions):
        detail += f" {len(regions) - len(called)} of {len(regions)} regions not called"
    return ("no region", "") if not ran else (outcome, detail.strip())


def _checkpointed(model, way):
    if way == "whole":
        return functx.remat(model, preserve_rng_state="all"), contextlib.nullcontext()
    if way == "patch":
        model.gradient_checkpointing_enable()
        return model, functx.patch_checkpoint()
    apart.with_regions(model)
    return model, contextlib.nullcontext()


def _run(derivative, model, inputs):
    """What has to be the same bit by bit, and gradients."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    exact = []
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if derivative == DERIVATIVES[0]:
        out = model(**inputs)
        small_models.loss(out).backward()
        exact = [t.detach() for t in small_models.outputs(out)] + [*model.buffers()]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained.values()]
    else:

        def loss(values, mapped):
            return small_models.loss(functx.functional_call(model, values, (), inputs | mapped))

        apart.settle(model)
        f = functx.grad(loss)
        mapped = {n: t for n, t in inputs.items() if t.is_floating_point() or "input_ids" in n}
        if derivative == DERIVATIVES[2]:
            f = functx.vmap(f, (None, 0), randomness="different")
            mapped = {n: torch.stack([t, t.roll(1, -1)]) for n, t in mapped.items()}
        gradients = [*f({n: p.detach() for n, p in trained.items()}, mapped).values()]
    numbers = np.random.get_state()[1], random.getstate()[1]
    return [*exact, torch.get_rng_state(), *map(torch.as_tensor, numbers)], gradients


def _compare(got, expected):
    for a, b in zip(got, expected):
        if [(t.shape, t.dtype) for t in a] != [(t.shape, t.dtype) for t in b]:
            return "differs", "in a shape or a dtype"
    if not all(map(torch.equal, got[0], expected[0])):
        return "differs", "in an output, a buffer or a generator"
    if all(map(torch.equal, got[1], expected[1])):
        return "same", ""
    largest = max(t.abs().max().item() for t in expected[1] if t.numel())
    off = max((a - b).abs().max().item() for a, b in zip(got[1], expected[1]) if a.numel())
    outcome = "rounded" if off <= 1e-9 * largest else "differs"
    return outcome, f"in gradients, by {off / largest:.1g}"


def _record(name):
    """What came of a type, in a process of its own."""
    start, verdicts = time.monotonic(), []
    record = {"type": name, "model": "", "not built": "", "verdicts": verdicts}
    cases = [[derivative, way] for derivative in DERIVATIVES for way in WAYS]
    for part in parts(judge, name, LIMIT):
        if isinstance(part, str):
            record["model"] = part
        elif isinstance(part, list):
            verdicts.append(part)
        elif isinstance(part, dict):
            record["runs"] = part
        elif part is not None:
            outcome, why = part
            if outcome == "raised" or not record["model"]:
                record |= {"not built": why, "verdicts": []}
            else:
                verdicts += [[*case, "not run", why] for case in cases[len(verdicts) :]]
    return record | {"seconds": round(time.monotonic() - start, 1)}


def sweep(work=None, jobs=1):
    """Yields what came of each type."""
    yield from apart.sweep(_record, work, jobs)


def wrong(records):
    """Type, way, outcome, detail, and why, where it is known, of what is not as without remat."""
    for record in records:
        for _, way, outcome, detail in record["verdicts"]:
            if outcome in WRONG:
                why = KNOWN.get((record["type"], way, outcome), "")
                yield record["type"], way, outcome, detail, why


def report(records):
    """In Markdown."""
    built = [r for r in records if not r["not built"]]
    columns = ("derivative", "way", "passes", "of", "of these bit by bit", *NO_CASES)
    versions = f"transformers {version('transformers')}, torch {version('torch')}"
    lines = [f"{versions}: {len(built)} of {len(records)} types are built.", ""]
    lines += [f"| {' | '.join(columns)} |", "|---|---|" + "---:|" * (len(columns) - 2)]
    for derivative in DERIVATIVES:
        for way in WAYS:
            n = Counter(v[2] for r in built for v in r["verdicts"] if v[:2] == [derivative, way])
            numbers = n["same"] + n["rounded"], sum(n[o] for o in CASES), n["same"]
            row = (f"`{derivative}`", way, *numbers, *(n[outcome] for outcome in NO_CASES))
            lines.append(f"| {' | '.join(map(str, row))} |")
    ways = defaultdict(dict)
    for name, way, outcome, detail, why in wrong(records):
        ways[name, f"{outcome}: {why or detail}"][way] = None
    lines += ["", f"Exceptions: {len(ways)}", ""]
    lines += [f"- `{name}`, {', '.join(found)}: {why}" for (name, why), found in ways.items()]
    for title, kind in (("Built", True), ("Not built", False)):
        names = sorted(f"`{r['type']}`" for r in records if kind == (not r["not built"]))
        text = f"{title}: {', '.join(names)}."
        lines += ["", *textwrap.wrap(text, 100, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def write(page, records):
    apart.write_below(HEADING, page, report(records))


def _described(record):
    counts = Counter(" ".join(verdict[2:]).strip() for verdict in record["verdicts"])
    found = record["not built"] or ", ".join(f"{n} {what}" for what, n in counts.items())
    return f"{record['seconds']:5.1f} s  {found}"


def _with_share(records):
    runs = sum((Counter(r.get("runs", {})) for r in records), Counter())
    return f"{report(records)}\n{share(runs)}"


if __name__ == "__main__":
    apart.main(__doc__.partition("\n")[0], sweep, _described, _with_share, write)
