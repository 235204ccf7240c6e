"""A remat region is ``jax.checkpoint`` at the same cut: its recompute stays, and is no more."""

import operator
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from cases import identity
from jax.extend import core
from references import count

import functx
from functx import _remat as engine
from functx._remat import Options
from functx.compat import to_jax

from ..helpers import LAYERS, arrays, assert_close, chain, count_dots, weights

# Plain: 8 products forward, 8 for the weights, 7 for the activations.  Every region runs again.
PLAIN = LAYERS + LAYERS + (LAYERS - 1)


@pytest.mark.parametrize("segment", [0, 1, 2, 8])
def test_a_region_runs_again_and_gives_torch_s_gradient(segment):
    args = weights()
    expected = torch.func.grad(chain(0))(*args)
    recomputed = LAYERS if segment else 0

    def plain_autograd(ws, x):
        ws = [w.requires_grad_() for w in ws]
        return torch.autograd.grad(chain(segment)(ws, x), ws)

    inside = to_jax(functx.grad(chain(segment))), to_jax(plain_autograd)
    for gradient in (jax.grad(to_jax(chain(segment))), *inside):
        assert count_dots(gradient, *arrays(args)) == PLAIN + recomputed
        assert_close(gradient(*arrays(args)), expected)


def test_the_count_can_fail():
    """Without the option XLA's CPU compiler merges the recompute, up to JAX 0.11.0; it is seen."""
    args = arrays(weights())
    f = jax.grad(to_jax(chain(2)))
    merged = count_dots(f, *args, barriers=False)
    assert merged == PLAIN + (LAYERS if jax.__version_info__ >= (0, 11, 1) else 0)


@pytest.mark.parametrize("inside", [False, True])
def test_a_graph_that_is_traced_again_keeps_its_regions(inside, monkeypatch):
    """Writes need a second pass; a replay that lost its mark there would be merged by XLA."""

    def run(x, a, b):
        y = x @ a
        y.mul_(2)
        return torch.tanh(torch.tanh(y) @ b)

    def net(ws, x):
        for i in range(0, LAYERS, 2):
            x = functx.remat(run)(x, *ws[i : i + 2])
        x = x.clone()
        x[0] = 1.0
        return (x * x).sum()

    args = weights()
    f = to_jax(functx.grad(net)) if inside else jax.grad(to_jax(net))
    assert count_dots(f, *arrays(args)) == PLAIN + LAYERS
    monkeypatch.setattr(functx, "remat", lambda f: f)
    assert_close(f(*arrays(args)), torch.func.grad(net)(*args))


@pytest.mark.filterwarnings("ignore:the function writes to")
def test_what_a_region_writes_is_written_once():
    def f(x, b):
        def body(x):
            b.mul_(2.0)
            factors = torch.tensor([1.0, 2.0, 3.0, 4.0])
            factors.add_(1.0)
            return (x * b * factors).sum()

        return functx.remat(body)(x), b * 1

    x, b = torch.linspace(-1, 1, 4), torch.arange(4.0)
    given = arrays((x, b))
    assert_close(to_jax(f)(*given), f(x, b.clone()))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(f(x, b.clone())[0], x)
    assert_close(jax.grad(lambda x, b: to_jax(f)(x, b)[0])(*given), expected)


