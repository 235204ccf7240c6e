"""Lowers each entry of torch's operator database to JAX and compares it with torch."""

import contextlib
import itertools
import json
from collections import Counter, namedtuple
from pathlib import Path

import jax
import numpy as np
import torch

from functx._core.errors import LoweringError
from functx.compat import to_jax
from functx.compat._bridge import array_from_torch
from tools.opinfo.database import as_function, name_of, one_line

TABLE = Path(__file__).parents[2] / "docs" / "opinfo_jax.md"
_SHAPE = "the shape of the result depends on values; refused by name"
_VALUE = "reads values as Python numbers; refused by name"
_BUFFER = "the shape of its buffer depends on values; refused by name"
_SPARSE = "sparse layout; JAX arrays are dense. Refused"
_FACTOR = "LAPACK's packed factors have no counterpart in JAX; named as missing"
_RANK = "the shape of the residuals depends on the rank; refused by name"
_NO_RULE = "no rule yet; named as missing"
_NONE = "no counterpart in JAX; named as missing"


def because(reason, names):
    return dict.fromkeys(names.split(), reason)


DATA_DEPENDENT = {
    **because(_SHAPE, "argwhere combinations masked_select nonzero repeat_interleave"),
    **because(_SHAPE, "unique unique_consecutive"),
    **because(_VALUE, "allclose equal item"),
    **because(_RANK, "linalg.lstsq linalg.lstsq.grad_oriented"),
    "nn.functional.ctc_loss": _BUFFER,
    "narrow": "a start given as a tensor is read as a number; refused by name",
    "tensor_split": "indices given as a tensor are read as numbers; refused by name",
}
OTHER_LAYOUTS = {
    "chalf": "JAX has no complex32; refused",
    "resize_as_": "changes the memory of its argument; named as missing",
    **because(_SPARSE, "sparse.mm.reduce sparse.sampled_addmm to_sparse"),
}
NOT_ON_CPU = {"as_strided.partial_views": "torch itself fails on the sample"}
CHUNKED = "nn.functional.linear_cross_entropy.chunked"
NO_RULE = {
    **because(_FACTOR, "geqrf linalg.ldl_factor linalg.ldl_factor_ex linalg.ldl_solve"),
    **because(_NO_RULE, f"histogramdd {CHUNKED} {CHUNKED}_none"),
    **because(_NONE, "hash_tensor special.airy_ai"),
}
EXCEPTIONS = DATA_DEPENDENT | OTHER_LAYOUTS | NOT_ON_CPU | NO_RULE

# The value matches, the gradient does not.
OTHER_GRADIENT = {
    "as_strided_scatter": "torch's is wrong: its own gradcheck fails",
    "linalg.eigh": "equal for perturbations that keep the argument Hermitian",
    "linalg.pinv.hermitian": "the sample is not Hermitian, which torch's formula takes it to be",
    "nextafter": "JAX has no derivative for it; an error",
}


def runnable(verdicts):
    """The verdicts of entries that can run on a CPU."""
    return {v["name"]: v for v in verdicts if not v["name"].startswith("jiterator")}


def page(verdicts, versions):
    """The documentation page."""
    found = runnable(verdicts)
    outcomes = Counter(v["outcome"] for v in found.values())
    gradients = Counter(v["gradient"] for v in found.values() if v["gradient"])
    lines = [
        "# torch's operator database in JAX",
        "",
        "Every entry that runs in float32 on a CPU, lowered by `to_jax` and compared with torch:"
        " values, by distribution where an entry draws random numbers, and gradients of the first"
        " sample that has one."
        f" {versions}. Written by `make sweep`, which runs it again and holds it to the exceptions"
        " named here.",
        "",
        "| | entries |",
        "|---|---:|",
        f"| runnable | {len(found)} |",
        f"| value matches | {outcomes['match']} |",
        f"| distribution matches | {outcomes['match in distribution']} |",
        f"| gradient matches | {gradients['match']} |",
        f"| gradient differs | {gradients.total() - gradients['match']} |",
        f"| refused or missing | {len(EXCEPTIONS)} |",
        "",
        "## Exceptions",
        "",
        "| entry | reason |",
        "|---|---|",
        *(f"| `{name}` | {reason} |" for name, reason in sorted(EXCEPTIONS.items())),
        *(f"| `{name}` (gradient) | {why} |" for name, why in sorted(OTHER_GRADIENT.items())),
        "",
        "## All entries",
        "",
        "| entry | value | gradient |",
        "|---|---|---|",
        *(
            f"| `{name}` | {v['outcome']} | {OTHER_GRADIENT.get(name, v['gradient'])} |"
            for name, v in sorted(found.items())
            if name not in EXCEPTIONS
        ),
        "",
    ]
    return "\n".join(lines)


