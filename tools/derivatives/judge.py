"""Values and derivatives of torch functions in JAX, compared at special points.

Six quantities of a function are compared at a point: its value, its gradient, the product of its
Hessian with a vector in reverse over reverse and in forward over reverse mode, the gradient that
``functx.grad`` takes in torch, lowered, and the derivative of that in forward mode.  A weighted sum
of the results is differentiated.

The judge is torch.  Where the two differ, differences of torch's values and gradients in float64
show whether the function is smooth, and who is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import torch

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax
from functx.compat._bridge import array_from_torch

VALUE, GRADIENT = "value", "gradient"
REVERSE, FORWARD = "reverse over reverse", "forward over reverse"
LOWERED, AGAIN = "gradient taken in torch", "its derivative"
QUANTITIES = (VALUE, GRADIENT, REVERSE, FORWARD, LOWERED, AGAIN)

# The outcome where something differs: who is wrong, that no derivative exists, or nothing.
JAX, TORCH, KINK, UNCLEAR = "to_jax", "torch", "kink", "unclear"

RTOL, ATOL = 1e-6, 1e-12
STEP = 1e-5  # of differences
OFFSETS = (-2, -1, 1, 2)


@dataclass(frozen=True)
class Case:
    """A function, and the points at which it is looked at: by label, the tensors it takes."""

    name: str
    f: Callable
    points: dict[str, tuple[torch.Tensor, ...]]
    by_entry: bool = False  # whether each entry of the tensors is a point
    differentiable: bool = True


class Verdict(NamedTuple):
    """Where a quantity differs, who is wrong, and by how much."""

    quantity: str
    point: str
    outcome: str
    detail: str


class Judged(NamedTuple):
    """The verdicts on a case."""

    points: int
    verdicts: list[Verdict]


def judge(case):
    """Compare a case at all points at which torch does not raise."""
    run, lowered = in_jax(case)
    count, verdicts = 0, []
    for label, xs in case.points.items():
        ours = OfTorch(case, xs)
        value = ours.of(VALUE)
        if isinstance(value, Exception):
            continue
        derivable = case.differentiable and not isinstance(ours.of(GRADIENT), Exception)
        if case.by_entry:
            count += xs[0].numel()
        else:
            count += 1
        try:
            found = {**_numbers(run, xs), **_numbers(lowered, xs)}
        except LoweringError:
            raise
        except (NotImplementedError, ValueError, TypeError) as error:
            verdicts.append(Verdict("all", label, JAX, str(error).splitlines()[0]))
            continue
        for quantity in QUANTITIES:
            if quantity in found and (derivable or quantity == VALUE):
                verdicts += _compare(case, label, quantity, found, ours)
    return Judged(count, verdicts)


def _numbers(run, xs):
    if run is None:
        return {}
    found = run(*map(array_from_torch, xs))
    return {name: [np.asarray(x, float) for x in jax.tree.leaves(of)] for name, of in found.items()}


def _floating(xs):
    return [i for i, x in enumerate(xs) if x.dtype in (torch.float64, torch.float32)]


def as_list(out):
    """The results of a function that has one or several."""
    return list(out) if isinstance(out, tuple | list) else [out]


def _loss(f):
    """One number from all floating-point results, and all results."""

    def loss(*xs):
        out = f(*xs)
        out = [x for x in as_list(out) if isinstance(x, torch.Tensor)]
        total = torch.zeros((), dtype=torch.float64)
        for x in out:
            if x.is_floating_point():
                weights = torch.linspace(0.5, 1.5, max(x.numel(), 2), dtype=torch.float64)
                total = total + (x.double() * weights[: x.numel()].reshape(x.shape)).sum()
        return total, tuple(out)

    return loss


def _vectors(shapes):
    """Vectors to multiply Hessians with; no entry is zero, and no two are the same."""
    place = lambda shape: torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return [(1 + 0.3 * torch.sin(place(s) + i)).reshape(s) for i, s in enumerate(shapes)]


def _placed(xs, at, some):
    full = list(xs)
    for i, x in zip(at, some):
        full[i] = x
    return full


class OfTorch:
    """The quantities of a case at a point by torch, each computed when it is asked for."""

    def __init__(self, case, xs):
        self._by_entry = case.by_entry
        self.at = _floating(xs) if case.differentiable else []
        self.some = tuple(xs[i] for i in self.at)
        self.vectors = tuple(_vectors([x.shape for x in self.some]))
        places, loss = tuple(range(len(self.at))), _loss(case.f)
        self.loss = lambda *some: loss(*_placed(xs, self.at, some))
        self.gradient = torch.func.grad(lambda *some: self.loss(*some)[0], places)
        dot = lambda *some: sum((g * v).sum() for g, v in zip(self.gradient(*some), self.vectors))
        self._ways = {
            VALUE: lambda: self.loss(*self.some)[1],
            GRADIENT: lambda: self.gradient(*self.some),
            REVERSE: lambda: torch.func.grad(dot, places)(*self.some),
            FORWARD: lambda: torch.func.jvp(self.gradient, self.some, self.vectors)[1],
        }
        self._found = {}

    def of(self, quantity):
        """Arrays, or the error that torch raises."""
        quantity = {LOWERED: GRADIENT, AGAIN: FORWARD}.get(quantity, quantity)
        if quantity not in self._found:
            self._found[quantity] = _tried(self._ways[quantity])
        return self._found[quantity]

    def rounding(self, quantity):
        """How much a quantity may lose where terms cancel that are as large as the arguments."""
        if not self._by_entry:
            return 1e-8 * self._scale(quantity)
        if quantity == VALUE:
            return 0.0
        with np.errstate(all="ignore"):
            size = np.max([np.abs(np.asarray(x)) for x in self.some], 0)
            size = np.where(size == 0, 1, size)
            scale = np.max([np.abs(x) for x in self.of(VALUE)], 0) / size
            if quantity not in (GRADIENT, LOWERED):
                slopes = np.max([np.abs(x) for x in self.of(GRADIENT)], 0)
                scale = np.maximum(scale, slopes) / size
            return np.where(np.isfinite(scale), 1e-14 * scale, 0.0)

    def _scale(self, quantity):
        sizes = [x.abs().max().item() for x in self.some if x.numel()]
        size = max(sizes, default=1.0) or 1.0
        scale = _largest(self.of(VALUE))
        if quantity != VALUE:
            scale = max(_largest(self.of(GRADIENT)), scale / size)
        if quantity not in (VALUE, GRADIENT, LOWERED):
            scale = max(_largest(self.of(quantity)), scale / size)
        return scale

    def by_differences(self, quantity):
        """Derivatives; NaN where the derivatives of the two sides differ."""
        if quantity in (GRADIENT, LOWERED):
            return self._entry_by_entry()
        return _differences(self.gradient, self.some, self.vectors)

    def _entry_by_entry(self):
        value = lambda *some: (self.loss(*some)[0],)
        found = []
        for i, x in enumerate(self.some):
            slopes = np.full(tuple(x.shape), np.nan)
            for place in np.ndindex(*x.shape):
                steps = [torch.zeros_like(s) for s in self.some]
                steps[i][place] = 1.0
                slopes[place] = _differences(value, self.some, steps)[0].ravel()[0]
            found.append(slopes)
        return found


def _largest(arrays):
    if isinstance(arrays, Exception):
        return 0.0
    return max((np.abs(a[np.isfinite(a)]).max(initial=0.0) for a in arrays), default=0.0)


def _tried(way):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [np.asarray(x.detach(), float) for x in way()]
        except Exception as error:  # torch has no rule, or refuses the values
            return error


def _differences(f, at, steps):
    """Derivatives along some steps; NaN where the derivatives of the two sides differ."""
    moved = [_tried(lambda k=k: f(*[x + k * STEP * s for x, s in zip(at, steps)])) for k in OFFSETS]
    if any(isinstance(out, Exception) for out in moved):  # outside of where it is defined
        return [np.full(tuple(x.shape), np.nan) for x in at]
    found = []
    for a2, a, b, b2 in zip(*moved):
        with np.errstate(all="ignore"):
            middle = (8 * (b - a) - (b2 - a2)) / (12 * STEP)
            left, right, across = (a - a2) / STEP, (b2 - b) / STEP, (b - a) / (2 * STEP)
            bound = 2e-3 * np.maximum(np.abs(middle), 1e-2)
            smooth = (np.abs(left - right) < bound) & (np.abs(across - middle) < bound)
        found.append(np.where(smooth & np.isfinite(middle), middle, np.nan))
    return found


def in_jax(case):
    """Jitted functions from arrays to quantities by name: in JAX, and of gradients by torch."""
    loss = to_jax(_loss(case.f))

    def parts(xs):
        at = [i for i, x in enumerate(xs) if x.dtype.kind == "f"]
        some = tuple(xs[i] for i in at)
        vectors = tuple(map(array_from_torch, _vectors([x.shape for x in some])))
        return at, some, tuple(v.astype(x.dtype) for v, x in zip(vectors, some))

    def run(*xs):
        if not case.differentiable:
            return {VALUE: loss(*xs)[1]}
        at, some, vectors = parts(xs)
        places = tuple(range(len(at)))
        gradient = jax.grad(lambda *some: loss(*_placed(xs, at, some))[0], places)
        dot = lambda *some: sum((g * v).sum() for g, v in zip(gradient(*some), vectors))
        return {
            VALUE: loss(*xs)[1],
            GRADIENT: gradient(*some),
            REVERSE: jax.grad(dot, places)(*some),
            FORWARD: jax.jvp(gradient, some, vectors)[1],
        }

    if not case.differentiable:
        return jax.jit(run), None
    first = next(iter(case.points.values()))
    at = tuple(_floating(first))
    of_torch = to_jax(functx.grad(lambda *xs: _loss(case.f)(*xs)[0], at))

    def lowered(*xs):
        at, some, vectors = parts(xs)
        gradient = lambda *some: of_torch(*_placed(xs, at, some))
        return dict(zip((LOWERED, AGAIN), jax.jvp(gradient, some, vectors)))

    return jax.jit(run), jax.jit(lowered) if _lowers(of_torch, first) else None


def _lowers(f, xs):
    try:
        f.program(*map(array_from_torch, xs))
    except (
        LoweringError,
        RuntimeError,
    ):  # a backward operation has no rule, or torch has no backward
        return False
    return True


def _compare(case, label, quantity, found, ours):
    """Verdicts on where a quantity of JAX is not torch's."""
    given, expected = found[quantity], ours.of(quantity)
    if isinstance(expected, Exception):  # differences are not as exact, and blind for small kinks
        expected = ours.by_differences(quantity)
        bound = np.maximum(ours.rounding(quantity), 1e-3 * _largest(expected))
        wrong = [~_close(a, b, bound, 5e-3) & ~np.isnan(b) for a, b in zip(given, expected)]
    else:
        bound = ours.rounding(quantity)
        wrong = [~_close(a, b, bound, RTOL) for a, b in zip(given, expected)]
    if quantity != VALUE:  # a derivative needs a value
        there = [np.isfinite(v) for v in ours.of(VALUE)]
        keep = there[0] if case.by_entry else all(v.all() for v in there)
        wrong = [w & keep for w in wrong]
    if any(w.any() for w in wrong):
        yield from _described(case, label, quantity, wrong, found, ours, expected)


