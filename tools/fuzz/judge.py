"""Runs a program with its regions and without, and says how the two differ.

Both start from the same seeds in fresh worlds. Without regions, ``remat`` is the identity.
"""

import contextlib
import gc
import re
import traceback
import types
import warnings
import weakref
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import BaseTorchDispatchMode

import functx
from tools.fuzz import world
from tools.fuzz.world import numbers
from tools.fuzz.writer import Program

FAILURES = ("wrong", "crashed", "leaked", "refused wrongly")
# Relative, and to the largest entry or 1; then where sums of bfloat16, or of 1e6, are reordered.
TOLERANCES = {False: (1e-9, 1e-10), True: (5e-2, 5e-2)}
ZEROS = "no gradient became a gradient of zeros"


@dataclass
class Verdict:
    """An outcome, why, and the traceback of what was raised.

    Values, gradients, buffers and generators are ``equal``, or something is ``wrong``. What raises
    without regions too, perhaps in a dispatch mode, is ``refused by torch``; where functx says that
    it can't, ``refused``, or ``refused wrongly`` if nothing is in the way; else ``crashed``. What
    stays alive, and stacks or modes of torch that are not as they were, are ``leaked``.
    """

    outcome: str
    why: str = ""
    trace: str = ""


def identity(f=None, **options):
    """``remat`` without the regions."""
    return f


def modes():
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


def _forget():
    """What is alive now is not looked at again, which would take most of a run's time."""
    gc.collect()
    gc.freeze()


def run(program, remat, moved=1.0):
    """What runs in a fresh world gave or raised, and the tensors and modes that they left behind.

    Runs after the first are of other inputs, and some find other things in the world. So their
    regions follow the scripts of earlier ones, or depart from them.
    """
    _forget()
    torch.manual_seed(0)
    before, found, error, trace = modes(), {}, None, ""
    globals_ = world.namespace(remat)
    globals_.update(layers(globals_["fx"]))
    parameters = [weakref.ref(p) for p in globals_["self"].parameters()]
    try:
        f = program.compiled(globals_)
        for n, first in enumerate(program.runs):
            globals_["box"].t = globals_["box"].t.detach()  # of a graph that is freed
            world.change(globals_, first)
            again = finish(program.end, f, globals_, moved / (-2) ** n)
            found |= {f"{name} of run {n}": value for name, value in again.items()}
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


def difference(expected, actual, loose, moved=None):
    """Where two runs' results differ, by more than where inputs are ``moved``; or nothing."""
    note = ""
    for name in expected | actual:
        a, tree = pytree.tree_flatten(expected.get(name))
        b, other = pytree.tree_flatten(actual.get(name))
        if tree != other:
            return f"{name}: {tree} became {other}"
        for one, two, third in zip(a, b, a if moved is None else pytree.tree_leaves(moved[name])):
            if one is None and isinstance(two, np.ndarray) and not two.any():
                note = ZEROS
            elif not _same(one, two, third, loose):
                return re.sub(r"\s+", " ", f"{name}: {str(one)[:300]} became {str(two)[:300]}")
    return note


def _same(one, two, third, loose):
    if not isinstance(one, np.ndarray) or type(two) is not type(one):
        return type(one) is type(two) and one == two
    largest = np.abs(np.nan_to_num(one, posinf=0, neginf=0)).max(initial=1)
    rtol, atol = TOLERANCES[bool(loose or largest > 1e6)] * np.array([1, largest])
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    if largest > 1e12 or np.allclose(two, one, rtol, atol, equal_nan=True):
        return True
    return one.dtype.kind == "f" and abs(one - two).max() < 10 * abs(one - third).max()


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


def warm():
    """Have torch import what it imports late, which takes seconds, before processes are forked."""
    with quiet():
        for layer in ("jacobian({}, 'jacrev')", "pushforward({})"):
            run(Program([], "torch.sin(m0)", [layer], "values", (True,)), identity)
        _forget()


def judge(program, remat=functx.remat):
    """Compare a program with itself without regions."""
    with quiet():
        plain = run(program, identity)
        regions = run(program, remat)
    if regions.modes:
        return Verdict("leaked", regions.modes, regions.trace)
    if plain.error is not None:
        return Verdict("refused by torch", _head(plain.error), plain.trace)
    if isinstance(regions.error, functx.RematError | functx.ReplayError):
        outcome = "refused" if program.may_refuse else "refused wrongly"
        return Verdict(outcome, _head(regions.error), regions.trace)
    if regions.error is not None:
        with quiet(), BaseTorchDispatchMode():
            in_a_mode = run(program, identity).error
        # Below a node torch goes back also to what only a result that nobody reads depends on.
        spoiled = "write" in program.features and "modified by an inplace" in str(regions.error)
        torchs = spoiled or type(in_a_mode) is type(regions.error)
        outcome = "refused by torch" if torchs else "crashed"
        return Verdict(outcome, _head(regions.error), regions.trace)
    what = difference(plain.found, regions.found, program.loose)
    if what and what != ZEROS:
        with quiet():
            eps = torch.finfo(torch.bfloat16 if program.loose else torch.float64).eps
            moved = run(program, identity, 1 + eps).found
        what = difference(plain.found, regions.found, program.loose, moved)
    if what and what != ZEROS:
        return Verdict("wrong", what)
    if regions.left and not plain.left:  # (else a cycle of the program's own, on torch's tape)
        return Verdict("leaked", f"{regions.left} tensors")
    return Verdict("equal", what)