CAPTURED = torch.linspace(-0.4, 0.6, 25).reshape(5, 5).requires_grad_()
INNER = functx.remat(lambda x: x.sin() * x)
BODIES = {
    "captured": lambda x: functx.remat(lambda h: torch.tanh(CAPTURED @ h) * x)(x.sin()) + x,
    "nested": functx.remat(lambda x: INNER(x).cos() + functx.vmap(functx.remat(torch.tanh))(x)),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_plain_autograd_inside_goes_through_regions(body, create_graph):
    def f(x):
        y = x * 1 if create_graph else x.detach().clone()
        y = y if y.requires_grad else y.requires_grad_()
        out = BODIES[body](y).sin().sum()
        more = [CAPTURED] if body == "captured" and create_graph else []
        first, *others = torch.autograd.grad(out, [y, *more], create_graph=create_graph)
        return sum((g @ x for g in others), first * x)

    x = torch.linspace(-1.0, 1.0, 5)
    assert_close(to_jax(f)(arrays(x)), f(x.clone().requires_grad_()))
    expected = torch.autograd.functional.jacobian(f, x)
    assert_close(jax.jit(jax.jacrev(to_jax(f)))(arrays(x)), expected, rtol=1e-5)


ONE = ("sin", "tanh", "exp", "half", "transpose")
TWO = ("mul", "add", "matmul")
OWN = {"half": lambda x: x * 0.5, "transpose": lambda x: x.mT}
OWN |= {name: getattr(operator, name) for name in TWO}
COUNTED = {"sin": "sin", "cos": "cos", "tanh": "tanh", "exp": "exp", "dot_general": "mm"}


def nest(choose, depth, given):
    """Steps on a list of matrices, of which the first are given; and which are the results."""
    steps, known = [], given
    for _ in range(choose.randint(1, 3)):
        kind = choose.random()
        if depth and kind < 0.5:
            arguments = [choose.randrange(known) for _ in range(choose.randint(1, 3))]
            steps.append((nest(choose, depth - 1, len(arguments)), arguments))
        elif kind < 0.75:
            steps.append((choose.choice(ONE), [known - 1]))
        else:
            steps.append((choose.choice(TWO), [choose.randrange(known), known - 1]))
        known += len(steps[-1][0][1]) if isinstance(steps[-1][0], tuple) else 1
    return steps, sorted({known - 1, choose.randrange(given, known)})


def run(steps, results, values, library, remat):
    values = [*values]
    for step, arguments in steps:
        read = [values[i] for i in arguments]
        if isinstance(step, tuple):
            values += remat(lambda *a, step=step: tuple(run(*step, a, library, remat)))(*read)
        else:
            values.append((OWN.get(step) or getattr(library, step))(*read))
    return [values[i] for i in results]


def drawn(seed):
    choose = random.Random(seed)
    return nest(choose, choose.randint(1, 4), 2)


def touches_all(steps, results, given):
    """Whether all that regions are given, and return, is read: JAX drops what is not."""
    touched, read = {*results, *(i for _, arguments in steps for i in arguments)}, {*range(given)}
    for step, arguments in steps:
        n = len(step[1]) if isinstance(step, tuple) else 1
        if isinstance(step, tuple):
            read |= {*range(given, given + n)}
            if not touches_all(*step, len(arguments)):
                return False
        given += n
    return touched >= read


def loss(seed, library, remat):
    steps, results = drawn(seed)
    return lambda x, y: sum(out.sum() for out in run(steps, results, (x, y), library, remat))


def inputs(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, 4, 4)).astype(np.float32) * 0.5


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
    if library is jnp:
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


SEEDS = [range(6), pytest.param(range(100, 3000), marks=pytest.mark.sweep)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seeds", SEEDS, ids=["a few", "many"])
def test_a_nest_recomputes_no_more_than_in_jax(seeds, way):
    chosen = [seed for seed in seeds if len(seeds) < 10 or touches_all(*drawn(seed), 2)]
    assert len(chosen) in (6, *range(100, 3000))
    for seed in chosen:
        ours = counts(way, seed, torch, functx.remat) - counts(way, seed, torch, identity)
        those = counts(way, seed, jnp, jax.checkpoint)
        those.subtract(counts(way, seed, jnp, identity))
        more = {k: n for k, n in ours.items() if k in COUNTED.values() and n > those[k]}
        assert not more, (seed, ours, those)


def test_the_comparison_can_fail():
    def whole(f):
        options = Options(early_stop=False)
        return lambda *args: engine.run(f, args, {}, options)

    ours = sum((counts("grad", seed, torch, whole) for seed in range(12)), Counter())
    least = sum((counts("grad", seed, torch, functx.remat) for seed in range(12)), Counter())
    assert ours["mm"] > least["mm"]
    assert ours["sin"] > least["sin"]


def test_torch_s_checkpoint_is_no_region_and_warns_once():
    def f(x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
        return x.sum()

    with pytest.warns(UserWarning, match=r"saves what torch\.utils\.checkpoint") as told:
        assert "remat" not in str(jax.make_jaxpr(to_jax(f))(jnp.ones(2)))
    assert len(told) == 1
    with functx.patch_checkpoint():
        assert str(jax.make_jaxpr(to_jax(f))(jnp.ones(2))).count("remat") == 2