# Where the parts of the whole sweep are kept, until the last has been run.
KEPT = Path(__file__).parents[2] / ".sweep"
PARTS = 8

_RTOL = 2e-3
_DRAWS = 400
_KS = 0.1


# What came of one entry: its name, the outcome, and why.
Verdict = namedtuple("Verdict", "name outcome detail gradient", defaults=("", ""))


def judge(op, most=4):
    """Compare up to ``most`` samples of one entry in value and, where it has one, in gradient."""
    name = name_of(op)
    try:
        samples = _samples(op, most)
    except Exception as err:
        return Verdict(name, "no samples", one_line(err, 300))
    gradient = ""
    for sample in samples:
        try:
            function, given = as_function(op, sample)
            leaves, wants = [t.detach() for t in given], [t.requires_grad for t in given]
            call = lambda *tensors, f=function: _plain(f(*tensors))
            expected = call(*[x.clone() for x in leaves])
        except Exception as err:
            return Verdict(name, "torch fails", one_line(err, 300))
        try:
            arrays = [array_from_torch(x) for x in leaves]
            lowered = to_jax(call, rng=True)
            got = jax.jit(lowered)(jax.random.key(0), *arrays)
        except LoweringError as err:
            kind = "missing" if "no rule" in str(err) else "refused"
            return Verdict(name, kind, one_line(err, 300))
        except Exception as err:
            return Verdict(name, "error", f"{type(err).__name__}: {one_line(err, 300)}")
        if (wrong := _compare(expected, got)) is not None:
            if op.name.startswith(("empty", "new_empty")):
                return Verdict(name, "match", "undefined values")
            if _draws(call, arrays):
                apart = _distance(call, lowered, leaves, arrays)
                matches = "match in distribution" if apart < _KS else "mismatch"
                return Verdict(name, matches, f"KS {apart:.3f}")
            return Verdict(name, "mismatch", wrong)
        if op.supports_autograd and not gradient:
            gradient = _gradient(call, leaves, wants)
    return Verdict(name, "match", "", gradient)


def _samples(op, most):
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    return [*itertools.islice(samples, most)]


def _plain(out):
    # torch's named results (torch.return_types.max) are tuples, but not to JAX.
    if isinstance(out, tuple | list):
        return tuple(_plain(x) for x in out)
    return out


def _tensors(tree):
    return [x for x in jax.tree_util.tree_leaves(tree) if isinstance(x, torch.Tensor | jax.Array)]


def _compare(expected, got):
    a, b = _tensors(expected), _tensors(got)
    if not a:
        numbers = [int(x) for x in jax.tree_util.tree_leaves(got)]
        return None if numbers == jax.tree_util.tree_leaves(expected) else "other numbers"
    if len(a) != len(b):
        return f"{len(a)} results against {len(b)}"
    for x, y in zip(a, b):
        x = x.detach().resolve_conj().resolve_neg()
        x = (x.float() if x.dtype == torch.bfloat16 else x).numpy(force=True)
        y = np.asarray(y)
        if x.shape != y.shape:
            return f"shape {x.shape} against {y.shape}"
        if not x.size:
            continue
        wide = np.complex128 if np.iscomplexobj(x) else np.float64
        x, y = x.astype(wide), y.astype(wide)
        finite = x[np.isfinite(x)]
        scale = max(float(np.abs(finite).max(initial=0.0)), 1e-3)
        if not np.allclose(x, y, rtol=_RTOL, atol=_RTOL * scale, equal_nan=True):
            with np.errstate(invalid="ignore"):
                worst = np.nanmax(np.abs(x - y))
            return f"differs by {worst:.3g} at scale {scale:.3g}"
    return None


