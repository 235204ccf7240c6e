"""A budgeted function is the function: settings, generators, modes, and plans that are for it."""

import contextlib

import pytest
import torch
from references import assert_same
from torch.utils._python_dispatch import TorchDispatchMode

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

WEIGHTS = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) / 4 for i in range(6)]
X = torch.randn(64, 16, generator=torch.Generator().manual_seed(100))


def layers(weights, x):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def cast_inside(weights, x):
    for w in weights:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        x = torch.tanh(y.float()) + y
    return x


def both(f, share, around=contextlib.nullcontext):
    """Gradients with a budget and without, from the same random state."""
    found = []
    for g in (functx.remat(f, budget=share), f):
        torch.manual_seed(0)
        with around():
            found.append(functx.grad(lambda w, g=g: g(w, X).float().square().sum())(WEIGHTS))
    return found


@pytest.mark.parametrize("f", [cast_inside])
def test_settings_inside_are_those_of_each_operation(f):
    assert_same(*both(f, 0.9))
    w = [w.clone().requires_grad_() for w in WEIGHTS]
    assert functx.remat(f, budget=0.9)(w, X).dtype == f(w, X).dtype


def test_settings_around_it_choose_the_plan():
    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    assert_same(*both(layers, 0.9, autocast))
    w = [w.clone().requires_grad_() for w in WEIGHTS]
    planned = functx.remat(layers, budget=1.0)
    assert planned(w, X).dtype == torch.float32
    with autocast():  # the plan for other settings is another one
        assert planned(w, X).dtype == torch.bfloat16
        assert_same(
            functx.jacrev(lambda s: planned(w, X * s).float().mean(0))(torch.ones(16)),
            functx.jacrev(lambda s: layers(w, X * s).float().mean(0))(torch.ones(16)),
            64,
        )


@contextlib.contextmanager
def seeded(generator):
    generator.manual_seed(0)
    yield


def test_generators_given_to_operations_are_used_as_they_are():
    generator = torch.Generator()

    def draws(weights, x):
        own = torch.Generator().manual_seed(1)
        for w in weights:
            x = torch.tanh(x @ w) * torch.rand(16, generator=generator)
            x = x * torch.rand(16, generator=own)
        return x

    assert_same(*both(draws, 0.9, lambda: seeded(generator)))


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.random.fork_rng])
def test_seeding_inside_is_refused(around):
    def f(weights, x):
        for w in weights:
            with around():
                torch.manual_seed(0)
                noise = torch.rand(16)
            x = torch.tanh(x @ w) * noise
        return x

    with pytest.raises(functx.RematError, match=r"seeds torch.s random generator"):
        both(f, 0.9)


def test_jacobians_by_what_another_tape_knows_are_right():
    """How many rows it has is found out inside of levels, where no leaf of a tape can be made."""
    x = X.clone().requires_grad_()
    planned = functx.remat(layers, budget=1.0)
    ours = functx.jacrev(lambda x: planned(WEIGHTS, x).mean(0))(x)
    assert_same(ours, functx.jacrev(lambda x: layers(WEIGHTS, x).mean(0))(x), 64)
    assert ours.requires_grad
    x = torch.ones(3)
    ours, plain = (
        functx.jacrev(functx.jacrev(lambda s, g=g: g(WEIGHTS, X * s.sum()).sum()))(x)
        for g in (planned, layers)
    )
    assert_same(ours, plain, 640)


def test_a_dispatch_mode_inside_is_refused():
    class Twice(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {})) * 2

    def f(weights, x):
        with Twice():
            return layers(weights, x)

    with pytest.raises(functx.RematError, match="enters a mode"):
        both(f, 0.9)
