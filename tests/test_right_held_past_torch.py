"""What hooks and custom Functions hold of NumPy's memory: that of the forward, or an error.

A replay makes it anew, unseen. Where it is not what it was, the pullback would read another one.
"""

import functools

import numpy as np
import pytest
import torch

import functx

DTYPE = torch.float64
X = torch.linspace(0.1, 1, 3, dtype=DTYPE)


def from_numpy(k, convert=torch.from_numpy):
    return convert(np.full(3, float(k)))


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, make):
        m = make()
        ctx.save_for_backward(m)
        return x * m

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class SavesUnread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, make):
        ctx.save_for_backward(make())
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class KeepsAList(torch.autograd.Function):
    @staticmethod
    def forward(x, make):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.masks = [inputs[1]()]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.masks[0], None


class KeepsAnArray(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, make):
        ctx.mask = make(np.asarray)
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * torch.from_numpy(ctx.mask), None


class Scale:
    def __init__(self, m):
        self.m = m

    def __call__(self, g):
        return g * self.m

    def method(self, g):
        return g * self.m


def hooked(hook_of, convert=torch.from_numpy):
    def f(x, make):
        y = x * 1
        y.register_hook(hook_of(make(convert)))
        return y

    return f


BODIES = {
    "saved": Saves.apply,
    "saved, unread": SavesUnread.apply,
    "in a list": KeepsAList.apply,
    "an array": KeepsAnArray.apply,
    "hook": hooked(lambda m: lambda g: g * m),
    "hook, array": hooked(lambda a: lambda g: g * torch.from_numpy(a), np.asarray),
    "hook, default": hooked(lambda m: lambda g, m=m: g * m),
    "hook, partial": hooked(lambda m: functools.partial(torch.mul, m)),
    "hook, object": hooked(Scale),
    "hook, method": hooked(lambda m: Scale(m).method),
}


def gradient(f, x=X):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).sin().sum(), x)[0]


@pytest.mark.parametrize("check", ["default", "values"])
@pytest.mark.parametrize("name", BODIES)
def test_another_one_in_the_replay_raises(name, check):
    """A counter that nothing restores: not found were this a gradient by another factor."""
    runs = []

    def f(x):
        return BODIES[name](x.sin(), lambda *a: from_numpy(len(runs) + 1, *a))

    def counted(x):
        runs.append(1)
        return f(x)

    y = functx.remat(counted, determinism_check=check)(x := X.clone().requires_grad_())
    with pytest.raises(functx.ReplayError, match=r"holds other values|keeps other numbers"):
        torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("name", BODIES)
def test_the_same_in_the_replay_is_right(name):
    def f(x):
        return BODIES[name](x.sin(), lambda *a: from_numpy(2, *a))

    for _ in range(8):
        assert torch.equal(gradient(functx.remat(f)), gradient(f))


@pytest.mark.parametrize("name", BODIES)
def test_drawn_from_a_generator_is_right(name):
    def program(remat):
        generator = np.random.default_rng(0)

        def f(x):
            return BODIES[name](
                x.sin(), lambda convert=torch.from_numpy: convert(generator.random(3))
            )

        return [gradient(remat(f)) for _ in range(3)] + [from_numpy(generator.random())]

    for ours, plain in zip(program(functx.remat), program(lambda f: f), strict=True):
        assert torch.equal(ours, plain)


def test_what_the_program_changes_itself_is_read_as_it_is_then():
    """A hook reads it when it runs, with and without: no error, where the hook's is the same."""
    mask = np.full(3, 1.0)
    m = torch.from_numpy(mask)

    def f(x):
        y = x.sin()
        y.register_hook(lambda g: g * m)
        return y

    def program(remat):
        mask[:] = 1
        x = X.clone().requires_grad_()
        y = remat(f)(x).sum()
        mask[:] = 3
        return torch.autograd.grad(y, x)[0]

    assert torch.equal(program(functx.remat), program(lambda f: f))


def test_what_a_function_was_given_is_not_hashed_again(monkeypatch):
    """It is compared as an input, and may be large."""
    from functx._remat import _past_torch

    seen = []
    held = _past_torch.held
    monkeypatch.setattr(_past_torch, "held", lambda x: seen.append(x) or held(x))

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, m):
            ctx.save_for_backward(m)
            return x * m

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0], None

    m = from_numpy(3)
    f = functx.remat(lambda x: Product.apply(x.sin(), m))
    assert torch.equal(gradient(f), gradient(lambda x: x.sin() * m))
    assert not any(isinstance(x, torch.Tensor) for x in seen)


def test_under_transforms():
    """As at the base level: with another one an error, with the same one the same."""
    runs = []

    def f(x):
        runs.append(1)
        return KeepsAList.apply(x.sin(), lambda *a: from_numpy(len(runs), *a)).sum()

    with pytest.raises(functx.ReplayError, match="keeps other numbers"):
        functx.grad(functx.remat(f))(X)

    def same(x):
        return KeepsAList.apply(x.sin(), lambda *a: from_numpy(2, *a)).sum()

    assert torch.equal(functx.grad(functx.remat(same))(X), functx.grad(same)(X))
