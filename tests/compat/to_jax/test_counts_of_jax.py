"""Random nests of regions recompute no more than the same nests of ``jax.checkpoint``.

JAX's counts are those of the jaxpr when dead code is gone. What regions add is compared, as torch
has other formulas for some derivatives, and computes values that nobody reads. Reverse mode twice
is not here: where the value is read as well, JAX keeps what is inside of the forward's regions.
"""

import random
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend import core
from references import count

import functx
from functx import _remat as engine
from functx._remat import Options

SIZE = 4
TORCH = SimpleNamespace(name="torch", sin=torch.sin, tanh=torch.tanh, exp=torch.exp)
JAX = SimpleNamespace(name="jax", sin=jnp.sin, tanh=jnp.tanh, exp=jnp.exp)
ONE = ("sin", "tanh", "exp", "half", "transpose")
TWO = ("times", "plus", "product")
COUNTED = {"sin": "sin", "cos": "cos", "tanh": "tanh", "exp": "exp", "dot_general": "mm"}


def nest(choose, depth, given):
    """Steps on a list of matrices, of which the first are given; and which are the results."""
    steps, known = [], given
    for _ in range(choose.randint(1, 3)):
        kind = choose.random()
        if depth and kind < 0.5:
            arguments = [choose.randrange(known) for _ in range(choose.randint(1, 3))]
            steps.append((nest(choose, depth - 1, len(arguments)), arguments))
            known += len(steps[-1][0][1])
        elif kind < 0.75:
            steps.append((choose.choice(ONE), [known - 1]))
            known += 1
        else:
            steps.append((choose.choice(TWO), [choose.randrange(known), known - 1]))
            known += 1
    return steps, sorted({known - 1, choose.randrange(given, known)})


def run(steps, results, values, library, remat):
    values = [*values]
    for step, arguments in steps:
        read = [values[i] for i in arguments]
        if isinstance(step, tuple):
            values += remat(lambda *a, step=step: tuple(run(*step, a, library, remat)))(*read)
        elif step == "half":
            values.append(read[0] * 0.5)
        elif step == "transpose":
            values.append(read[0].mT)
        elif step in ONE:
            values.append(getattr(library, step)(read[0]))
        elif step == "times":
            values.append(read[0] * read[1])
        else:
            values.append(read[0] + read[1] if step == "plus" else read[0] @ read[1])
    return [values[i] for i in results]


def identity(f):
    return f


def loss(seed, library, remat):
    choose = random.Random(seed)
    steps, results = nest(choose, choose.randint(1, 4), 2)

    def f(x, y):
        return sum(out.sum() for out in run(steps, results, (x, y), library, remat))

    return f


def inputs(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, SIZE, SIZE)).astype(np.float32) * 0.5


def live(jaxpr, wanted, found):
    """Count what these results are computed from; which inputs that reads."""
    needed = {v for v, w in zip(jaxpr.outvars, wanted) if w and not isinstance(v, core.Literal)}
    for equation in reversed(jaxpr.eqns):
        outs = [v in needed for v in equation.outvars]
        if any(outs):
            found[COUNTED.get(equation.primitive.name)] += 1
            inside = equation.params.get("jaxpr")
            reads = [True] * len(equation.invars)
            if inside is not None:
                reads = live(getattr(inside, "jaxpr", inside), outs, found)
            these = (v for v, r in zip(equation.invars, reads) if r)
            needed.update(v for v in these if not isinstance(v, core.Literal))
    return [v in needed for v in jaxpr.invars]


def counts(way, seed, library, remat):
    f, x = loss(seed, library, remat), inputs(seed)
    if library is JAX:
        jaxpr = jax.make_jaxpr(WAYS[way](jax, f))(*map(jnp.asarray, x)).jaxpr
        live(jaxpr, [True] * len(jaxpr.outvars), found := Counter())
        return found
    found = count(WAYS[way](functx, f), *map(torch.from_numpy, x))
    found["mm"] += found["bmm"]
    return found


def backward(library, f):
    if library is jax:
        return jax.value_and_grad(f, (0, 1))  # with the value, which torch computes in any case

    def gradients(x, y):
        x, y = x.requires_grad_(), y.requires_grad_()
        return torch.autograd.grad(f(x, y), (x, y), allow_unused=True)

    return gradients


def vmapped(library, f):
    stack = torch.stack if library is functx else jnp.stack
    rows = library.vmap(library.value_and_grad(f, (0, 1)))
    return lambda x, y: rows(stack([x, y]), stack([y, x]))


WAYS = {
    "backward": backward,
    "grad": lambda library, f: library.value_and_grad(f, (0, 1)),
    "vmap(grad)": vmapped,
    "jvp": lambda library, f: lambda x, y: library.jvp(f, (x, y), (y, x)),
}


def check(seed, way):
    ours = counts(way, seed, TORCH, functx.remat) - counts(way, seed, TORCH, identity)
    those = counts(way, seed, JAX, jax.checkpoint)
    those.subtract(counts(way, seed, JAX, identity))
    more = {k: n for k, n in ours.items() if k in COUNTED.values() and n > those[k]}
    assert not more, (seed, way, ours, those)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(6))
def test_a_nest_recomputes_no_more_than_in_jax(seed, way):
    check(seed, way)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_many_nests_recompute_no_more_than_in_jax(way):
    for seed in range(100, 400):
        check(seed, way)


def test_the_comparison_can_fail():
    """A region that recomputes all of its body recomputes more."""

    def whole(f):
        options = Options(early_stop=False)
        return lambda *args: engine.run(f, args, {}, options)

    ours = sum((counts("grad", seed, TORCH, whole) for seed in range(12)), Counter())
    least = sum((counts("grad", seed, TORCH, functx.remat) for seed in range(12)), Counter())
    assert ours["mm"] > least["mm"]
    assert ours["sin"] > least["sin"]
