"""Threads: a backward in another than the forward, one inside a replay, several at once."""

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

from .refusals import same

X = numbers(4)
PATIENCE = 20  # seconds until a thread that waits for ever is given up; no result depends on it


def start(f):
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
        assert found, "the thread hangs"
        value, error = found[0]
        if error is not None:
            raise error
        return value

    return result


def elsewhere(f):
    return start(f)()


def noisy(x):
    return dropout(x.sin(), 0.5).exp()


class TestPulledBackElsewhere:
    def test_a_backward(self):
        def program(remat):
            torch.manual_seed(4)
            w, x = numbers(4, start=1.0).requires_grad_(), X.clone().requires_grad_()
            value = remat(lambda x: remat(noisy)(x) * w)(x).sum()
            gradients = elsewhere(lambda: torch.autograd.grad(value, (w, x)))
            return gradients, torch.rand(3)

        same(program)

    def test_pullbacks_of_a_vjp_and_a_second_order(self):
        def program(remat):
            torch.manual_seed(4)
            w = numbers(4, start=1.0).requires_grad_()
            _, pullback = functx.vjp(remat(lambda x: noisy(x) * w), X)
            first = [pullback(X), elsewhere(lambda: pullback(X)), pullback(X)]
            return first, elsewhere(lambda: torch.autograd.grad(first[1][0].sum(), w))

        same(program)

    def test_autocast_and_grad_mode_are_those_of_the_forward(self):
        """They belong to a thread, and a new one has none."""

        def program(remat):
            x, v, w = (numbers(4, 4, start=i).float().requires_grad_() for i in range(3))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = remat(lambda x: torch.tanh(x @ v) @ w)(x).float().sum()
            return elsewhere(lambda: torch.autograd.grad(value, (x, v, w)))

        same(program, eps=0)


BOTH_DRAW = """
import os, threading, torch, functx
from functx._remat import generators
generators._PATIENCE = 1.0
from torch.nn.functional import dropout

def in_a_thread(f):
    found = []
    thread = threading.Thread(target=lambda: found.append(f()), daemon=True)
    thread.start()
    thread.join(20)
    if not found:
        print("hangs", flush=True)
        os._exit(1)
    return found[0]

def noisy(x):
    return dropout(x.sin(), 0.5).exp()

def gradient(remat):
    torch.manual_seed(5)
    x = torch.linspace(0.1, 1, 4, dtype=torch.float64).requires_grad_()

    def region(x):
        h, y = noisy(x), x.detach().requires_grad_()
        g = in_a_thread(lambda: torch.autograd.grad(remat(noisy)(y).sum(), y))[0]
        return (h * g).exp()

    return torch.autograd.grad(remat(region)(x).sum(), x)[0]

try:
    right = torch.allclose(gradient(functx.remat), gradient(lambda f: f))
except functx.RematError:  # the draws of another thread may be refused
    right = True
print("right" if right else "wrong")
"""


class TestInsideAReplay:
    """What a node's backward needs is no thread-local, and no lock is held while user code runs."""

    # Slow: a process of its own.
    def test_both_may_draw(self):
        """In a process of its own: a lock that is waited for would be waited for ever after."""
        paths = os.pathsep.join(p for p in sys.path if p)
        done = subprocess.run(
            [sys.executable, "-P", "-c", BOTH_DRAW],
            env={**os.environ, "PYTHONPATH": paths},
            timeout=4 * PATIENCE,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == "right", done.stdout + done.stderr

    def test_a_forward_here_and_its_backward_in_another_thread(self):
        def program(remat):
            x = X.clone().requires_grad_()

            def region(x):
                y = x.detach().requires_grad_()
                value = remat(lambda y: remat(torch.sin)(y).exp())(y).sum()
                (g,) = elsewhere(lambda: torch.autograd.grad(value, y, create_graph=True))
                (g,) = elsewhere(lambda: torch.autograd.grad(g.sum(), y))
                return (x * g).sin()

            return elsewhere(lambda: torch.autograd.grad(remat(region)(x).sum(), x))

        same(program)


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


def module(i, remat):
    x = numbers(3, 4, start=float(i)).requires_grad_()
    return torch.autograd.grad(remat(NETS[0])(x).square().sum(), x)


def per_example(i, remat):
    f = remat(lambda x: remat(lambda x: (x * W).sin().exp())(x.cos()))
    return functx.vmap(functx.grad(lambda x: f(x).sum()))(numbers(3, 4, start=float(i)))


def with_a_generator(i, remat):
    generator = torch.Generator().manual_seed(i)
    x = numbers(4, start=float(i)).requires_grad_()

    def f(x):
        return x.sin() * torch.randn(4, generator=generator, dtype=x.dtype)

    return torch.autograd.grad((remat(f)(x) * remat(f)(x)).sum(), x)


@pytest.mark.parametrize("work", [module, per_example, with_a_generator])
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
