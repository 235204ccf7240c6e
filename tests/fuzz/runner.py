"""Run a random program with and without remat, and say what differs."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import DTYPE, numbers
from references import total
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from unwritten import unwritten_memory_shows

import functx
from functx import _torch
from functx._remat import _holders, _known_runs, _letting_go
from functx._remat._capture import FirstRun

from .codes import counted_codes
from .env import Env
from .held import Held, Reads
from .program import Program

LIBRARIES = {"functx": functx, "torch.func": torch.func}
FORWARD = {"vmap", "jvp", "jacfwd"}
BACKWARD_INSIDE = {"inner grad", "autograd.grad inside"}
PYTHON_ON_TAPES = {"hook", "custom function", "custom function of the old style"}
ROUNDINGS = 8
COMPLEX = torch.complex128
EVERYTHING = functx.checkpoint_policies.everything_saveable


class Difference(AssertionError):
    """With remat a program does something else than without."""


class Refused(Exception):
    """functx says that it can't, where its documentation says so."""


# What a program has in it, and what functx may say of it instead of running it.
REFUSALS = (
    ("escape", "otherwise than by return"),
    ("write to an argument", "writes in place"),
    ("batch norm of given buffers", "writes in place"),
    ("write to an argument", "from which it computes another one"),  # with a hook on that
)


class Watch(TorchDispatchMode):
    """Counts an operation, and sums up the absolute values of all that any operation makes.

    Forward mode makes zeros without memory, on which torch crashes in the presence of a mode.
    """

    def __init__(self, measure: bool, only_observes: bool = False) -> None:
        super().__init__()
        self.measure, self.only_observes = measure, only_observes  # else nothing under it is known
        self.markers = self.operations = 0
        self.total = 1.0
        self.held: Held | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [_with_memory(a) for a in args]
        out = func(*args, **(kwargs or {}))
        self.markers += func is torch.ops.aten.sigmoid.default
        self.operations += 1
        if self.held is not None:
            self.held.ran(func, args, kwargs, out)
        if self.measure:
            for t in out if isinstance(out, (tuple, list)) else (out,):
                self.add(t)
        return out

    def add(self, t: Any) -> None:
        if isinstance(t, torch.Tensor) and t.dtype in (DTYPE, COMPLEX) and t.device.type == "cpu":
            size = 0.0 if t._is_zerotensor() else float(t.detach().abs().sum())
            if math.isfinite(size):
                self.total += size


def _with_memory(t: Any) -> Any:
    if isinstance(t, torch.Tensor):
        return torch.zeros(t.shape, dtype=t.dtype) if t._is_zerotensor() else t
    return [_with_memory(each) for each in t] if isinstance(t, (list, tuple)) else t


@dataclass
class Result:
    """What a program gave.

    Attributes:
        values: of the stack of transforms, and what was written to, afterwards.
        gradients: of the sum of all values, with respect to the input, leaves and parameters.
        state: of the default generator afterwards.
        markers: how often the operation ran that ends every region.
        operations: how many ran in all.
        reached: whether a gradient reached the result of a region, if a `Spy` was looking.
        scale: bound of the contributions to any number.
        known: how many regions were taken for runs before.
        without_replay: how many pullbacks were none.
        held: what is held when the forward has run, how often operations ran, and what may be held
            beyond that; ``None`` in programs where that can't be told.
    """

    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    state: torch.Tensor
    markers: int
    operations: int
    reached: bool
    scale: float
    known: int = 0
    without_replay: int = 0
    held: Any = None


