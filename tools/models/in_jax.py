"""Every model type of transformers as a JAX function: value and gradients, against torch's.

``python -m tools.models.in_jax --with remat,training,examples --json FILE --page PAGE``. A type
runs in a process of its own; a file of results, a line a type, is gone on with. The model is in
eval mode and float64; gradients of all parameters of a sum over its outputs, by
``jax.jit(jax.value_and_grad(to_jax(loss)))``. What the model would compute in float32 is float64
too, in both, so that rounding hides nothing. ``--with`` adds what is in `columns`.
"""

import linecache
import re
import statistics
import textwrap
import time
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

import transformers

from functx.compat._crosscheck.precision import Widened
from functx.compat.testing import small_models
from tools.models import apart, diffusion
from tools.models.apart import line, parts

LIMIT = 300  # seconds for a type
COLUMNS = {
    "remat": "layers as regions",
    "training": "training mode, draws by a key",
    "examples": "`jax.vmap(jax.grad)`, two inputs",
}
MEANING = {
    "same": "the same, to 1e-9 of the largest gradient",
    "differs": "differs",
    "raises": "to_jax refuses it",
    "not judged": "torch itself gives no finite gradients",
    "not run": "no answer",
}
UNREAD = 128  # bytes: positions of eight tokens of two inputs
HEADING = "## What came of it\n"
# Why a type is no other, where more is known than the message says.
KNOWN = {
    "blt": "it takes patches by the values of their entropies (`modeling_blt.py:965`)",
    "flaubert": "it compares lengths of its inputs with an assert (`modeling_flaubert.py:824`)",
    "fsmt": "it asks whether its mask hides anything (`modeling_fsmt.py:266`)",
    "higgs_audio_v2": "it takes rows by a mask of its inputs (`modeling_higgs_audio_v2.py:255`)",
    "jetmoe": "tokens are split by how many go to each expert (`modeling_jetmoe.py:195`)",
    "levit": "in eval mode it keeps what it computed of its parameters at its first call, torch's",
    "longcat_flash": "tokens of an expert are taken by `nonzero` (`modeling_longcat_flash.py:187`)",
    "musicgen_decoder": "it draws from Python's `random`, in eval mode too",
    "musicgen_melody_decoder": "it draws from Python's `random`, in eval mode too",
    "nystromformer": "where it is traced, transformers gives it a mask whose shape does not fit",
    "recurrent_gemma": "it keeps the state of its recurrence in its modules at each call",
    "slanet": "it stops where all rows have ended (`modeling_slanet.py:181`)",
    "slanext": "it stops where all rows have ended (`modeling_slanext.py:589`)",
    "switch_transformers": "it converts its own weight to another dtype when it is called",
    "udop": "sizes depend on the values of its boxes (`modeling_udop.py:219`)",
    "univnet": "it draws noise, which JAX draws otherwise",
    "vibevoice_acoustic_tokenizer": "it draws noise, which JAX draws otherwise",
    "vilt": "it draws which patches it takes (`modeling_vilt.py:107`)",
    "vit_mae": "it draws which patches it masks, which JAX draws otherwise",
    "xlm": "it compares lengths of its inputs with an assert (`modeling_xlm.py:792`)",
    "xmod": "it takes rows by a mask of its inputs (`modeling_xmod.py:453`)",
}
KNOWN_TOO = {
    ("dac", "training"): "it draws how many codebooks it keeps, by `torch.randint`",
    ("doge", "examples"): "`topk` has to choose between equal numbers, of tokens that are equal",
    ("vjepa2", "training"): "`argsort` has to order equal positions, whose dropout differs",
}
# Where a gradient has more matrix products, and why.
ENGINE = "([engine](engine.md))"
UNUSED = "torch's recomputation: the last layer has a second result, which nothing uses"
MORE_PRODUCTS = {
    ("forward", "torch"): "torch's forward: results that nothing reads; JAX's program has none",
    ("recomputed", "torch"): "torch's recomputation: what comes before the last reader of memory "
    f"that a region made of zeros runs again {ENGINE}",
    ("unused", "torch"): UNUSED,
    ("backward", "torch"): "torch's backward: its fused kernels of attention compute scores again",
    ("forward", "JAX"): "JAX's forward: resizing and adaptive pooling are products with matrices",
    ("backward", "JAX"): "JAX's backward: derivatives of these",
}
UNUSED_RESULTS = {"lilt", "pegasus_x"}


