"""Memory that a body made, and comes by once more past torch: by an array of NumPy's, by DLPack."""

import pytest
import torch
from cases import numbers
from references import assert_same
from torch.utils import dlpack

import functx
from functx._remat._known_runs import ALIKE

X = numbers(4)

AGAIN = {
    "numpy": lambda h: torch.from_numpy(h.detach().numpy()),
    "a part": lambda h: torch.from_numpy(h.detach().numpy()[1:]),
    "a buffer": lambda h: torch.frombuffer(h.detach().numpy(), dtype=h.dtype),
    "__dlpack__": lambda h: torch.from_dlpack(h.detach()),
    "a capsule": lambda h: dlpack.from_dlpack(dlpack.to_dlpack(h.detach())),
}


def written(h, t, x):
    t.mul_(2)
    return x * h


def written_and_read(h, t, x):
    t.mul_(2)
    return x * h * t.sum()


def filled(h, t, x):
    t.copy_(x.detach()[: len(t)])
    return x.sin() * h


def the_other_is_written(h, t, x):
    y = x * t.sum()
    h.detach().mul_(3)
    return y * h


def read(h, t, x):
    return x * h * t.sum()


MADE = {
    "made": lambda x, c: x.detach() * 2,
    "a constant": lambda x, c: c,
    "an input": lambda x, c: x,
}


ACTS = [(act, of) for act in (written, written_and_read, filled, read) for of in MADE]


@pytest.mark.parametrize(("act", "of"), [*ACTS, (the_other_is_written, "made")])
@pytest.mark.parametrize("again", AGAIN)
def test_what_is_written_by_either(again, act, of):
    c = X * 3

    def run(region):
        def body(x, constant):
            h = MADE[of](x, constant)
            return act(h, AGAIN[again](h), x).sin()

        x, constant = X.clone().requires_grad_(), c.clone()
        y = region(lambda x: body(x, constant))(x)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    for _ in range(ALIKE + 4):
        assert_same(run(functx.remat), run(lambda f: f))


@pytest.mark.parametrize("again", AGAIN)
def test_what_is_written_in_some_runs(again):
    """Whose pullback is known otherwise."""

    class Sometimes:
        now = False

        def __call__(self, h):
            if self.now:
                AGAIN[again](h).mul_(2)

    sometimes = Sometimes()

    def run(region):
        def body(x):
            h = x.detach() * 2
            sometimes(h)
            return (x * h).sin()

        x = X.clone().requires_grad_()
        return torch.autograd.grad(region(body)(x).sum(), x)[0]

    for step in range(ALIKE + 9):
        sometimes.now = step in (1, ALIKE + 3, ALIKE + 5)
        assert_same(run(functx.remat), run(lambda f: f))
