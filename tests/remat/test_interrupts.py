"""After an interrupt or an exception torch is as it was, wherever it struck.

``sys.setprofile`` raises ``KeyboardInterrupt`` at each call of a Python function of the engine,
or of this file, in turn, over a forward and a backward.
"""

import os
import subprocess
import sys
import threading

import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn
from torch.nn.functional import dropout

import functx

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FILES = {os.path.dirname(f.__code__.co_filename) for f in (functx.remat, functx.grad)}
PATIENCE = 30  # seconds until a run that waits for ever is given up; no result depends on it
POINTS = 30  # of a program; all in sweeps
X = numbers(4)


def state():
    """What an interrupt might leave behind."""
    return {
        "levels": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "dual level": torch.autograd.forward_ad._current_level,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "single level functions": torch._C._functorch.get_single_level_autograd_function_allowed(),
        "in-place requires_grad": torch._C._functorch.get_inplace_requires_grad_allowed(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


BUFFER = torch.zeros(4, dtype=X.dtype)


def inner(x):
    return dropout(x.sin(), 0.5).exp()


def region(x):
    with torch.no_grad():
        scale = x.exp() + BUFFER
    return functx.remat(inner)(x * 2) * scale


def loss(x):
    return functx.remat(region)(x).sum()


def base():
    x = X.clone().requires_grad_()
    loss(x).backward()
    return x.grad


def base_in_autocast():
    x = numbers(4, 4).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = functx.remat(lambda x: (x @ x).tanh() @ x)(x).float().sum()
    value.backward()
    return x.grad


def per_example():
    return functx.vmap(functx.grad(loss), randomness="different")(numbers(3, 4))


PROGRAMS = {f.__name__: f for f in (base, base_in_autocast, per_example)}


class Interrupt:
    """A profile function that raises at one call of our code, and counts them."""

    def __init__(self, at):
        self.at, self.calls, self.where = at, 0, None

    def __call__(self, frame, event, arg):
        code = frame.f_code
        ours = code.co_filename == __file__ or any(map(code.co_filename.startswith, FILES))
        if event != "call" or not ours:
            return
        self.calls += 1
        if self.calls == self.at:
            self.where = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
            sys.setprofile(None)
            raise KeyboardInterrupt


def interrupted(program, at):
    interrupt = Interrupt(at)
    sys.setprofile(interrupt)
    try:
        program()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return interrupt


def seeded(program):
    torch.manual_seed(3)
    return program()


def in_a_thread(f):
    found = []
    thread = threading.Thread(target=lambda: found.append(f()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found


def check(name, points):
    program = PROGRAMS[name]
    for _ in range(3):  # what first calls set up
        expected = seeded(program)
    calls = interrupted(program, -1).calls
    assert calls > 10
    before, stride = state(), max(1, calls // points)
    for number, at in enumerate(range(1, calls + 1, stride)):
        torch.manual_seed(3)
        where = interrupted(program, at).where
        after = state()
        assert after == before, f"interrupted at {where} ({at} of {calls})"
        assert nn.Linear(2, 2)(torch.ones(2)).shape == (2,)
        # in turn: this thread has its own stacks and thread-locals, another one waits for locks
        again = [seeded(program)] if number % 2 else in_a_thread(lambda: seeded(program))
        assert again, f"the next run hangs, interrupted at {where}"
        assert_same(again[0], expected, eps=8)


def check_alone(name, points, patience):
    """`check` in a process of its own: what an interrupt breaks there breaks no other test."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"from {__name__} import check; check({name!r}, {points})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=patience,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# Slow: each point is a run of the program, in a process of its own.
@pytest.mark.parametrize("name", ["base", "per_example"])
def test_an_interrupt_leaves_torch_as_it_was(name):
    check_alone(name, POINTS, 20 * PATIENCE)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_anywhere_leaves_torch_as_it_was(name):
    check_alone(name, 10**6, 60 * PATIENCE)


class Faulty:
    """Raises at a given run of its body, with modes of its own entered."""

    def __init__(self, error, at):
        self.error, self.at, self.runs = error, at, 0

    def __call__(self, x):
        self.runs += 1
        y = dropout(x.sin(), 0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            scale = x.exp()
            if self.runs == self.at:
                raise self.error("on purpose")
        return y * scale


def hessian(f):
    return functx.jacrev(functx.grad(lambda x: f(x).sin().sum()))(X)


def double_backward(f):
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)


STACKS = {
    "double backward": double_backward,
    "nested": lambda f: double_backward(functx.remat(lambda x: f(x.cos()))),
    "vmap(grad)": lambda f: functx.vmap(functx.grad(lambda x: f(x).sum()), randomness="different")(
        numbers(3, 4)
    ),
    "hessian": hessian,
}


ERRORS = [ValueError, torch.OutOfMemoryError, KeyboardInterrupt]


@pytest.mark.parametrize(("stack", "error"), [(s, ERRORS[i % 3]) for i, s in enumerate(STACKS)])
def test_an_exception_of_the_function_leaves_torch_as_it_was(stack, error):
    """Whichever run raises: the forward, a replay, a replay of a replay. It comes out as it is."""
    sound = Faulty(None, 0)
    expected = seeded(lambda: STACKS[stack](functx.remat(sound)))
    assert sound.runs >= 1
    for at in range(1, sound.runs + 1):
        before, raised = state(), error("on purpose")
        with pytest.raises(error, match="on purpose") as caught:
            seeded(lambda at=at, e=raised: STACKS[stack](functx.remat(Faulty(lambda _: e, at))))
        assert caught.value is raised
        assert state() == before
        assert_same(seeded(lambda: STACKS[stack](functx.remat(Faulty(None, 0)))), expected)


def test_a_failed_replay_has_drawn_nothing_and_can_be_tried_again():
    x, f = X.clone().requires_grad_(), Faulty(ValueError, 2)
    value = functx.remat(f)(x).sum()
    torch.rand(3)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="on purpose"):
        value.backward(retain_graph=True)
    assert_same(torch.get_rng_state(), before)
    value.backward()
    assert x.grad.abs().sum() > 0
