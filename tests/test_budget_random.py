"""Budgets are kept: random functions, under every kind of derivative, measured from outside."""

import random
import re

import pytest
import torch
from references import assert_same, peak
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import functx
from functx import _budget, _plan, _surroundings
from functx._surroundings import Surroundings

pytestmark = pytest.mark.usefixtures("no_hooks")

KINDS = ["layer", "residual", "norm", "join", "gate", "dropout", "in place", "no grad", "center"]
ACTIVATIONS = [torch.tanh, torch.relu, torch.sigmoid, F.gelu, F.silu]


def random_function(seed):
    """A function of weights and inputs that is a chain of random operations with skips."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    width, rows = choose.choice([8, 16, 32]), choose.choice([96, 160, 240])
    weights, steps = [], []
    for _ in range(choose.randint(3, 9)):
        kind, activation = choose.choice(KINDS), choose.choice(ACTIVATIONS)
        if kind in ("layer", "residual", "join", "gate"):
            into = 2 * width if kind == "join" else width
            weights.append(torch.randn(into, width, generator=generator) / into**0.5)
        steps.append((kind, len(weights) - 1, activation))

    def f(weights, x, scale=None):
        if scale is not None:
            weights = [w * scale.sum() for w in weights[:1]] + weights[1:]
        before = x
        for kind, i, activation in steps:
            before, here = x, before
            if kind == "layer":
                x = activation(x @ weights[i])
            elif kind == "residual":
                x = x + activation(x @ weights[i])
            elif kind == "norm":
                x = F.layer_norm(x, (width,))
            elif kind == "join":
                x = torch.cat([x, here], -1) @ weights[i]
            elif kind == "gate":
                x = activation(x @ weights[i]) * torch.softmax(x, -1)
            elif kind == "dropout":
                x = F.dropout(x, 0.3)
            elif kind == "in place":
                x = (x * 2).clone().add_(1)
                x[..., 0] = 0
            elif kind == "no grad":
                with torch.no_grad():
                    scale = x.abs().mean() + 1
                x = x / scale
            else:
                x = x - x.mean(0, keepdim=True)
        return x.square().mean()

    return f, weights, torch.randn(rows, width, generator=generator)


def autograd(f):
    def gradients(weights, x):
        *weights, x = (t.detach().requires_grad_() for t in (*weights, x))
        return torch.autograd.grad(f(weights, x), [*weights, x], allow_unused=True)

    return gradients


def per_example(grad):
    def batched(f):
        run = functx.vmap(grad(f), (None, 0), randomness="different")
        return lambda weights, x: run(weights, x.reshape(4, -1, x.shape[-1]))

    return batched


STACKS = {
    "autograd": autograd,
    "grad": lambda f: functx.grad(f, (0, 1)),
    "grad of weights": functx.grad,
    "value_and_grad of inputs": lambda f: functx.value_and_grad(f, 1),
    "vmap(grad)": per_example(lambda f: functx.grad(f, (0, 1))),
    "vmap(grad) of inputs": per_example(lambda f: functx.grad(f, 1)),
    "grad(vmap)": lambda f: functx.grad(
        lambda weights, x: per_example(lambda f: f)(f)(weights, x).sum(), (0, 1)
    ),
    "grad(grad)": lambda f: functx.grad(
        lambda weights, x: functx.grad(f, 1)(weights, x).square().sum(), 1
    ),
    "autograd of grad": lambda f: autograd(
        lambda weights, x: functx.grad(f, 1)(weights, x).square().sum()
    ),
    "vjp": lambda f: lambda *args: functx.vjp(f, *args)[1](torch.ones(())),
    "vjp(grad)": lambda f: lambda *args: functx.vjp(functx.grad(f), *args)[1](args[0]),
    "torch.func.grad": lambda f: torch.func.grad(f, (0, 1)),
    "jvp(grad)": lambda f: (
        lambda weights, x: functx.jvp(lambda x: functx.grad(f, (0, 1))(weights, x), (x,), (x,))
    ),
    "hessian": lambda f: lambda weights, x: functx.hessian(f, 2)(weights, x, SCALE),
    "hessian around it": lambda f: (
        lambda weights, x: functx.hessian(
            lambda scale: f([w * scale.sum() for w in weights[:1]] + weights[1:], x)
        )(SCALE)
    ),
    "jacrev in chunks": lambda f: functx.jacrev(
        lambda weights, x: per_example(lambda f: f)(f)(weights, x), 1, chunk_size=3
    ),
    "jacrev(jacrev)": lambda f: (
        lambda weights, x: functx.jacrev(functx.jacrev(f, 2), 2)(weights, x, SCALE)
    ),
}

SCALE = torch.ones(3)
# What whoever calls `f` holds: the basis of what it differentiates by.
HELD = {"hessian around it": 4 * 3 * 3}


def held_to_budgets(seed, stacks, shares):
    """How many budgets were possible; each of them must have been kept."""
    f, weights, x = random_function(seed)
    possible = 0
    for name in stacks:
        plain = STACKS[name](f)
        try:
            most = peak(plain, weights, x)
        except RuntimeError as error:  # without a budget: draws in a hessian, a vjp of no weights
            assert "random operation" in str(error) or "non-empty" in str(error)  # noqa: PT017
            continue
        for share in shares:
            budget = int(share * most)
            planned = STACKS[name](functx.remat(f, budget=budget))
            torch.manual_seed(0)
            try:
                actual = planned(weights, x)
            except ValueError as error:
                assert "the least possible is" in str(error)  # noqa: PT017
                continue
            torch.manual_seed(0)
            leaves = [
                [t for t in pytree.tree_leaves(tree) if t is not None]
                for tree in (actual, plain(weights, x))
            ]
            assert_same(*leaves, 64)
            assert peak(planned, weights, x) <= budget + HELD.get(name, 0), (seed, name, share)
            possible += 1
    return possible


@pytest.mark.parametrize("stack", STACKS)
def test_a_budget_is_never_exceeded(stack):
    assert held_to_budgets(4, [stack], (0.95,)) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 130))
def test_sweep(seed):
    held_to_budgets(seed, list(STACKS)[seed % 3 :: 3], (0.85, 0.65))


@pytest.mark.parametrize("seed", range(2, 5))
def test_a_plan_holds_for_autograd_and_for_grad(seed):
    f, weights, x = random_function(seed)
    try:
        plan = functx.plan(f, weights, x, budget=0.8)
    except ValueError:
        return
    planned = functx.remat(f, policy=plan)
    for stack in (autograd, STACKS["grad"], STACKS["grad of weights"]):
        assert peak(stack(planned), weights, x) <= plan.peak <= plan.budget


def test_a_plan_measured_by_plain_autograd_alone_would_be_exceeded(monkeypatch):
    """`grad` records its own pullback, where autograd takes other formulas: more is live."""
    weights, x = [torch.eye(16) / 2 for _ in range(3)], torch.ones(200, 16)

    def f(weights, x):
        for w in weights:
            x = F.silu(x @ w)
        return x.sum()

    monkeypatch.setattr(_budget, "UNDER_GRAD", Surroundings(()))
    plan = functx.plan(f, weights, x, budget=0.9)
    planned = functx.remat(f, policy=plan)
    assert peak(autograd(planned), weights, x) <= plan.budget
    assert peak(STACKS["grad"](planned), weights, x) > plan.budget


def test_a_pullback_that_may_be_called_again_keeps_more(monkeypatch):
    """`vjp` gives its pullback away, so that nothing goes as it is read; `grad` reads it once."""
    f, weights, x = random_function(3)
    for known in (True, False):
        if not known:
            monkeypatch.setattr(_surroundings, "how_pulled_back", lambda level: "once")
        planned = STACKS["vjp"](functx.remat(f, budget=0.8))
        most = peak(STACKS["vjp" if known else "grad"](f), weights, x)
        _budget._plans.clear()
        assert (peak(planned, weights, x) <= 0.8 * most) == known


def test_one_region_of_everything_is_a_plan():
    """Derivatives of derivatives may have no other; a derivative always has a better one."""

    def peak_of(tree):
        return 100 if tree == [[0, 1, 2, 3, 4, 5, 6]] else 200

    blocks, x = [torch.sin] * 7, torch.ones(3)
    plan = _plan.chosen(blocks, x, 150, ("sin",) * 7, "a test", peak_of)
    assert plan.tree == ((0, 1, 2, 3, 4, 5, 6),)
    with pytest.raises(ValueError, match="the least possible is 100 bytes"):
        _plan.chosen(blocks, x, 50, ("sin",) * 7, "a test", peak_of)


@pytest.mark.parametrize("stack", ["grad", pytest.param("grad(grad)", marks=pytest.mark.sweep)])
def test_the_least_that_an_error_names_is_possible(stack):
    f, weights, x = random_function(7)
    with pytest.raises(ValueError, match="the least possible is") as error:
        STACKS[stack](functx.remat(f, budget=1000))(weights, x)
    least = int(re.search(r"least possible is ([\d,]+)", str(error.value))[1].replace(",", ""))
    planned = STACKS[stack](functx.remat(f, budget=least))
    assert peak(planned, weights, x) <= least


def test_forward_mode_keeps_nothing_and_needs_no_plan():
    f, weights, x = random_function(1)
    planned = functx.remat(f, budget=1)
    torch.manual_seed(0)
    ours = functx.jvp(lambda x: planned(weights, x), (x,), (x,))
    torch.manual_seed(0)
    assert_same(ours, functx.jvp(lambda x: f(weights, x), (x,), (x,)))