def _head(error):
    """The beginning of a message, without names and numbers that differ by program."""
    text = f"{type(error).__name__}: {error}"
    return re.sub(r"0x[0-9a-f]+|\b[a-z]?\d+\b", "#", " ".join(text.split()))[:140]


def floats(tree):
    """The tensors in it that may have a gradient."""
    leaves = pytree.tree_leaves(tree)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def total(tree):
    """A number that every entry of every tensor contributes to, and not linearly."""
    return sum((torch.sin(t) * numbers(t.shape, 3)).sum() for t in floats(tree))


def layers(fx):
    """Transforms of a function of a matrix and a vector into another one."""

    def gradient(f, argnums, form):
        if form == "has_aux":
            return fx.grad(lambda x, y: (total(out := f(x, y)), out), argnums, has_aux=True)
        return getattr(fx, form)(lambda x, y: total(f(x, y)), argnums)

    def pulled(f, times, x, y):
        out, pull = fx.vjp(f, x, y)
        cotangents = pytree.tree_map(lambda t: numbers(t.shape), out)
        return out, [pull(cotangents) for _ in range(times)]

    def mapped(f, in_dims, options, *given):
        batches = [
            t if dim is None else torch.stack([t, 0.5 * t + 0.1], dim)
            for t, dim in zip(given, in_dims)
        ]
        return fx.vmap(f, in_dims=in_dims, **options)(*batches)

    pushed = lambda f, x, y: fx.jvp(f, (x, y), (numbers(x.shape, 20), numbers(y.shape, 40)))
    return {
        "gradient": gradient,
        "pullback": lambda f, times: partial(pulled, f, times),
        "pushforward": lambda f: partial(pushed, f),
        "jacobian": lambda f, mode, *args, **options: getattr(fx, mode)(f, *args, **options),
        "hessian": lambda f, argnums: fx.hessian(lambda x, y: total(f(x, y)), argnums),
        "per_example": lambda f, in_dims, **options: partial(mapped, f, in_dims, options),
    }


def finish(end, f, globals_, scale):
    """Call ``f``, and differentiate its result in plain autograd as ``end`` says.

    Returned is what regions must not change. Numbers are drawn in between.
    """
    x = (numbers((3, 3), 200) / 2 * scale).requires_grad_(end != "values")
    y = (numbers((3,), 220) / 2 * scale).requires_grad_(end != "values")
    net, generator = globals_["self"], globals_["generator"]
    leaves = {"x": x, "y": y, **dict(net.named_parameters())}
    out = f(x, y)
    found = {"values": pytree.tree_map(_entries, out)}
    torch.rand(2)
    torch.rand(2, generator=generator)
    loss = total(floats(out)[:1] if end == "first only" else out)
    of = [x] if end == "of the input only" else list(leaves.values())
    found["gradients"] = (None,) * len(of)
    if end == "values" or not getattr(loss, "requires_grad", False):
        pass
    elif end in ("backward", "first only", "twice"):
        for _ in range(2 if end == "twice" else 1):
            loss.backward(retain_graph=end == "twice")
    else:
        options = {"create_graph": True} if end == "double" else {}
        if end == "batched":
            options = {"grad_outputs": torch.arange(1.0, 4.0), "is_grads_batched": True}
        gradients = torch.autograd.grad(loss, of, allow_unused=True, **options)
        found["gradients"] = pytree.tree_map(_entries, gradients)
        if end == "double" and getattr(total(gradients), "requires_grad", False):
            total(gradients).backward()
    torch.rand(2)  # (in any case: a constant that went through a region says that it requires grad)
    found |= {"gradient of " + name: _entries(t.grad) for name, t in leaves.items()}
    found |= {"buffer " + name: _entries(t) for name, t in net.named_buffers()}
    found["default generator"] = _entries(torch.get_rng_state())
    found["generator"] = _entries(generator.get_state())
    return found


def _entries(t):
    return t.detach().clone().numpy(force=True).copy() if isinstance(t, torch.Tensor) else t
