"""Runs a program with its regions and without, and says how the two differ.

Both runs start from the same seeds in fresh worlds; without regions, ``remat`` is the identity, and
everything else is the same.
"""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import functx

from . import stack, world
from .program import Program

# Relative, and relative to the largest entry. The second are for programs in which sums of bfloat16
# numbers may be taken in another order.
TOLERANCES = {False: (1e-9, 1e-10), True: (5e-2, 5e-2)}
ZEROS = "no gradient became a gradient of zeros"
OUTCOMES = {
    "equal": "values, gradients, buffers and generators are the same",
    "refused by torch": "without regions it raises: by itself, or both",
    "refused": "functx says that it can't, and rule 4 may be why",
    "refused wrongly": "functx says that it can't, though nothing is in the way",
    "wrong": "something differs",
    "crashed": "with regions only, it raises something else, or the process died",
    "leaked": "tensors stay alive, or torch's stacks or modes are not as they were",
}
FAILURES = ("wrong", "crashed", "leaked", "refused wrongly")


@dataclass
class Verdict:
    """An outcome, why, and the traceback of what was raised."""

    outcome: str
    why: str = ""
    trace: str = ""


def identity(f: Any = None, **options: Any) -> Any:
    """``remat`` without the regions."""
    return f


@dataclass
class Run:
    """What a run gave: all that is compared, or an exception; and what it left behind."""

    found: dict[str, Any] | None
    error: Exception | None
    trace: str
    left: int
    modes: dict[str, Any]


def modes() -> dict[str, Any]:
    """Settings and stacks of torch that a run leaves as it found them."""
    return {
        "functions": torch._C._len_torch_function_stack(),
        "dispatch": torch._C._len_torch_dispatch_stack(),
        "functorch": torch._C._functorch.peek_interpreter_stack() is None,
        "dual level": torch.autograd.forward_ad._current_level,
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
    }


def _tensors() -> int:
    """How many tensors are alive that were not when the collector was last frozen."""
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def _forget() -> None:
    """What is alive now is not looked at again, which would take most of a run's time."""
    gc.collect()
    gc.freeze()


def run(program: Program, remat: Any, library: Any = functx) -> Run:
    """One run in a fresh world."""
    torch.manual_seed(0)
    before = modes()
    _forget()
    found, error, trace = None, None, ""
    globals_ = world.namespace(remat, library)
    globals_.update(stack.layers(globals_["fx"]))
    refs = [weakref.ref(p) for p in globals_["self"].parameters()]
    try:
        f = program.compiled(globals_)
        found = stack.finish(program.end, f, globals_)
        f = None
    except Exception as e:
        trace = traceback.format_exc()
        error = e.with_traceback(None)
        error.__cause__ = error.__context__ = None
    globals_.clear()
    if found is not None:
        found = pytree.tree_map(_entries, found)
    left = _tensors() + sum(r() is not None for r in refs)
    after = modes()
    return Run(
        found, error, trace, left, {k: (before[k], v) for k, v in after.items() if v != before[k]}
    )


class Entries:
    """A tensor's type, requires_grad aside, and entries, kept where `_tensors` does not count them."""

    def __init__(self, t: torch.Tensor) -> None:
        self.kind = (tuple(t.shape), str(t.dtype))
        self.values = t.numpy(force=True).copy()


def _entries(t: Any) -> Any:
    return Entries(t) if isinstance(t, torch.Tensor) else t


def difference(expected: Any, actual: Any, loose: bool) -> str:
    """Where two runs' results differ, or nothing."""
    note = ""
    for name in expected:
        a, tree = pytree.tree_flatten(expected[name])
        b, other = pytree.tree_flatten(actual[name])
        if tree != other:
            return f"{name}: {tree} became {other}"
        for n, (one, two) in enumerate(zip(a, b)):
            where = f"{name}[{n}]: "
            if one is None and isinstance(two, Entries) and not two.values.any():
                note = ZEROS
            elif not isinstance(one, Entries) or not isinstance(two, Entries):
                if isinstance(one, Entries) or isinstance(two, Entries) or one != two:
                    return f"{where}{_shown(one)} became {_shown(two)}"
            elif one.kind != two.kind:
                return f"{where}{one.kind} became {two.kind}"
            elif not _close(one.values, two.values, loose):
                return f"{where}{_shown(one)} became {_shown(two)}"
    return note


def _shown(entry: Any) -> str:
    return (
        re.sub(r"\s+", " ", repr(entry.values))[:300] if isinstance(entry, Entries) else repr(entry)
    )


def _close(a: Any, b: Any, loose: bool) -> bool:
    a, b = torch.from_numpy(a), torch.from_numpy(b)
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = a[a.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    rtol, atol = TOLERANCES[loose]
    return torch.allclose(a, b, rtol, atol * max(1.0, largest), equal_nan=True)


def warm() -> None:
    """Have torch import what it imports late, which takes seconds, before processes are forked."""
    with quiet():
        for layer in ("jacobian({}, 'jacrev')", "pushforward({})"):
            run(Program([], "torch.sin(m0)", [layer], "values"), identity)
    _forget()


@contextlib.contextmanager
def quiet():
    """In double precision, and without warnings."""
    dtype = torch.get_default_dtype()
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)


def judge(
    program: Program, remat: Callable[..., Any] | None = None, library: Any = functx
) -> Verdict:
    """Compare a program with itself without regions.

    Args:
        program: what to run.
        remat: what it calls ``remat``; functx's unless told.
        library: whose transforms the run without regions uses: functx, or torch.func as a second
            reference.
    """
    with quiet():
        plain = run(program, identity, library)
        regions = run(program, functx.remat if remat is None else remat)
    if regions.modes:
        return Verdict("leaked", f"before and after: {regions.modes}", regions.trace)
    if plain.error is not None:
        return Verdict("refused by torch", _head(plain.error), plain.trace)
    if isinstance(regions.error, (functx.RematError, functx.ReplayError)):
        outcome = "refused" if program.may_refuse else "refused wrongly"
        return Verdict(outcome, _head(regions.error), regions.trace)
    if regions.error is not None:
        return Verdict("crashed", _head(regions.error), regions.trace)
    what = difference(plain.found, regions.found, program.loose)
    if what and what != ZEROS:
        return Verdict("wrong", what)
    if regions.left > plain.left:
        return Verdict("leaked", f"{regions.left - plain.left} tensors")
    return Verdict("equal", what)


def _head(error: Exception) -> str:
    """The beginning of a message, without names and numbers that differ by program."""
    text = f"{type(error).__name__}: {error}"
    text = re.sub(r"0x[0-9a-f]+|\b[a-z]?\d+\b", "#", " ".join(text.split()))
    return text[:140]
