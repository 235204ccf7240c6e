"""Sweep torch's own operator database: is each operation lowered, with torch's values?

``python -m compat.to_jax.opinfo --out FILE``, in ``tests``, prints what does not match and writes
every verdict, a line each. ``make sweep`` runs it in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from opinfo.database import entries, name_of

import functx
from functx._errors import LoweringError
from functx.compat import to_jax
from functx.compat._dlpack import array_from_torch

_RTOL = 2e-3
_DRAWS = 400
_KS = 0.1


@dataclass(frozen=True)
class Verdict:
    """What came of one entry: its name, the outcome, and why."""

    name: str
    outcome: str
    detail: str = ""
    gradient: str = ""

    @property
    def gradient_matches(self) -> bool:
        """Whether nothing is wrong with the gradient."""
        return not self.gradient or self.gradient.startswith("match")


def judge(op: Any, most: int = 4) -> Verdict:
    """Compare up to ``most`` samples of one entry in value and, where it has one, in gradient."""
    name = name_of(op)
    try:
        samples = _samples(op, most)
    except Exception as err:
        return Verdict(name, "no samples", _line(err))
    gradient = ""
    for sample in samples:
        try:
            call, leaves, wants = _function(op, sample)
            expected = call(*[x.clone() for x in leaves])
        except Exception as err:
            return Verdict(name, "torch fails", _line(err))
        try:
            arrays = [array_from_torch(x) for x in leaves]
            lowered = to_jax(call, rng=True)
            got = jax.jit(lowered)(jax.random.key(0), *arrays)
        except LoweringError as err:
            kind = "missing" if "no rule" in str(err) else "refused"
            return Verdict(name, kind, _line(err))
        except Exception as err:
            return Verdict(name, "error", f"{type(err).__name__}: {_line(err)}")
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


def _samples(op: Any, most: int) -> list[Any]:
    out = []
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
        out.append(sample)
        if len(out) == most:
            break
    return out


def _function(op: Any, sample: Any) -> tuple[Any, list[torch.Tensor], list[bool]]:
    everything = (sample.input, sample.args, sample.kwargs)
    flat, tree = jax.tree_util.tree_flatten(everything)
    where = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        full = list(flat)
        for i, t in zip(where, tensors):
            full[i] = t
        first, args, kwargs = jax.tree_util.tree_unflatten(tree, full)
        out = op.op(first, *args, **kwargs)
        out = sample.output_process_fn_grad(out) if op.supports_autograd else out
        return _plain(out)

    return call, [flat[i].detach() for i in where], [flat[i].requires_grad for i in where]


def _plain(out: Any) -> Any:
    # torch's named results (torch.return_types.max) are tuples, but not to JAX.
    if isinstance(out, tuple | list):
        return tuple(_plain(x) for x in out)
    return out


def _tensors(tree: Any) -> list[Any]:
    return [x for x in jax.tree_util.tree_leaves(tree) if isinstance(x, torch.Tensor | jax.Array)]


def _compare(expected: Any, got: Any) -> str | None:
    a, b = _tensors(expected), _tensors(got)
    if not a:
        same = [int(x) for x in jax.tree_util.tree_leaves(got)] == jax.tree_util.tree_leaves(
            expected
        )
        return None if same else "other numbers"
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


def _draws(call: Any, arrays: Any) -> bool:
    try:
        to_jax(call).program(*arrays)
    except LoweringError as err:
        return "need a key" in str(err)
    return False


@contextlib.contextmanager
def _fresh_seeds() -> Iterator[None]:
    """The database's wrappers seed before each call; let them seed differently each time."""
    real, count = torch.manual_seed, itertools.count()
    torch.manual_seed = lambda _: real(next(count))  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.manual_seed = real


def _distance(call: Any, lowered: Any, leaves: Any, arrays: Any) -> float:
    """Kolmogorov-Smirnov distance between many draws in both frameworks."""
    draw = jax.jit(jax.vmap(lambda key: lowered(key, *arrays)))
    got = [np.asarray(x) for x in _tensors(draw(jax.random.split(jax.random.key(1), _DRAWS)))]
    with _fresh_seeds():
        runs = [_tensors(call(*[x.clone() for x in leaves])) for _ in range(_DRAWS)]
    expected = [torch.stack(xs).numpy(force=True) for xs in zip(*runs)]
    return max(map(_apart, got, expected), default=0.0)


def _apart(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    if a.shape != b.shape:
        return 1.0
    a, b = np.sort(a.ravel()), np.sort(b.ravel())
    both = np.concatenate([a, b])
    ranks = [np.searchsorted(x, both, side="right") / max(len(x), 1) for x in (a, b)]
    return float(np.abs(ranks[0] - ranks[1]).max(initial=0))


def _gradient(call: Any, leaves: list[torch.Tensor], wants: list[bool]) -> str:
    """Compare gradients of a weighted sum of the results that can be differentiated."""
    at = [i for i, x in enumerate(leaves) if wants[i] and x.is_floating_point()]
    which: list[int] = []

    def loss(*tensors: Any) -> Any:
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
        return f"torch fails: {_line(err)}"
    try:
        gradient = jax.grad(to_jax(loss, rng=True), tuple(i + 1 for i in at))
        got = jax.jit(gradient)(jax.random.key(0), *[array_from_torch(x) for x in leaves])
    except Exception as err:
        return f"{type(err).__name__}: {_line(err)}"
    wrong = _compare(expected, got)
    return "match" if wrong is None else wrong


def _line(err: BaseException) -> str:
    return " ".join(str(err).split())[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exact", nargs="*", help="only entries that are called so")
    parser.add_argument("--part", default="0/1", help="2/8: the third of eight parts")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", True)
    # Half of the time is XLA's, and what is compared are its results, not its optimizations.
    jax.config.update("jax_disable_most_optimizations", True)
    part, parts = map(int, options.part.split("/"))
    chosen = sorted(entries(torch.float32), key=name_of)[part::parts]
    if options.exact:
        chosen = [op for op in chosen if name_of(op) in options.exact]
    versions = f"torch {torch.__version__.split('+')[0]}, JAX {jax.__version__}"
    lines = [f"{len(chosen)} entries, {versions}, functx {functx.__version__}"]
    for count, op in enumerate(chosen):
        verdict = judge(op, options.samples)
        lines.append(json.dumps(asdict(verdict)))
        if verdict.outcome != "match" or not verdict.gradient_matches:
            print(*asdict(verdict).values(), sep=" | ", flush=True)
        if count % 16 == 15:
            jax.clear_caches()
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
