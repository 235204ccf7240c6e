"""Every model type of transformers as a JAX function: value and gradients, against torch's.

``python -m bench.models.in_jax --jobs 2 --json FILE --page PAGE``. A type runs in a process of its
own; a file of results, a line a type, is gone on with. The model is in eval mode and float64;
gradients of all parameters of a sum over its outputs, by
``jax.jit(jax.value_and_grad(to_jax(loss)))``. What the model would compute in float32 is float64
too, in both, so that rounding hides nothing.
"""

import statistics
import textwrap
import time
from collections import Counter
from importlib.metadata import version

import torch

import functx
from bench.models import apart
from bench.models.apart import line, parts
from functx._command import small_models
from functx.compat._crosscheck.precision import Widened

LIMIT = 300  # seconds for a type
EXACT = 1e-9  # of the largest number of all gradients
MEANING = {
    "same": "the same, to 1e-9 of the largest gradient",
    "differs": "differs",
    "raises": "to_jax refuses it",
    "not judged": "torch itself gives no finite gradients",
    "not run": "no answer",
}
HEADING = "## What came of it\n"
# Why a type is no other, where more is known than the message says.
KNOWN = {
    "flaubert": "it compares lengths of its inputs with an assert (`modeling_flaubert.py:824`)",
    "higgs_audio_v2": "it takes rows by a mask of its inputs (`modeling_higgs_audio_v2.py:255`)",
    "jetmoe": "tokens are split by how many go to each expert (`modeling_jetmoe.py:195`)",
    "levit": "in eval mode it keeps what it computed of its parameters at its first call, torch's",
    "longcat_flash": "tokens of an expert are taken by `nonzero` (`modeling_longcat_flash.py:187`)",
    "musicgen_decoder": "it draws from Python's `random`, in eval mode too",
    "musicgen_melody_decoder": "it draws from Python's `random`, in eval mode too",
    "nystromformer": "where it is traced, transformers gives it a mask whose shape does not fit",
    "switch_transformers": "it converts its own weight to another dtype when it is called",
    "udop": "sizes depend on the values of its boxes (`modeling_udop.py:219`)",
    "univnet": "it draws noise, which JAX draws otherwise",
    "vibevoice_acoustic_tokenizer": "it draws noise, which JAX draws otherwise",
    "vilt": "it draws which patches it takes (`modeling_vilt.py:107`)",
    "vit_mae": "it draws which patches it masks, which JAX draws otherwise",
    "xlm": "it compares lengths of its inputs with an assert (`modeling_xlm.py:792`)",
    "xmod": "it takes rows by a mask of its inputs (`modeling_xmod.py:453`)",
}


def judge(name):
    """The outcome for a type, a detail, and seconds to lower and to compile."""
    import jax
    import numpy as np

    from functx.compat import to_jax

    jax.config.update("jax_enable_x64", True)
    cls, config, inputs = small_models.find(name)
    model = small_models.make(cls, config).eval()

    # Sizes of images and masks are no arguments in JAX: models read them.
    sizes = {n: t for n, t in inputs.items() if not t.is_floating_point() and "ids" not in n}
    inputs = {n: t for n, t in inputs.items() if n not in sizes}

    def loss(params, given):
        with Widened():
            return small_models.loss(functx.functional_call(model, params, (), sizes | given))

    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    found = {"model": cls.__name__}
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    value = loss(leaves, inputs)
    gradients = torch.autograd.grad(value, [*leaves.values()], materialize_grads=True)
    expected, value = dict(zip(params, gradients)), value.detach()
    if not all(g.isfinite().all() for g in expected.values()):
        return found | {"outcome": "not judged", "detail": "torch's gradients are not finite"}
    args = jax.tree.map(lambda t: jax.numpy.asarray(t.numpy()), (params, inputs))
    start = time.perf_counter()
    try:
        lowered = jax.jit(jax.value_and_grad(to_jax(loss))).lower(*args)
        middle = time.perf_counter()
        run = lowered.compile()
        end = time.perf_counter()
        jax_value, gradients = run(*args)
    except Exception as error:
        return found | {"outcome": "raises", "detail": line(error, 300)}
    largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=1.0)
    largest = max(largest, 1e-6)  # what is smaller in all is the rounding of a loss of about 1
    off = max(
        (g - torch.tensor(np.asarray(gradients[n]))).abs().max().item() / largest
        for n, g in expected.items()
        if g.numel()
    )
    off = max(off, abs(value.item() - float(jax_value)) / max(1.0, abs(value.item())))
    outcome = "same" if off <= EXACT else "differs"
    seconds = {"lower": round(middle - start, 2), "compile": round(end - middle, 2)}
    return found | {"outcome": outcome, "detail": f"{off:.1e}"} | seconds


def _judged(name):
    yield judge(name)


def _record(name):
    """What came of a type, in a process of its own."""
    start, found = time.monotonic(), {}
    for part in parts(_judged, name, LIMIT):
        if isinstance(part, dict):
            found = part
        elif part is not None:
            outcome = "not built" if part[0] == "raised" else "not run"
            found = {"outcome": outcome, "detail": part[1]}
    return {"type": name} | found | {"seconds": round(time.monotonic() - start, 1)}


def sweep(names=None, jobs=1):
    """Yields what came of each type, of all types if none are named."""
    yield from apart.sweep(_record, names, jobs)


def report(records):
    """In Markdown: counts, what is not the same and why, times, and all names."""
    built = [r for r in records if r["outcome"] != "not built"]
    outcomes = Counter(r["outcome"] for r in built)
    names = ("transformers", "torch", "jax")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    lines = [
        f"{versions}: of {len(built)} types, {outcomes['same']} have the same "
        "value and gradients in JAX.",
        "",
        "| outcome | types |",
        "|---|---:|",
        *(f"| {meaning} | {outcomes[outcome]} |" for outcome, meaning in MEANING.items()),
        "",
    ]
    for stage in ("lower", "compile"):
        seconds = sorted((r[stage], r["type"]) for r in built if stage in r)
        if seconds:
            middle, slowest = statistics.median(s for s, _ in seconds), seconds[:-4:-1]
            slow = ", ".join(f"`{name}` {s:.0f} s" for s, name in slowest)
            lines.append(f"- Time to {stage}: {middle:.1f} s in the median; the slowest: {slow}.")
    lines += ["", "What is not the same:", ""]
    for r in built:
        if r["outcome"] != "same":
            why = KNOWN.get(r["type"], r.get("detail", ""))
            lines.append(f"- `{r['type']}`: {MEANING[r['outcome']]}: {why}")
    for title, kind in (("The same", "same"), ("Not built", "not built")):
        names = sorted(f"`{r['type']}`" for r in records if r["outcome"] == kind)
        text = f"{title}: {', '.join(names) or 'none'}."
        lines += ["", *textwrap.wrap(text, 100, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def write(page, records):
    apart.write_below(HEADING, page, report(records))


def _described(record):
    return f"{record['outcome']}: {record.get('detail', '')}"


if __name__ == "__main__":
    apart.main(__doc__.partition("\n")[0], sweep, _described, report, write)