def _draws(call, arrays):
    try:
        to_jax(call).program(*arrays)
    except LoweringError as err:
        return "need a key" in str(err)
    return False


@contextlib.contextmanager
def _fresh_seeds():
    """The database's wrappers seed before each call; let them seed differently each time."""
    real, count = torch.manual_seed, itertools.count()
    torch.manual_seed = lambda _: real(next(count))
    try:
        yield
    finally:
        torch.manual_seed = real


def ks_distance(a, b):
    """The distance of Kolmogorov and Smirnov."""
    if a.shape != b.shape:
        return 1.0
    a, b = np.sort(a.ravel()), np.sort(b.ravel())
    both = np.concatenate([a, b])
    ranks = [np.searchsorted(x, both, side="right") / max(len(x), 1) for x in (a, b)]
    return float(np.abs(ranks[0] - ranks[1]).max(initial=0))


def _distance(call, lowered, leaves, arrays):
    """Kolmogorov-Smirnov distance between many draws in both frameworks."""
    draw = jax.jit(jax.vmap(lambda key: lowered(key, *arrays)))
    got = [np.asarray(x) for x in _tensors(draw(jax.random.split(jax.random.key(1), _DRAWS)))]
    with _fresh_seeds():
        runs = [_tensors(call(*[x.clone() for x in leaves])) for _ in range(_DRAWS)]
    expected = [torch.stack(xs).numpy(force=True) for xs in zip(*runs)]
    return max(map(ks_distance, got, expected), default=0.0)


def _gradient(call, leaves, wants):
    """Compare gradients of a weighted sum of the results that can be differentiated."""
    at = [i for i, x in enumerate(leaves) if wants[i] and x.is_floating_point()]
    which = []

    def loss(*tensors):
        outs = [o for o in _tensors(call(*tensors)) if o.is_floating_point()]
        which[:] = which or [i for i, o in enumerate(outs) if o.requires_grad]
        weights = [torch.linspace(0.5, 1.5, outs[i].numel()).reshape(outs[i].shape) for i in which]
        return sum((w * outs[i]).sum() for w, i in zip(weights, which))

    try:
        inputs = [x.clone().requires_grad_(i in at) for i, x in enumerate(leaves)]
        total = loss(*inputs)
        if not which or not at:
            return ""
        of = [inputs[i] for i in at]
        expected = torch.autograd.grad(total, of, allow_unused=True, materialize_grads=True)
    except Exception as err:
        return f"torch fails: {one_line(err, 300)}"
    try:
        gradient = jax.grad(to_jax(loss, rng=True), tuple(i + 1 for i in at))
        got = jax.jit(gradient)(jax.random.key(0), *[array_from_torch(x) for x in leaves])
    except Exception as err:
        return f"{type(err).__name__}: {one_line(err, 300)}"
    wrong = _compare(expected, got)
    return "match" if wrong is None else wrong


def verdicts(chosen, samples):
    found = []
    for count, op in enumerate(chosen):
        found.append(judge(op, samples)._asdict())
        if count % 64 == 63:
            jax.clear_caches()
    return found


def has_wrong_gradient(v):
    return bool(v["gradient"]) and not v["gradient"].startswith(("match", "torch fails"))


def write_the_page(paths):
    """When all parts are there, of the same versions."""
    of = [path.read_text().splitlines() for path in paths if path.exists()]
    everything = [json.loads(line) for _, *lines in of for line in lines]
    sizes, versions = zip(*(head.split(" entries, ") for head, *_ in of), strict=True)
    if len(of) < len(paths) or len(set(versions)) > 1 or len(everything) < sum(map(int, sizes)):
        return
    assert sum(v["outcome"].startswith("match") for v in everything) >= 615
    TABLE.write_text(page(everything, versions[0]))
