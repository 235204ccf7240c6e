"""Runs a program with its regions and without, and says how the two differ.

Both start from the same seeds in fresh worlds. Without regions, ``remat`` is the identity.
"""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import functx

from . import stack, world
from .program import Program

OUTCOMES = {
    "equal": "values, gradients, buffers and generators are the same",
    "refused by torch": "it raises without regions, too",
    "refused": "functx says that it can't, and rule 4 may be why",
    "refused wrongly": "functx says that it can't, though nothing is in the way",
    "wrong": "something differs",
    "crashed": "it raises something else with regions only, or the process ended",
    "leaked": "tensors stay alive, or torch's stacks or modes are not as they were",
}
FAILURES = ("wrong", "crashed", "leaked", "refused wrongly")
# Relative, and to the largest entry or 1; then where sums of bfloat16, or of 1e6, are reordered.
TOLERANCES = {False: (1e-9, 1e-10), True: (5e-2, 5e-2)}
ZEROS = "no gradient became a gradient of zeros"


@dataclass
class Verdict:
    """An outcome, why, and the traceback of what was raised."""

    outcome: str
    why: str = ""
    trace: str = ""


def identity(f: Any = None, **options: Any) -> Any:
    """``remat`` without the regions."""
    return f


def modes() -> dict[str, Any]:
    """Settings and stacks of torch that a run leaves as it found them."""
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "no functorch level": torch._C._functorch.peek_interpreter_stack() is None,
        "dual level": torch.autograd.forward_ad._current_level,
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
    }


def _forget() -> None:
    """What is alive now is not looked at again, which would take most of a run's time."""
    gc.collect()
    gc.freeze()


def run(program: Program, remat: Any, library: Any = functx) -> types.SimpleNamespace:
    """What a run in a fresh world gave or raised, and the tensors and modes that it left behind."""
    _forget()
    torch.manual_seed(0)
    before, found, error, trace = modes(), {}, None, ""
    globals_ = world.namespace(remat, library)
    globals_.update(stack.layers(globals_["fx"]))
    parameters = [weakref.ref(p) for p in globals_["self"].parameters()]
    try:
        found = stack.finish(program.end, program.compiled(globals_), globals_)
    except Exception as e:
        trace, error = traceback.format_exc(), e.with_traceback(None)
        error.__cause__ = error.__context__ = None
    globals_.clear()
    gc.collect()
    left = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    left += sum(p() is not None for p in parameters)
    changed = [f"{k}: {before[k]} became {v}" for k, v in modes().items() if v != before[k]]
    return types.SimpleNamespace(
        found=found, error=error, trace=trace, left=left, modes=", ".join(changed)
    )


def difference(expected: Any, actual: Any, loose: bool) -> str:
    """Where two runs' results differ, or nothing."""
    note = ""
    for name in expected | actual:
        a, tree = pytree.tree_flatten(expected.get(name))
        b, other = pytree.tree_flatten(actual.get(name))
        if tree != other:
            return f"{name}: {tree} became {other}"
        for one, two in zip(a, b):
            if one is None and isinstance(two, np.ndarray) and not two.any():
                note = ZEROS
            elif not _same(one, two, loose):
                return re.sub(r"\s+", " ", f"{name}: {str(one)[:300]} became {str(two)[:300]}")
    return note


def _same(one: Any, two: Any, loose: bool) -> bool:
    if not isinstance(one, np.ndarray) or type(two) is not type(one):
        return type(one) is type(two) and one == two
    largest = np.abs(np.nan_to_num(one, posinf=0, neginf=0)).max(initial=1)
    rtol, atol = TOLERANCES[bool(loose or largest > 1e6)] * np.array([1, largest])
    same = (one.shape, one.dtype) == (two.shape, two.dtype)
    return same and (largest > 1e12 or np.allclose(two, one, rtol, atol, equal_nan=True))


@contextlib.contextmanager
def quiet():
    """In double precision, without warnings, and with nothing changed afterwards."""
    dtype, state, grad = torch.get_default_dtype(), torch.get_rng_state(), torch.is_grad_enabled()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)
        torch.set_grad_enabled(grad)


def warm() -> None:
    """Have torch import what it imports late, which takes seconds, before processes are forked."""
    with quiet():
        for layer in ("jacobian({}, 'jacrev')", "pushforward({})"):
            run(Program([], "torch.sin(m0)", [layer], "values"), identity)
        _forget()


def judge(
    program: Program, remat: Callable[..., Any] = functx.remat, library: Any = functx
) -> Verdict:
    """Compare a program with itself without regions, under the transforms of ``library``."""
    with quiet():
        plain = run(program, identity, library)
        regions = run(program, remat)
    if regions.modes:
        return Verdict("leaked", regions.modes, regions.trace)
    if plain.error is not None:
        return Verdict("refused by torch", _head(plain.error), plain.trace)
    if isinstance(regions.error, functx.RematError | functx.ReplayError):
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
    return re.sub(r"0x[0-9a-f]+|\b[a-z]?\d+\b", "#", " ".join(text.split()))[:140]
