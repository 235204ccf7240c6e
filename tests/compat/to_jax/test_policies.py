"""A region's policy, names and offload, by JAX or inside: what is kept is what torch keeps."""

import jax
import jax.numpy as jnp
import pytest
import torch

import functx
from functx import checkpoint_policies as cp
from functx.compat import to_jax
from functx.compat._lowering._graph import modules_of

from ..helpers import arrays, assert_close, count_dots, weights

LAYERS = 4
PLAIN = LAYERS + LAYERS + (LAYERS - 1)


def layer(x, a, b):
    h = functx.checkpoint_name(torch.tanh(x @ a), "middle")
    return torch.tanh(h @ b)


def net(policy):
    def f(ws, x):
        for i in range(0, LAYERS, 2):
            x = functx.remat(layer, policy=policy)(x, ws[i], ws[i + 1])
        return (x * x).sum()

    return f


# How many of the four products of the forward run again.
POLICIES = {
    "none": (None, 4),
    "everything": (cp.everything_saveable, 0),
    "nothing": (cp.nothing_saveable, 4),
    "dots": (cp.dots_saveable, 0),
    "dots without batch": (cp.dots_with_no_batch_dims_saveable, 0),
    "not dots": (~cp.dots_saveable, 0),
    "names": (cp.save_only_these_names("middle"), 2),
    "other names": (cp.save_only_these_names("other"), 4),
    "but names": (cp.save_any_names_but_these("middle"), 4),
    "except names": (cp.save_anything_except_these_names("middle"), 0),
    "operators": ([torch.ops.aten.mm], 0),
    "function": (lambda ctx, op, *args, **kwargs: op is torch.ops.aten.tanh.default, 0),
    "or": (cp.save_only_these_names("middle") | cp.save_these_operators(torch.ops.aten.mm), 0),
    "and": (cp.dots_saveable & cp.save_smaller_than(1), 4),
    "small": (cp.save_smaller_than(1 << 20), 0),
    "offload": (cp.offload(cp.dots_saveable), 0),
}


@pytest.fixture
def args():
    return weights(LAYERS)


@pytest.mark.parametrize("name", POLICIES)
def test_what_runs_again_is_what_the_policy_says(name, args):
    policy, again = POLICIES[name]
    f = net(policy)
    assert count_dots(jax.grad(to_jax(f)), *arrays(args)) == PLAIN + again
    # As in torch.
    assert functx.memory.count(functx.grad(f), *args)["mm"] == PLAIN + again


@pytest.mark.parametrize("name", ["none", "names", "not dots"])
def test_a_policy_changes_no_value(name, args):
    ws, x = arrays(args)
    f, plain = to_jax(net(POLICIES[name][0])), net(None)
    assert_close(jax.grad(f)(ws, x), torch.func.grad(plain)(*args), rtol=1e-5)
    twice = jax.jvp(lambda x: jax.grad(f, 1)(ws, x), (x,), (x,))[1]
    inner = lambda x: torch.func.grad(plain, 1)(args[0], x)
    expected = torch.func.jvp(inner, (args[1],), (args[1],))[1]
    assert_close(twice, expected, rtol=1e-5)


def test_an_outer_vmap_does_not_change_what_is_kept(args):
    """JAX would take batched products for products with batch dimensions."""
    ws, x = arrays(args)
    rows = jnp.stack([x] * 3)
    dots = lambda policy: count_dots(jax.vmap(jax.grad(to_jax(net(policy))), (None, 0)), ws, rows)
    assert dots(None) - dots(cp.dots_with_no_batch_dims_saveable) == LAYERS


def test_names_are_those_of_jax(args):
    f = to_jax(lambda ws, x: (layer(x, *ws[:2]) ** 2).sum())
    assert "name=middle" in str(jax.make_jaxpr(f)(*arrays(args)))
    policy = jax.checkpoint_policies.save_only_these_names("middle")
    plain, none, kept = (
        count_dots(jax.value_and_grad(g), *arrays(args))
        for g in (f, jax.checkpoint(f), jax.checkpoint(f, policy=policy))
    )
    assert (none - plain, kept - plain) == (2, 1)


