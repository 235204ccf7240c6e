"""Budgets are kept for one forward and one pullback: random functions, measured from outside."""

import random
import re

import pytest
import torch
from references import assert_same, peak
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import functx

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

    def f(weights, x):
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
}


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
            assert peak(planned, weights, x) <= budget, (seed, name, share)
            possible += 1
    return possible


@pytest.mark.parametrize("stack", STACKS)
def test_a_budget_is_never_exceeded(stack):
    assert held_to_budgets(5, [stack], (0.95,)) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 130))
def test_more_budgets_are_never_exceeded(seed):
    held_to_budgets(seed, list(STACKS)[seed % 3 :: 3], (0.85, 0.65))


@pytest.mark.parametrize("stack", ["grad", "autograd"])
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
