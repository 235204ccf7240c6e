"""After an interrupt or an exception torch is as it was; threads, elsewhere and several at once."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest
import torch
from cases import judged_by, numbers
from references import assert_same
from torch import nn
from torch.nn.functional import dropout

import functx
from functx._remat import generators

from .programs import STACKS
from .refusals import same

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FILES = {os.path.dirname(f.__code__.co_filename) for f in (functx.remat, functx.grad)}
PATIENCE = 30  # seconds until a run that waits for ever is given up; no result depends on it
POINTS = 16  # of a program; all in sweeps
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


def region(x):
    with torch.no_grad():
        scale = x.exp() + BUFFER
    return functx.remat(lambda x: dropout(x.sin(), 0.5).exp())(x * 2) * scale


def loss(x):
    return functx.remat(region)(x).sum()


def base():
    x = X.clone().requires_grad_()
    loss(x).backward()
    return x.grad


def per_example():
    return functx.vmap(functx.grad(loss), randomness="different")(numbers(3, 4))


PROGRAMS = {f.__name__: f for f in (base, per_example)}


# What is called where a context ends, ours or torch's.
ENDS = {"__exit__", "_pop_mode", "_vmap_decrement_nesting"}


class Interrupt:
    """A profile function that raises at one call of our code, or where contexts end; it counts."""

    def __init__(self, at, at_ends):
        self.at, self.at_ends, self.calls, self.where = at, at_ends, 0, None

    def __call__(self, frame, event, arg):
        code = frame.f_code
        ours = code.co_filename == __file__ or any(map(code.co_filename.startswith, FILES))
        counted = code.co_name in ENDS if self.at_ends else ours
        if event != "call" or not counted:
            return
        self.calls += 1
        if self.calls == self.at:
            self.where = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
            sys.setprofile(None)
            raise KeyboardInterrupt


def interrupted(program, at, at_ends=False):
    interrupt = Interrupt(at, at_ends)
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


def start(f, what="the thread"):
    """``f()`` in a thread of its own, and a function that waits for what it returns or raises."""
    found = []

    def run():
        try:
            found.append((f(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE)
        assert found, f"{what} hangs"
        value, error = found[0]
        if error is not None:
            raise error
        return value

    return result


def check(name, points, at_ends=False):
    program = PROGRAMS[name]
    for _ in range(3):  # what first calls set up
        expected = seeded(program)
    calls = interrupted(program, -1, at_ends).calls
    assert calls > 10
    before, stride = state(), max(1, calls // points)
    for number, at in enumerate(range(1, calls + 1, stride)):
        torch.manual_seed(3)
        where = interrupted(program, at, at_ends).where
        after = state()
        assert after == before, f"interrupted at {where} ({at} of {calls})"
        assert nn.Linear(2, 2)(torch.ones(2)).shape == (2,)
        # in turn: this thread has its own stacks and thread-locals, another one waits for locks
        run = lambda: seeded(program)
        again = run() if number % 2 else start(run, f"the next run, interrupted at {where},")()
        assert_same(again, expected, eps=8)


# Slow: each point is two runs of a program; all in a process of their own.
@pytest.mark.parametrize("points", [POINTS, pytest.param(10**6, marks=pytest.mark.sweep)])
def test_an_interrupt_leaves_torch_as_it_was(points):
    """What an interrupt breaks in that process breaks no other test.

    In functx's code, and, at more points, where contexts end.
    """
    code = f"""
from {__name__} import PROGRAMS, check
for name in PROGRAMS:
    check(name, {points})
    check(name, {6 * points}, at_ends=True)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=100 * PATIENCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


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


def differentiated(stack):
    def run(f):
        if stack == "hessian":
            return functx.jacrev(functx.grad(lambda x: f(x).sin().sum()))(X)
        if stack == "nested":
            region = functx.remat(lambda x: f(x.cos()))
            return STACKS["double backward"](lambda x: region(x).sin().sum(), X)
        return STACKS[stack](lambda x: f(x).sin().sum(), X)

    return run


ORDERS = ("double backward", "nested", "vmap(grad)", "hessian")
ERRORS = [ValueError, torch.OutOfMemoryError, KeyboardInterrupt]


@pytest.mark.parametrize(("stack", "error"), [(s, ERRORS[i % 3]) for i, s in enumerate(ORDERS)])
def test_an_exception_of_the_function_leaves_torch_as_it_was(stack, error):
    """Whichever run raises: the forward, a replay, a replay of a replay. It comes out as it is."""
    sound, run = Faulty(None, 0), differentiated(stack)
    expected = seeded(lambda: run(functx.remat(sound)))
    assert sound.runs >= 1
    for at in range(1, sound.runs + 1):
        before, raised = state(), error("on purpose")
        with pytest.raises(error, match="on purpose") as caught:
            seeded(lambda at=at, e=raised: run(functx.remat(Faulty(lambda _: e, at))))
        assert caught.value is raised
        assert state() == before
        assert_same(seeded(lambda: run(functx.remat(Faulty(None, 0)))), expected)


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