@pytest.mark.parametrize("op", [torch.tanh, torch.rsqrt, torch.relu, lambda x: x.softmax(-1)])
def test_a_derivative_by_way_of_a_named_result(op):
    def f(x):
        named = functx.checkpoint_name(op(x), "y")
        return (named * torch.linspace(1, 2, 3)).sum()

    x = torch.rand(2, 3) + 0.5
    for g in (to_jax(f), to_jax(functx.remat(f))):
        assert_close(jax.jit(jax.grad(g))(arrays(x)), torch.func.grad(f)(x), rtol=1e-5)
        assert_close(jax.jit(jax.hessian(g))(arrays(x)), torch.func.hessian(f)(x), rtol=1e-5)


ROWS = 3
QUICK = ("nothing", "dots without batch", "names", "function", "or", "offload")
REST = [pytest.param(n, marks=pytest.mark.sweep) for n in POLICIES if n not in QUICK]


def products(f, *args):
    """In the graph, before XLA."""
    graphs = modules_of(to_jax(f).program(*arrays(args)).module)
    names = [str(n.target) for m in graphs for n in m.graph.nodes]
    return sum(name.startswith(("aten.mm", "aten.bmm")) for name in names)


def batched(args):
    ws, x = args
    return [torch.stack([w * (i + 1) for i in range(ROWS)]) for w in ws], torch.stack([x] * ROWS)


@pytest.mark.parametrize("name", [*QUICK, *REST])
@pytest.mark.filterwarnings("ignore:to_jax. what the policy of a region offloads")
def test_what_runs_again_inside_is_what_the_policy_says(name, args):
    policy, again = POLICIES[name]
    gradient = functx.grad(net(policy))
    assert products(gradient, *args) == PLAIN + again
    # A policy is asked about one example, whatever is batched.
    per_example = functx.vmap(gradient)
    assert products(per_example, *batched(args)) == PLAIN + again
    counts = functx.memory.count(per_example, *batched(args))
    assert counts["mm"] + counts["bmm"] == PLAIN + again


def test_an_offload_that_stays_on_the_device_warns(args):
    """Host memory is for gradients that JAX takes: there the values are its residuals."""
    f = to_jax(net(POLICIES["offload"][0]))
    with pytest.warns(UserWarning, match=r"stays on the device.*jax\.grad\(to_jax\(f\)\)"):
        to_jax(functx.grad(net(POLICIES["offload"][0]))).program(*arrays(args))
    assert "<host>" in str(jax.make_jaxpr(jax.grad(f))(*arrays(args)))


def test_second_derivatives_keep_the_policy(args):
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


def writes(w, x):
    y = x @ w
    y[0].mul_(2)
    return torch.tanh(y) @ w


def stops(w, x):
    y = torch.tanh(x @ w)
    return y.detach() * torch.sin(y @ w)


BODIES = {"results": several, "writes": writes, "detach": stops}


@pytest.mark.parametrize(
    "body", [pytest.param("results", marks=pytest.mark.sweep), "writes", "detach"]
)
def test_a_policy_holds_for_any_body(body, args):
    region = functx.remat(BODIES[body], policy=cp.dots_saveable)

    def f(region):
        return lambda w, x: (region(w, x) ** 2).sum()

    w, x = args[0][0], args[1]
    got = to_jax(functx.grad(f(region)))(*arrays((w, x)))
    assert_close(got, torch.func.grad(f(BODIES[body]))(w, x), rtol=1e-4)
    assert products(functx.grad(f(region)), w, x) < products(
        functx.grad(f(functx.remat(BODIES[body]))), w, x
    )
    twice = jax.grad(lambda w, x: to_jax(functx.grad(f(region)))(w, x).sum())(*arrays((w, x)))
    plain = torch.func.grad(lambda w: torch.func.grad(f(BODIES[body]))(w, x).sum())(w)
    assert_close(twice, plain, rtol=1e-4)