def apply(program: Program, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` under a transform."""
    library = LIBRARIES[program.library]

    def like(tree: Any, start: float) -> Any:
        return pytree.tree_map(lambda t: numbers(*t.shape, start=start), tree)

    if name == "grad":
        return library.grad(lambda x: total(f(x)))
    if name == "vmap":
        return library.vmap(f, randomness=program.randomness)
    if name == "jvp":
        return lambda x: library.jvp(f, (x,), (like(x, 0.5),))
    if name == "jacfwd":
        return library.jacfwd(f, randomness=program.randomness)
    if name == "jacrev":
        return library.jacrev(f)

    def vjp(x: torch.Tensor) -> Any:
        output, pullback = library.vjp(f, x)
        return output, pullback(like(output, 0.7))

    return vjp


def compares_memory(program: Program) -> bool:
    """Whether it can be told what may be held: nothing that was computed in a backward pass.

    A policy that keeps something keeps what no tape would; one that keeps all, only what one does.
    """
    policies = set(re.findall(r"checkpoint_policies\.(\w+(?: [&|])?)", program.source))
    backward = not set(program.stack) <= FORWARD or program.features & BACKWARD_INSIDE
    return not backward and policies <= {"everything_saveable", "nothing_saveable"}


def check(program: Program, expected: Result) -> Result:
    """The program with remat.

    Raises:
        Difference: it does something else than ``expected``.
        Refused: functx refuses it, as documented.
    """
    try:
        with unwritten_memory_shows(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(_letting_go, "_WORTH", 0)  # programs are small
            ours = run(program, functx.remat)
            if program.before:
                again, quiet = run_again(program)
    except Exception as error:
        for feature, message in REFUSALS:
            known = feature in program.features and message in str(error)
            if known and isinstance(error, functx.RematError):
                raise Refused(message) from error
        raise Difference(f"raises {type(error).__name__}: {error}") from error
    compare(program, ours, expected)
    if program.before:
        ours.known, ours.without_replay = again.known, quiet[-1].without_replay
        ours.operations += again.operations
        try:
            for each in (again, *quiet):
                compare(program, each, expected)
        except Difference as difference:
            raise Difference(f"as known from a run before, {difference}") from difference
    if _holders._own.holds:
        raise Difference("counts what it holds no more")
    return ours


def run_again(program: Program) -> tuple[Result, list[Result]]:
    """The program with remat, whose regions have run before: alike, or not quite.

    Also without a mode that watches it, till known pullbacks are no replays.
    """
    known = 0
    recognized = FirstRun.recognized

    def counted(first: FirstRun, ordinary: bool) -> Any:
        nonlocal known
        found = recognized(first, ordinary)
        known += found is not None
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_known_runs, "ALIKE", 1)
        patch.setattr(_known_runs, "_PATIENCE", sys.maxsize)
        patch.setattr(_known_runs, "_sightings", {})
        code = compile(program.source, "<program>", "exec")
        with suppress(Exception):  # torch may refuse it
            run(program, functx.remat, code=code, before=program.before)
        patch.setattr(FirstRun, "recognized", counted)
        result = run(program, functx.remat, code=code, before="same")
        quiet = []
        for _ in range(3 if known else 0):
            quiet.append(run(program, functx.remat, code=code, before="same", watched=False))
            quiet[-1].markers = result.markers  # nobody has counted
    result.known = known
    return result, quiet or [result]


def reference(program: Program) -> Result:
    """The program without remat."""
    return run(program, Spy(bool(program.features & PYTHON_ON_TAPES)), measure=True)


def run(
    program: Program,
    remat: Callable[..., Any],
    *,
    measure: bool = False,
    code: Any = None,
    before: str = "",
    watched: bool = True,
) -> Result:
    """The program, and plain autograd through what comes out.

    Args:
        program: what to run.
        remat: what it calls.
        measure: whether to find a bound of the contributions.
        code: of the program, where regions are to be known by it.
        before: how it differs, as `Program` says; then what watches it only observes.
        watched: whether a mode watches it.
    """
    torch.manual_seed(1)
    frozen = 0 if before == "leaf" else None
    env = Env(program.randomness, remat, loops=remat is functx.remat, frozen=frozen)
    namespace = {"torch": torch, "functx": functx, "functools": functools}
    exec(code or compile(program.source, "<program>", "exec"), namespace)
    f = namespace["build"](remat, env)

    def only_floats(x: torch.Tensor) -> Any:
        return f(x)

    stacked: Callable[..., Any] = remat(only_floats) if 0 in program.places else only_floats
    for place, name in enumerate(program.stack, start=1):
        stacked = apply(program, name, stacked)
        if place in program.places:
            stacked = remat(stacked)
    batch = 3 if before == "batch" else 2
    x = numbers(*(batch,) * program.stack.count("vmap"), 3).requires_grad_(before != "input")
    torch.manual_seed(2)
    watch = Watch(measure, only_observes=bool(before))
    with watch if watched else nullcontext(), counted_codes() as codes:
        held = watch.held = Held() if compares_memory(program) and not before else None
        if isinstance(remat, Spy):
            remat.held = held
        with nullcontext() if held is None or not measure else Reads(held):
            results, value = _forward(stacked, x)
        if held is not None:
            alive, watch.held = held.alive(), None
        values, gradients = _differentiate(results, value, [x, *env.parameters], program.twice)
    values += env.state
    return Result(
        values,
        gradients,
        torch.get_rng_state(),
        watch.markers,
        watch.operations,
        getattr(remat, "reached", False),
        watch.total,
        held=None if held is None else (*alive, held.shared),
        without_replay=len(codes),
    )


def _forward(f: Any, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    values = [v for v in pytree.tree_leaves(f(x)) if isinstance(v, torch.Tensor)]
    value = total(values)
    return [v.detach() for v in values], value


def _differentiate(
    values: list[torch.Tensor], value: torch.Tensor, leaves: list[torch.Tensor], twice: bool
) -> Any:
    if not value.requires_grad:
        return values, []
    leaves, gradients = [t for t in leaves if t.requires_grad], []
    for last in (False, True)[not twice :]:
        gradients += torch.autograd.grad(
            value, leaves, allow_unused=True, materialize_grads=True, retain_graph=not last
        )
    return values, gradients


def plain(f: Any, **options: Any) -> Any:
    """In the place of remat."""
    return f


class Spy:
    """In the place of remat: notes whether a gradient reaches the result of a region.

    Then the operation that ended the region, whose derivative reads its result, has to run again;
    unless there is a policy, which may keep it.
    """

    def __init__(self, python: bool = False) -> None:
        self._python = python  # whether it may be on tapes, where all inputs count as read
        self.reached = False
        self.held: Held | None = None
        self._policies = 0
        self._regions = 0

    def __call__(self, f: Any, policy: Any = None, **options: Any) -> Any:
        if isinstance(f, nn.Module):
            return f

        def region(*args: Any, **kwargs: Any) -> Any:
            self._policies += policy is not None
            if self.held is not None:
                self._regions += 1
                self.held.begins(self._regions, policy == EVERYTHING)
                if self._python or _torch.forward_ad_level() >= 0:
                    self.held.given((args, kwargs))
            out = None
            try:
                out = f(*args, **kwargs)
            finally:
                self._policies -= policy is not None
                if self.held is not None:
                    self.held.ended(_several(out))
            first = out[0] if isinstance(out, tuple) else out
            node = first.grad_fn if isinstance(first, torch.Tensor) else None
            ended = node is not None and node.name() == "SigmoidBackward0"
            if ended and policy is None and not self._policies:
                first.register_hook(self._reach)
            return out

        return region

    def _reach(self, gradient: torch.Tensor) -> None:
        self.reached = True


def _several(out: Any) -> bool:
    tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return len(tensors) > 1 or (bool(tensors) and _torch.forward_ad_level() >= 0)


def compare(program: Program, ours: Result, expected: Result) -> None:
    """Raise `Difference` where they differ.

    Values that only forward passes made are equal bit by bit. Gradients may add up the same
    contributions in another order: they are within 8 roundings of the sum of absolute
    contributions, which the sum of all that any operation made bounds.
    """
    forward = set(program.stack) <= FORWARD and not program.features & BACKWARD_INSIDE
    pairs = [("value", forward, ours.values, expected.values)]
    pairs += [("gradient", False, ours.gradients, expected.gradients)]
    for what, bitwise, actual, wanted in pairs:
        if len(actual) != len(wanted):
            raise Difference(f"{len(actual)} {what}s instead of {len(wanted)}")
        for i, (a, b) in enumerate(zip(actual, wanted)):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise Difference(f"{what} {i} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}")
            if b.is_floating_point() and torch.equal(a.isnan(), unknown := b.isnan()):
                # Without remat these are no numbers either: a derivative where there is none.
                a, b = a.masked_fill(unknown, 0.0), b.masked_fill(unknown, 0.0)
            if torch.equal(a, b):
                continue
            if bitwise or not b.is_floating_point():
                raise Difference(f"{what} {i} has other bits")
            bound = ROUNDINGS * torch.finfo(b.dtype).eps * expected.scale
            error = (a - b).abs().max().item()
            if not error <= bound:
                raise Difference(f"{what} {i} is off by {error:.3g}, allowed is {bound:.3g}")
    if ours.held is not None and ours.held[1] == expected.held[1]:
        beyond = ours.held[0] - expected.held[0] - expected.held[2]
        if beyond:
            raise Difference(f"{len(beyond)} results are held that nothing but a region has made")
    if not torch.equal(ours.state, expected.state):
        raise Difference("the default generator is somewhere else")
    if expected.reached and ours.markers <= expected.markers:
        raise Difference(f"nothing was recomputed: regions ended {ours.markers} times in all")
