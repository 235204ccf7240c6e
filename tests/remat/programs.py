"""Run a program with and without remat, and compare: how these tests are written.

A program takes ``remat`` and returns tensors. The reference is the same program with `identity`.
"""

import contextlib
import random

import numpy as np
import pytest
import torch
from cases import identity, numbers
from references import Operations, assert_same, count, no_garbage_collection
from torch.utils import _pytree as pytree

import functx
from functx._remat import on_run, script


def naive(f):
    """A remat that knows arguments only, and reads all else as it is by the backward."""

    class Naive(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return f(x)

        @staticmethod
        def backward(ctx, cotangent):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(f(x), x, cotangent)

    return Naive.apply


X, Y = numbers(3), numbers(3, start=1.0)


def kept_bytes(f, *args):
    """Bytes that live as long as what ``f(*args)`` returns, and those that outlive it."""
    with no_garbage_collection(), Operations() as operations:
        result = f(*args)
        held = operations.live
        del result
        return held, operations.live


def by_backward(loss, x, *rest):
    """The gradient by plain autograd; grad mode is off around the backward."""
    x = x.detach().requires_grad_()
    value = loss(x, *rest)
    with torch.no_grad():
        return torch.autograd.grad(value, x)[0]


def by_double_backward(loss, x, *rest):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x, *rest), x, create_graph=True)
    return gradient, torch.autograd.grad(gradient.square().sum(), x)


def by_vjp(loss, x):
    value, pullback = functx.vjp(loss, x)
    return pullback(torch.ones_like(value)), pullback(2 * torch.ones_like(value))


def batch(x):
    return torch.stack([x, x + 1])


def mapped(f):
    """``f`` over the examples of its first argument."""
    return lambda x, *rest: functx.vmap(f, (0, *[None for _ in rest]), randomness="different")(
        x, *rest
    )


def squared(f):
    return lambda *args: f(*args).square().sum()


# Ways to differentiate a loss by its first argument, which pull back when it has returned. All but
# ``vjp`` and ``jvp(grad)`` take further arguments, which a loss may write to.
STACKS = {
    "backward": by_backward,
    "double backward": by_double_backward,
    "grad": lambda loss, *args: functx.grad(loss)(*args),
    "vjp": by_vjp,
    "vmap(grad)": lambda loss, x, *rest: mapped(functx.grad(loss))(batch(x), *rest),
    "backward(vmap)": lambda loss, x, *rest: by_backward(
        lambda *args: mapped(loss)(*args).sum(), batch(x), *rest
    ),
    "grad(grad)": lambda loss, *args: functx.grad(squared(functx.grad(loss)))(*args),
    "jvp(grad)": lambda loss, x: functx.jvp(functx.grad(loss), (x,), (x.sin(),)),
}


QUICK = ("backward", "grad(grad)", "vmap(grad)", "vjp")
every_stack = pytest.mark.parametrize(
    "stack", [pytest.param(s, marks=() if s in QUICK else pytest.mark.sweep) for s in STACKS]
)


def same(actual, expected, exact=False):
    """Two pytrees are equal: to 12 digits, or bit by bit where that is asked for."""
    assert_same(actual, expected, 0.0 if exact else 4096.0)


def seeded(program, remat):
    """What ``program(remat)`` returns, and where it leaves torch's generator."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    return program(remat), torch.get_rng_state()


COMPUTED = ("sin", "exp", "tanh", "mm", "addmm", "mul", "bernoulli_")


def check(program, exact=False, replays=True, nonzero=True):
    """``program`` gives the same with remat, from the same seed; bit by bit, if ``exact``.

    One of `COMPUTED` runs more often, if it ``replays``; and zeros are no result, if ``nonzero``.
    """
    expected = seeded(program, identity)
    if nonzero:
        assert all(torch.as_tensor(t).abs().max() > 0 for t in pytree.tree_leaves(expected))
    same(seeded(program, functx.remat), expected, exact)
    if replays:
        ours, plain = (count(seeded, program, remat) for remat in (functx.remat, identity))
        assert any(ours[name] > plain[name] for name in COMPUTED), "nothing was recomputed"


def right_or_raises(program, match=""):
    """As `check`, or a ``ReplayError`` that says ``match``: the contract leaves both open."""
    try:
        found = seeded(program, functx.remat)
    except functx.ReplayError as error:
        message = str(error)
    else:
        same(found, seeded(program, identity))
        return
    assert match in message


NOT_OWN = ("recorded: a pullback", "recorded: in another region")


@contextlib.contextmanager
def how_regions_run():
    """A list, to which it is added how each forward of a region in here has run."""
    found = []
    with on_run(lambda name, how: found.append(how)):
        yield found


class Speed:
    """Whether a region is to be recorded, or to follow a script; a context where it does.

    The code in the context runs regions at the base level or in transforms, the first of which is
    the one that counts.
    """

    def __init__(self, name):
        self.name = name
        script._of_code.clear()  # of other tests

    def __repr__(self):
        return self.name

    def prepare(self, run):
        """Let earlier runs leave a script, where one is to be followed."""
        for _ in range(2 if self.name == "followed" else 0):
            run()

    def __enter__(self):
        self._context = how_regions_run()
        self._found = self._context.__enter__()

    def __exit__(self, *raised):
        self._context.__exit__(*raised)
        if raised[0] is None:
            first = next(how for how in self._found if how not in NOT_OWN)
            assert first.startswith(self.name), self._found