elsewhere = lambda f: start(f)()
noisy = lambda x: dropout(x.sin(), 0.5).exp()


class TestPulledBackElsewhere:
    @judged_by(same)
    def test_a_backward(self, remat):
        torch.manual_seed(4)
        w, x = numbers(4, start=1.0).requires_grad_(), X.clone().requires_grad_()
        value = remat(lambda x: remat(noisy)(x) * w)(x).sum()
        gradients = elsewhere(lambda: torch.autograd.grad(value, (w, x)))
        return gradients, torch.rand(3)

    @judged_by(same)
    def test_pullbacks_of_a_vjp_and_a_second_order(self, remat):
        torch.manual_seed(4)
        w = numbers(4, start=1.0).requires_grad_()
        _, pullback = functx.vjp(remat(lambda x: noisy(x) * w), X)
        first = [pullback(X), elsewhere(lambda: pullback(X)), pullback(X)]
        return first, elsewhere(lambda: torch.autograd.grad(first[1][0].sum(), w))

    @judged_by(same, eps=0)
    def test_autocast_and_grad_mode_are_those_of_the_forward(self, remat):
        """They belong to a thread, and a new one has none."""

        x, v, w = (numbers(4, 4, start=i).float().requires_grad_() for i in range(3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = remat(lambda x: torch.tanh(x @ v) @ w)(x).float().sum()
        return elsewhere(lambda: torch.autograd.grad(value, (x, v, w)))


class TestInsideAReplay:
    """What a node's backward needs is no thread-local, and no lock is held while user code runs."""

    def test_both_may_draw(self, monkeypatch):
        """Or the draws of the other thread are refused; neither waits for ever."""
        monkeypatch.setattr(generators, "_PATIENCE", 1.0)

        def program(remat):
            torch.manual_seed(5)
            x = numbers(16).requires_grad_()

            def region(x):
                h, y = noisy(x), x.detach().requires_grad_()
                (g,) = elsewhere(lambda: torch.autograd.grad(remat(noisy)(y).sum(), y))
                return (h * g).exp()

            return elsewhere(lambda: torch.autograd.grad(remat(region)(x).sum(), x))

        with contextlib.suppress(functx.RematError):
            same(program)

    @judged_by(same)
    def test_a_forward_here_and_its_backward_in_another_thread(self, remat):
        x = X.clone().requires_grad_()

        def region(x):
            y = x.detach().requires_grad_()
            value = remat(lambda y: remat(torch.sin)(y).exp())(y).sum()
            (g,) = elsewhere(lambda: torch.autograd.grad(value, y, create_graph=True))
            (g,) = elsewhere(lambda: torch.autograd.grad(g.sum(), y))
            return (x * g).sin()

        return elsewhere(lambda: torch.autograd.grad(remat(region)(x).sum(), x))


THREADS, STEPS = 4, 4


def together(work):
    """``work(i)`` in several threads that start together."""
    barrier = threading.Barrier(THREADS)

    def run(i):
        barrier.wait(PATIENCE)
        return [work(i) for _ in range(STEPS)]

    return [result() for result in [start(lambda i=i: run(i)) for i in range(THREADS)]]


W = numbers(4, start=1.0)
NETS = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double() for _ in range(THREADS)]


def of_module(i, remat):
    x = numbers(3, 4, start=float(i)).requires_grad_()
    return torch.autograd.grad(remat(NETS[0])(x).square().sum(), x)


def each_example(i, remat):
    f = remat(lambda x: remat(lambda x: (x * W).sin().exp())(x.cos()))
    return functx.vmap(functx.grad(lambda x: f(x).sum()))(numbers(3, 4, start=float(i)))


def with_a_generator(i, remat):
    generator = torch.Generator().manual_seed(i)
    x = numbers(4, start=float(i)).requires_grad_()
    f = lambda x: x.sin() * torch.randn(4, generator=generator, dtype=x.dtype)
    return torch.autograd.grad((remat(f)(x) * remat(f)(x)).sum(), x)


@pytest.mark.parametrize("work", [of_module, each_example, with_a_generator])
def test_several_at_once(work):
    for i, found in enumerate(together(lambda i: work(i, functx.remat))):
        expected = work(i, lambda f: f)
        for result in found:
            assert_same(result, expected, eps=8)


def test_replays_with_dropout_at_once_do_not_mix():
    """Forwards one after another, then all backwards together, from the default generator."""
    made = {}
    for remat in (functx.remat, None):
        torch.manual_seed(4)
        made[remat] = []
        for i in range(THREADS):
            x = numbers(64, start=float(i)).requires_grad_()
            made[remat].append((x, (remat or (lambda f: f))(noisy)(x).sum()))
    before = torch.get_rng_state()

    def work(i):
        x, value = made[functx.remat][i]
        return torch.autograd.grad(value, x, retain_graph=True)

    for (x, value), found in zip(made[None], together(work), strict=True):
        expected = torch.autograd.grad(value, x)
        for gradient in found:
            assert_same(gradient, expected, eps=8)
    assert_same(torch.get_rng_state(), before)