def judge(name):
    """The outcome for a type, a detail, and seconds to lower and to compile."""
    import jax

    from functx.compat import to_jax
    from tools.models import columns

    jax.config.update("jax_enable_x64", True)
    plain, (params, inputs) = small_models.loss_of(diffusion.find(name))
    found = {"model": plain.__name__}

    def loss(params, inputs):
        with Widened():
            return plain(params, inputs)

    value, expected = columns.gradients_of(loss, params, inputs)
    args = columns.arrays((params, inputs))
    start = time.perf_counter()
    try:
        lowered = jax.jit(jax.value_and_grad(to_jax(loss))).lower(*args)
        middle = time.perf_counter()
        run = lowered.compile()
        end = time.perf_counter()
        jax_value, gradients = run(*args)
    except Exception as error:
        return found | {"outcome": "raises", "detail": line(error, 300)}
    seconds = {"lower": round(middle - start, 2), "compile": round(end - middle, 2)}
    return found | columns.compared(expected, gradients, value, jax_value) | seconds


def _judged(name, column):
    if column is None:
        yield judge(name)
    else:
        from tools.models import columns

        yield columns.column(name, column)


def _record(name, column=None):
    """What came of a type, or of one in a column, in a process of its own."""
    start, found = time.monotonic(), {}
    for part in parts(_judged, name, LIMIT, column):
        if isinstance(part, dict):
            found = part
        elif part is not None:
            outcome = "not built" if part[0] == "raised" else "not run"
            found = {"outcome": outcome, "detail": part[1]}
    found["seconds"] = round(time.monotonic() - start, 1)
    library = {"library": "diffusers"} if name in diffusion.MODELS else {}
    return {"type": name} | library | (found if column is None else {column: found})


def sweep(work=None, jobs=1):
    """Yields what came of each type, and of each in a column."""
    yield from apart.sweep(_record, work, jobs)


