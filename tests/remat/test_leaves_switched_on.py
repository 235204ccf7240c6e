"""Rule 4: ``requires_grad_()`` of a captured leaf makes it an input that requires grad."""

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import nn

import functx


def first(state, x):
    state.requires_grad_()
    return (x * state).sin() + state.exp()


def by_assignment(state, x):
    state.requires_grad = True
    return (x * state).sin()


def after_a_use_as_a_constant(state, x):
    h = x * state
    state.requires_grad_()
    return (h * state).sin()


def off(state, x):
    state.requires_grad_(False)
    return (x * state).sin()


def off_and_on(state, x):
    state.requires_grad_(False)
    h = (x * state).sin()
    state.requires_grad_(True)
    return h + state.cos()


def twice(state, x):
    state.requires_grad_()
    y = x * state
    state.requires_grad_()
    return y + state.exp()


def in_a_region_inside(state, x):
    inner = functx.remat(lambda x: first(state, x))
    return x * state.detach() + inner(x * 2) * state


BODIES = [first, by_assignment, after_a_use_as_a_constant, off, off_and_on, twice]


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("body", [*BODIES, in_a_region_inside], ids=lambda body: body.__name__)
def test_a_switch_is_that_without_remat(body, kind):
    def found(region):
        state = numbers(4, start=2.0)
        state = nn.Parameter(state) if kind == "parameter" else state
        results = []
        for _ in range(3):  # (later runs may follow a script)
            x = numbers(4).requires_grad_()
            y = region(lambda x: body(state, x))(x)
            y.square().sum().backward()
            results += [y.detach(), x.grad, state.requires_grad]
            results += [None if state.grad is None else state.grad.clone()]
        return results

    assert_same(found(functx.remat), found(lambda f: f), eps=8)


class Quantizer(nn.Module):
    """Codes by the nearest neighbour, which is learned; statistics in buffers."""

    def __init__(self, learnable):
        super().__init__()
        self.learnable = learnable
        self.register_buffer("codes", numbers(8, 4, start=1.0))
        self.register_buffer("used", torch.zeros(8, dtype=DTYPE))

    def forward(self, x):
        if self.learnable:
            self.codes.requires_grad_()
        loss = torch.tensor([0.0], dtype=x.dtype, requires_grad=self.training)
        number = torch.cdist(x, self.codes).argmin(-1)
        near = self.codes[number]
        with torch.no_grad():
            self.used.add_(torch.bincount(number, minlength=8).to(x.dtype))
        loss = loss + (near.detach() - x).square().mean() + (near - x.detach()).square().mean()
        return x + (near - x).detach(), loss


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_vector_quantizer_trains_in_a_region(layers, learnable):
    def found(region):
        modules = [Quantizer(learnable) for _ in range(layers)]
        regions, results = [region(m) for m in modules], []
        for step in range(3):
            x = numbers(6, 4, start=float(step)).requires_grad_()
            y, losses = x, 0.0
            for m in regions:
                y, loss = m(y)
                losses = losses + loss.sum()
            (y.sin().sum() + losses).backward()
            results += [x.grad, y.detach()]
        return results, [(m.codes.grad, m.used) for m in modules]

    assert_same(found(functx.remat), found(lambda m: m), eps=8)


def test_a_replay_does_not_switch():
    """The program has switched the leaf off in between, to freeze it."""
    state = numbers(4)
    x = numbers(4).requires_grad_()
    y = functx.remat(lambda x: first(state, x))(x)
    state.requires_grad_(False)
    torch.autograd.grad(y.sum(), x)
    assert not state.requires_grad


def test_what_is_on_the_tape_or_no_leaf_is_refused():
    leaf, x = numbers(4).requires_grad_(), numbers(4).requires_grad_()
    inner = leaf * 2

    def late(x):
        y = x * leaf
        leaf.requires_grad_(False)
        return y

    for f in (late, lambda x: x * inner.requires_grad_(False), lambda x: x.requires_grad_(False)):
        with pytest.raises(functx.RematError, match="changes requires_grad"):
            functx.remat(f)(x)
    assert leaf.requires_grad
    assert x.requires_grad
