"""A budgeted function is the function: settings, generators, modes, and plans that are for it."""

import contextlib
import random

import pytest
import torch
from references import assert_same
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
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


def kernel_inside(weights, x):
    for w in weights:
        q = (x @ w).reshape(1, 8, 8, 16)
        with sdpa_kernel(SDPBackend.MATH):
            x = F.scaled_dot_product_attention(q, q, q).reshape(64, 16)
    return x


def dtype_inside(weights, x):
    for w in weights:
        torch.set_default_dtype(torch.float64)
        half = torch.full((16,), 0.5)
        torch.set_default_dtype(torch.float32)
        x = torch.tanh(x @ w) * half.float()
    return x


def both(f, share, around=contextlib.nullcontext):
    """Gradients with a budget and without, from the same random state."""
    found = []
    for g in (functx.remat(f, budget=share), f):
        torch.manual_seed(0)
        with around():
            found.append(functx.grad(lambda w, g=g: g(w, X).float().square().sum())(WEIGHTS))
    return found


@pytest.mark.parametrize("f", [cast_inside, kernel_inside, dtype_inside])
def test_settings_inside_are_those_of_each_operation(f):
    assert_same(*both(f, 0.9))
    w = [w.clone().requires_grad_() for w in WEIGHTS]
    assert functx.remat(f, budget=0.9)(w, X).dtype == f(w, X).dtype


def test_settings_around_it():
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


class Twice(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.tanh.default else out


class AlsoTwice(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


def test_modes_inside():
    def under(mode):
        def f(weights, x):
            with mode():
                return layers(weights, x)

        return f

    assert_same(*both(under(AlsoTwice), 0.9))
    with pytest.raises(functx.RematError, match="enters a mode"):
        both(under(Twice), 0.9)


class TestRandomNumbers:
    def test_generators_given_to_operations(self):
        generator = torch.Generator()

        def draws(weights, x):
            own = torch.Generator().manual_seed(1)
            for w in weights:
                x = torch.tanh(x @ w) * torch.rand(16, generator=generator)
                x = x * torch.rand(16, generator=own)
            return x

        assert_same(*both(draws, 0.9, lambda: contextlib.closing(Seeded(generator))))

    @pytest.mark.parametrize("seed", ["torch's", "torch's, for a while"])
    def test_seeding_inside_is_refused(self, seed):
        generator = torch.Generator()

        def f(weights, x):
            for w in weights:
                if seed == "its own":
                    noise = torch.rand(16, generator=generator.manual_seed(0))
                    noise = noise + torch.rand(16, generator=generator.manual_seed(1))
                elif seed == "torch's":
                    torch.manual_seed(0)
                    noise = torch.rand(16)
                else:
                    with torch.random.fork_rng():
                        torch.manual_seed(0)
                        noise = torch.rand(16)
                x = torch.tanh(x @ w) * noise
            return x

        with pytest.raises(functx.RematError, match=r"seeds torch.s random generator"):
            both(f, 0.9)

    def test_what_python_does_is_done_once_a_call(self):
        calls = []

        def f(x):
            calls.append(random.random())
            return torch.sin(x) * calls[-1]

        for given in (X, X.clone().requires_grad_()):
            random.seed(0)
            expected = torch.sin(X) * random.random()
            random.seed(0)
            calls.clear()
            assert_same(functx.jvp(functx.remat(f, budget=1.0), (given,), (X,))[0], expected)
            assert len(calls) == 1


class Seeded:
    """Seeds a generator when it is made; nothing to do in the end."""

    def __init__(self, generator):
        generator.manual_seed(0)

    def close(self):
        """As `contextlib.closing` wants."""


def test_without_grad_mode_there_is_nothing_to_plan_for():
    w = [w.clone().requires_grad_() for w in WEIGHTS]
    with torch.no_grad():
        assert_same(functx.remat(layers, budget=1)(w, X), layers(w, X))
        functx.vmap(functx.remat(layers, budget=1), (None, 0))(w, X)


def test_a_jacobian_by_what_another_tape_knows():
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