def report(records):
    """In Markdown: counts, what is not the same and why, times, and all names."""
    names = ("transformers", "torch", "jax")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    every, records = records, [r for r in records if "library" not in r]
    built = [r for r in records if r["outcome"] != "not built"]
    outcomes = Counter(r["outcome"] for r in built)
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
    lines += _columns(every)
    others = [r["type"] for r in every if "library" in r and r["outcome"] == "same"]
    groups = [("Same of diffusers", others)]
    for title, kind in (("The same", "same"), ("Not built", "not built")):
        groups.append((title, [r["type"] for r in records if r["outcome"] == kind]))
    for title, found in groups:
        text = f"{title}: {', '.join(sorted(f'`{name}`' for name in found)) or 'none'}."
        lines += ["", *textwrap.wrap(text, 100, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _columns(records):
    """What was measured besides: counts, what is not the same and why, figures of regions."""
    records = [r for r in records if r["outcome"] == "same"]
    kinds = ("same", "differs", "raises", "no case", "not run")
    lines = ["", "### More than that", "", "Of types that are the same:", ""]
    lines += [f"| | measured | {' | '.join(kinds)} |", "|---|" + "---:|" * (len(kinds) + 1)]
    listed = defaultdict(list)
    for column, title in COLUMNS.items():
        found = [(r["type"], r[column]) for r in records if column in r]
        n = Counter(c["outcome"] for _, c in found)
        lines.append(f"| {title} | {len(found)} | {' | '.join(str(n[k]) for k in kinds)} |")
        for name, c in found:
            if c["outcome"] in kinds[1:] and c["detail"] != "it draws nothing":
                why = KNOWN_TOO.get((name, column)) or _asked(c["detail"]).replace("](", "] (")
                listed[f"{title}: {c['outcome']}: {why}"].append(f"`{name}`")
    regions = [(r["type"], r["remat"]) for r in records if r.get("remat", {}).get("kept")]
    calls = sum(c["regions"] for _, c in regions)
    as_many = sum(c["regions"] == c["equations"] for _, c in regions)
    lines += [
        "",
        f"- Regions: {calls} calls of layers in {len(regions)} types; in {as_many} types as many "
        "equations of `jax.checkpoint` (of `uvdoc_backbone` five "
        "of six have no result that is returned).",
        *_kept(regions),
        *_products(regions),
        "",
        "What is no case or not the same, but for types that draw nothing:",
        "",
    ]
    reasons = [f"- {', '.join(names)}, {why}" for why, names in listed.items()]
    return lines + (reasons or ["- nothing"])


def _asked(detail):
    """In place of an error of to_jax, the line of a model that asks for a value."""
    found = re.search(r"_local_scalar_dense.* at (\w+\.py):(\d+)", detail)
    models = Path(transformers.__file__).parent / "models"
    file = next(models.glob(f"*/{found[1]}"), None) if found else None
    if file is None:
        return detail
    code = linecache.getline(str(file), int(found[2])).strip("( ,\n")
    return f"values decide what runs, `{code}`"


def _kept(regions):
    """Bytes kept at regions: in how many types they are equal, and what the others are."""
    kept = [(name, *c["kept"], c.get("entered")) for name, c in regions if c["kept"][0] is not None]
    unread, masks, shared, unknown = [], [], [], []
    for name, in_torch, in_jax, entered in kept:
        if entered is None:
            if not 0 <= in_torch - in_jax <= UNREAD:
                unknown.append((name, in_torch - in_jax))
        elif in_torch != in_jax:
            unread.append((name, entered - in_jax))
            masks.append((name, entered - in_torch))
            shared.append((name, in_torch - entered))
    equal = sum(in_torch == in_jax for _, in_torch, in_jax, _ in kept)
    small = sum(0 < in_torch - in_jax <= UNREAD for _, in_torch, in_jax, _ in kept)
    return [
        f"- Bytes of activations kept at regions: equal in {equal} of {len(kept)}. More are in",
        f"  - torch, where no derivative reads what a region is given {ENGINE}: up to {UNREAD} "
        f"bytes in {small} types (positions, say), and {_listed(unread, UNREAD)}",
        "  - torch, of what is a constant in JAX, or the same array as another (a clone): "
        + _listed(shared, UNREAD),
        "  - JAX, of masks that hide nothing, which transformers makes where it is traced: "
        + _listed(masks),
        *([f"  - one of them, not looked into: {_listed(unknown, -1 << 60)}"] if unknown else []),
    ]


def _products(regions):
    """Matrix products of a gradient: in how many types they are equal, and where there are more."""
    more, equal = defaultdict(list), 0
    for name, c in regions:
        parts = c.get("parts", {"all": c["products"]})
        equal += all(a == b for a, b in parts.values())
        for part, (a, b) in parts.items():
            unused = part == "recomputed" and name in UNUSED_RESULTS
            if a != b:
                case = "unused" if unused else part, "torch" if a > b else "JAX"
                more[MORE_PRODUCTS.get(case, "one of both, not looked into")].append(
                    (name, abs(a - b))
                )
    order = [*MORE_PRODUCTS.values()]
    groups = sorted(more, key=lambda why: order.index(why) if why in order else len(order))
    lines = [f"  - {why}: {_listed(more[why])}" for why in groups]
    return [f"- Matrix products of the gradient: equal in {equal}. There are more in", *lines]


def _listed(rows, least=0):
    return (", ".join(f"`{name}` {n:,}" for name, n in rows if n > least) or "none") + "."


def write(page, records):
    apart.write_below(HEADING, page, report(records))


def _described(record):
    found = next((f"{c}: " for c in COLUMNS if c in record), "")
    record = next((record[c] for c in COLUMNS if c in record), record)
    return f"{record['seconds']:5.1f} s  {found}{record['outcome']}: {record.get('detail', '')}"


if __name__ == "__main__":
    apart.main(__doc__.partition("\n")[0], sweep, _described, report, write, COLUMNS)
