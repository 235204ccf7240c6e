"""Sweep torch's own operator database: is each operation lowered, with torch's values?

Run as a program (``python -m compat.opinfo``, in ``tests``) it prints what does not match and can
write every verdict; started again it goes on where it was. ``make sweep`` runs it in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from opinfo.database import entries, name_of

import functx
from functx import compat
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
                if op.supports_autograd:
                    gradient = _gradients_drawn(call, leaves, wants)
                return Verdict(name, matches, f"KS {apart:.3f}", gradient)
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


@dataclass(frozen=True)
class _Loss:
    """A weighted sum of the results of an entry that can be differentiated, in some arguments."""

    call: Any
    at: list[int]
    which: list[int]
    weights: list[torch.Tensor]

    def __call__(self, *tensors: Any) -> Any:
        outs = [o for o in _tensors(self.call(*tensors)) if o.is_floating_point()]
        return sum((w * o).sum() for w, o in zip(self.weights, [outs[i] for i in self.which]))

    def in_torch(self, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The sum, and its gradients."""
        inputs = [x.clone().requires_grad_(i in self.at) for i, x in enumerate(leaves)]
        total = self(*inputs)
        found = torch.autograd.grad(total, [inputs[i] for i in self.at], allow_unused=True)
        zeros = [torch.zeros_like(leaves[i]) for i in self.at]
        return total.detach(), [z if g is None else g for z, g in zip(zeros, found)]

    def in_jax(self) -> Any:
        """The same, as a function of a key and arrays."""
        return jax.value_and_grad(to_jax(self, rng=True), tuple(i + 1 for i in self.at))


def _loss(call: Any, leaves: list[torch.Tensor], wants: list[bool]) -> _Loss | None:
    at = [i for i, x in enumerate(leaves) if wants[i] and x.is_floating_point()]
    inputs = [x.clone().requires_grad_(i in at) for i, x in enumerate(leaves)]
    every = [o for o in _tensors(call(*inputs)) if o.is_floating_point()]
    which = [i for i, o in enumerate(every) if o.requires_grad]
    outs = [every[i] for i in which]
    weights = [torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape) for o in outs]
    return _Loss(call, at, which, weights) if outs and at else None


def _gradient(call: Any, leaves: list[torch.Tensor], wants: list[bool]) -> str:
    try:
        loss = _loss(call, leaves, wants)
        if loss is None:
            return ""
        expected = loss.in_torch(leaves)[1]
    except Exception as err:
        return f"torch fails: {_line(err)}"
    try:
        arrays = [array_from_torch(x) for x in leaves]
        got = jax.jit(loss.in_jax())(jax.random.key(0), *arrays)[1]
    except Exception as err:
        return f"{type(err).__name__}: {_line(err)}"
    wrong = _compare(expected, got)
    return "match" if wrong is None else wrong


def _gradients_drawn(call: Any, leaves: list[torch.Tensor], wants: list[bool]) -> str:
    """The distribution of gradients, and of what ties them to the values of the same draw."""
    try:
        loss = _loss(call, leaves, wants)
        if loss is None:
            return ""
        with _fresh_seeds():
            runs = [loss.in_torch(leaves) for _ in range(_DRAWS)]
        expected = [torch.stack(xs).numpy() for xs in zip(*(gradients for _, gradients in runs))]
        values = torch.stack([value for value, _ in runs]).numpy()
    except Exception as err:
        return f"torch fails: {_line(err)}"
    try:
        arrays = [array_from_torch(x) for x in leaves]
        draw = jax.jit(jax.vmap(lambda key: loss.in_jax()(key, *arrays)))
        drawn, got = draw(jax.random.split(jax.random.key(1), _DRAWS))
    except Exception as err:
        return f"{type(err).__name__}: {_line(err)}"
    scale = max(float(values.std()), 1e-3)

    def beyond_linear(total: Any, gradients: Any) -> Any:
        along = sum(
            (np.asarray(g) * leaves[i].numpy()).reshape(_DRAWS, -1).sum(-1)
            for i, g in zip(loss.at, gradients)
        )
        return np.round((np.asarray(total) - along) / scale, 1)

    # What is nothing next to the others is rounded off, in either framework to something else,
    # and more than their rounding, which depends on how XLA optimizes.
    grain = max(float(np.abs(e).max(initial=0)) for e in expected) * 1e-3 or 1.0
    coarse = [[np.round(np.asarray(g) / grain) for g in side] for side in (got, expected)]
    apart = max(map(_apart, *coarse))
    tied = _apart(beyond_linear(drawn, got), beyond_linear(values, expected))
    matches = apart < _KS and tied < 2 * _KS  # a single number a draw
    return "match in distribution" if matches else f"KS {apart:.3f}, with the value {tied:.3f}"


def _line(err: BaseException) -> str:
    return " ".join(str(err).split())[:300]


def sources() -> str:
    """What verdicts depend on: the versions of both frameworks, and these files.

    The files are named by the commit that changed them last, and by what is in them.
    """
    files = [*Path(compat.__file__).parent.rglob("*.py"), Path(__file__)]
    text = b"".join(file.read_bytes() for file in sorted(files))
    digest = hashlib.sha256(text).hexdigest()[:16]
    versions = f"torch {torch.__version__.split('+')[0]}, JAX {jax.__version__}"
    return f"{versions}, functx {functx.__version__} {_commit(files)}, {digest}"


def _commit(files: list[Path]) -> str:
    here = ["git", "-C", str(Path(__file__).parent)]
    paths = [str(file.resolve()) for file in files]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        last = subprocess.check_output([*here, "log", "-1", "--format=%h", "--", *paths], text=True)
        changed = subprocess.run([*here, "diff", "--quiet", "HEAD", "--", *paths])
        return f"at commit {last.strip()}" + (" with changes" if changed.returncode else "")
    return "of no commit"


def read(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """What a file says its verdicts are of, and the verdicts."""
    head, *lines = path.read_text().splitlines() if path.exists() else [""]
    return head, [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", nargs="*", help="only entries that start so")
    parser.add_argument("--exact", nargs="*", help="only entries that are called so")
    parser.add_argument("--part", default="0/1", help="2/8: the third of eight parts")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path, help="a verdict a line; what it has is not run again")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", True)
    # Half of the time is XLA's, and what is compared are its results, not its optimizations.
    jax.config.update("jax_disable_most_optimizations", True)
    part, parts = map(int, options.part.split("/"))
    chosen = [
        op
        for op in sorted(entries(torch.float32), key=name_of)[part::parts]
        if not options.names or any(op.name.startswith(n) for n in options.names)
        if not options.exact or name_of(op) in options.exact
    ]
    head, found = read(options.out) if options.out else ("", [])
    if options.out and head != (now := f"{len(chosen)} entries, {sources()}"):
        found = []
        options.out.write_text(now + "\n")
    known = {v["name"] for v in found}
    for count, op in enumerate(op for op in chosen if name_of(op) not in known):
        start = time.process_time()
        verdict = judge(op, options.samples)
        found.append(asdict(verdict))
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
        if verdict.outcome != "match" or not verdict.gradient_matches:
            seconds = f"{time.process_time() - start:.0f} s"
            print(*asdict(verdict).values(), seconds, sep=" | ", flush=True)
        if count % 16 == 15:
            jax.clear_caches()
    print(len(found), Counter(v["outcome"] for v in found))


if __name__ == "__main__":
    main()
