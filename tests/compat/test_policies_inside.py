"""The policy of a region that is differentiated inside a lowered function."""

import jax
import jax.numpy as jnp
import pytest
import torch

import functx
from functx import checkpoint_policies as cp
from functx.compat import to_jax
from functx.compat._lowering._graph import modules_of

from .networks import arrays, assert_close, count_dots
from .test_policies import LAYERS, PLAIN, POLICIES, net

ROWS = 3


@pytest.fixture
def args():
    torch.manual_seed(0)
    return [torch.randn(4, 4) / 3 for _ in range(LAYERS)], torch.randn(2, 4)


def products(f, *args):
    """In the graph, before XLA."""
    graphs = modules_of(to_jax(f).program(*arrays(args)).module)
    names = [str(n.target) for m in graphs for n in m.graph.nodes]
    return sum(name.startswith(("aten.mm", "aten.bmm")) for name in names)


def batched(args):
    ws, x = args
    return [torch.stack([w * (i + 1) for i in range(ROWS)]) for w in ws], torch.stack([x] * ROWS)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.filterwarnings("ignore:to_jax. what the policy of a region offloads")
def test_products_that_run_again(name, args):
    policy, again = POLICIES[name]
    gradient = functx.grad(net(policy))
    assert products(gradient, *args) == PLAIN + again
    # A policy is asked about one example, whatever is batched.
    per_example = functx.vmap(gradient)
    assert products(per_example, *batched(args)) == PLAIN + again
    counts = functx.memory.count(per_example, *batched(args))
    assert counts["mm"] + counts["bmm"] == PLAIN + again


def test_what_stays_on_the_device_is_told(args):
    """Host memory is for gradients that JAX takes: there the values are its residuals."""
    f = to_jax(net(POLICIES["offload"][0]))
    with pytest.warns(UserWarning, match=r"stays on the device.*jax\.grad\(to_jax\(f\)\)"):
        to_jax(functx.grad(net(POLICIES["offload"][0]))).program(*arrays(args))
    assert "<host>" in str(jax.make_jaxpr(jax.grad(f))(*arrays(args)))


@pytest.mark.parametrize("name", ["names", "dots"])
def test_xla_lets_it_be(name, args):
    policy, again = POLICIES[name]
    per_example = to_jax(functx.vmap(functx.grad(net(policy))))
    assert count_dots(per_example, *arrays(batched(args))) == PLAIN + again
    expected = torch.vmap(torch.func.grad(net(None)))(*batched(args))
    assert_close(per_example(*arrays(batched(args))), expected, rtol=1e-5)


def test_sizes_are_those_of_one_example(args):
    ws, x = args
    limit = x.nbytes + 1
    gradient = functx.vmap(functx.grad(net(cp.save_smaller_than(limit))), (None, 0))
    assert products(gradient, ws, torch.stack([x] * ROWS)) == PLAIN
    gradient = functx.vmap(functx.grad(net(cp.save_smaller_than(x.nbytes))), (None, 0))
    assert products(gradient, ws, torch.stack([x] * ROWS)) == PLAIN + 4


def test_second_derivatives(args):
    def f(policy):
        return lambda ws, x: functx.grad(lambda x: functx.grad(net(policy), 1)(ws, x).sum())(x)

    expected = torch.func.grad(lambda x: torch.func.grad(net(None), 1)(args[0], x).sum())(args[1])
    assert_close(to_jax(f(cp.dots_saveable))(*arrays(args)), expected, rtol=1e-5)
    assert products(f(cp.dots_saveable), *args) < products(f(None), *args)
    # One of the two in JAX: what is handed over carries derivatives.
    inner = to_jax(functx.grad(net(cp.dots_saveable), 1))
    got = jax.grad(lambda ws, x: inner(ws, x).sum(), 1)(*arrays(args))
    assert_close(got, expected, rtol=1e-5)


def several(w, x):
    mean, deviation = torch.var_mean(x @ w, -1, keepdim=True)
    best, place = torch.max(torch.sin(x @ w * mean), -1)
    return best * torch.exp(deviation.squeeze(-1)) + place


def inner_region(w, x):
    return torch.tanh(functx.remat(several, policy=cp.dots_saveable)(w, torch.tanh(x @ w)))


def writes(w, x):
    y = x @ w
    y[0].mul_(2)
    return torch.tanh(y) @ w


def stops(w, x):
    y = torch.tanh(x @ w)
    return y.detach() * torch.sin(y @ w)


BODIES = {"results": several, "a region inside": inner_region, "writes": writes, "detach": stops}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("policy", [cp.dots_saveable, cp.everything_saveable], ids=repr)
def test_bodies(body, policy, args):
    region = functx.remat(BODIES[body], policy=policy)

    def f(region):
        return lambda w, x: (region(w, x) ** 2).sum()

    w, x = args[0][0], args[1]
    got = to_jax(functx.grad(f(region)))(*arrays((w, x)))
    assert_close(got, torch.func.grad(f(BODIES[body]))(w, x), rtol=1e-4)
    assert products(functx.grad(f(region)), w, x) < products(
        functx.grad(f(functx.remat(BODIES[body]))), w, x
    )
    if policy == cp.everything_saveable:
        return
    twice = jax.grad(lambda w, x: to_jax(functx.grad(f(region)))(w, x).sum())(*arrays((w, x)))
    plain = torch.func.grad(lambda w: torch.func.grad(f(BODIES[body]))(w, x).sum())(w)
    assert_close(twice, plain, rtol=1e-4)


def test_draws_are_kept_too():
    @functx.remat(policy=cp.everything_saveable)
    def noisy(w, x):
        return torch.nn.functional.dropout(torch.tanh(x @ w), 0.5)

    def both(x):
        def loss(x):
            y = noisy(torch.eye(64), x)
            return y.sum(), y

        return functx.grad(loss, has_aux=True)(x)

    gradient, y = to_jax(both, rng=True)(jax.random.key(0), jnp.ones((1, 64)))
    assert ((gradient == 0) == (y == 0)).all()
    assert 10 < int((y == 0).sum()) < 54
