"""Random programs of views, writes and detached parts have torch's values and gradients in JAX."""

import random
from collections import Counter

import jax
import numpy as np
import pytest
import torch

from functx._core.errors import LoweringError
from functx.compat import to_jax

VIEWS = [
    *(".t()", "[1:]", "[..., :2]", ".reshape(-1)", "[0]", "[::2]", ".diagonal()", ".flip(0)"),
    *(".detach()", ".detach()", ".clone()", ".movedim(0, -1)", ".unbind()[0]", "[..., None]"),
]
WRITES = [
    *("{a}.add_({v})", "{a}.mul_({v})", "{a}[0] = {v}", "{a}[..., -1] = {v}", "{a}[1:] += {v}"),
    *("{a}.zero_()", "{a}.sin_()", "{a}.masked_fill_({a} > 0.3, 0.5)", "{a}.copy_({a} * {v})"),
]


def program(seed):
    """The text of a program of two matrices, which gives a number."""
    choose = random.Random(seed)
    names = ["a0", "a1", "a2"]
    lines = ["def f(w, x):", "    a0, a1, a2 = x.sin(), w * 1.5, x.t().clone()"]
    for _ in range(choose.randint(4, 10)):
        a, b, kind = choose.choice(names), choose.choice(names), choose.random()
        indent = "    "
        if choose.random() < 0.25:
            lines.append("    with torch.no_grad():")
            indent = "        "
        if kind < 0.6:
            new = f"a{len(names)}"
            made = f"{a}{choose.choice(VIEWS)}" if kind < 0.35 else f"{a}.cos() * {b}.mean()"
            lines.append(f"{indent}{new} = {made}")
            names.append(new)
        else:
            value = choose.choice([f"{b}.sum()", f"{b}.mean()", "2.0", "w.sum()"])
            lines.append(indent + choose.choice(WRITES).format(a=a, v=value))
    parts = [f"({a} * {i}.3).cos().sum()" for i, a in enumerate(choose.sample(names, 3))]
    return "\n".join([*lines, "    return " + " + ".join(parts)])


def outcome(seed):
    space = {"torch": torch}
    exec(text := program(seed), space)
    values = torch.randn(
        2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    leaves = [v.clone().requires_grad_() for v in values]
    try:
        value = space["f"](*leaves)
        expected = [value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)]
    except (RuntimeError, IndexError):  # a view that does not fit; a value that was overwritten
        return "refused by torch"
    try:
        found = jax.value_and_grad(to_jax(space["f"]), (0, 1))(*values.numpy())
    except LoweringError:
        return "refused"
    scale = max(1.0, *(float(t.abs().max()) for t in expected))
    for got, right in zip(jax.tree.leaves(found), expected):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-9 * scale, err_msg=text)
    return "equal"


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 1000), marks=pytest.mark.sweep)]
)
def test_a_program_has_the_value_and_the_gradients_of_torch(seeds):
    with jax.enable_x64(True):
        outcomes = Counter(map(outcome, seeds))
    assert outcomes["equal"] > len(seeds) / 2
    assert outcomes["refused"] < len(seeds) / 10