def _described(case, label, quantity, wrong, found, ours, expected):
    """One verdict for each point and outcome."""
    slopes = None if quantity == VALUE else ours.by_differences(quantity)
    others = ours.of({REVERSE: FORWARD, FORWARD: REVERSE, AGAIN: REVERSE}.get(quantity, quantity))
    own = found.get({LOWERED: GRADIENT, AGAIN: FORWARD}.get(quantity))
    seen = set()
    for k, at in enumerate(wrong):
        for place in map(tuple, np.argwhere(np.atleast_1d(at))):

            def pick(arrays, k=k, place=place):
                missing = arrays is None or isinstance(arrays, Exception)
                return float("nan") if missing else float(np.atleast_1d(arrays[k])[place])

            a, b, right = pick(found[quantity]), pick(expected), pick(slopes)
            outcome = JAX if quantity == VALUE else _who(a, b, right, pick(others), pick(own))
            where = _entry(case.points[label], place[0]) if case.by_entry else label
            if (where, outcome) not in seen:
                seen.add((where, outcome))
                detail = f"argument {k + 1}: JAX {a:.6g}, torch {b:.6g}, differences {right:.6g}"
                yield Verdict(quantity, where, outcome, detail)


def _entry(xs, place):
    return ", ".join(f"{x.ravel()[place].item():.3g}" for x in xs)


def _close(a, b, bound, rtol):
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= rtol * np.abs(b) + np.maximum(ATOL, bound)
    return near | (a == b) | (~np.isfinite(a) & ~np.isfinite(b))


def _who(ours, torch_s, right, torch_s_other, own):
    """Who is wrong.

    Args:
        ours: the number in JAX.
        torch_s: that of torch.
        right: that of differences, NaN where they say nothing.
        torch_s_other: of the same derivative in torch's other mode.
        own: of a gradient that torch takes, what JAX's own derivative is.
    """
    near = lambda x: abs(x - right) <= 1e-3 * max(abs(right), 1e-2)
    same = lambda x, y: np.isfinite(x) and bool(_close(np.array(x), np.array(y), 0.0, RTOL))
    if near(ours) and not near(torch_s):
        return TORCH
    if same(own, torch_s) or near(own):
        return TORCH  # lowered, its formula is as exact as there
    if near(torch_s) and not near(ours):
        return JAX
    if same(ours, torch_s_other) and not same(ours, torch_s):
        return TORCH  # its two modes differ
    return KINK if np.isnan(right) else UNCLEAR
