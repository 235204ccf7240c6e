"""A region's policy, names and offload, by JAX or inside: what is kept is what torch keeps."""

import jax
import jax.numpy as jnp
import pytest
import torch

import functx
from functx import checkpoint_policies as cp
from functx.compat import to_jax
from functx.compat._to_jax.nodes import modules_of

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


twice = lambda x: torch.stack([x, 2 * x])


@pytest.fixture
def args():
    return weights(LAYERS)


def products(f, *args):
    """In the graph, before XLA."""
    graphs = modules_of(to_jax(f).program(*arrays(args)).module)
    names = [str(n.target) for m in graphs for n in m.graph.nodes]
    return sum(name.startswith(("aten.mm", "aten.bmm")) for name in names)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.filterwarnings("ignore:to_jax. the values that the policy of a region offloads")
@pytest.mark.filterwarnings("ignore:remat. in the region .*, checkpoint_name gives")
def test_what_runs_again_also_inside_is_what_the_policy_says(name, args):
    policy, again = POLICIES[name]
    gradient = functx.grad(net(policy))
    assert count_dots(jax.grad(to_jax(net(policy))), *arrays(args)) == PLAIN + again
    assert functx.memory.count(gradient, *args)["mm"] == PLAIN + again  # as in torch
    assert products(gradient, *args) == PLAIN + again
    # A policy is asked about one example, whatever is batched.
    per_example, rows = functx.vmap(gradient), torch.utils._pytree.tree_map(twice, args)
    assert products(per_example, *rows) == PLAIN + again


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


def test_an_offload_that_stays_on_the_device_warns(args):
    """Host memory is for gradients that JAX takes: there the values are its residuals."""
    f = to_jax(net(POLICIES["offload"][0]))
    with pytest.warns(UserWarning, match=r"stay on the device.*jax\.grad\(to_jax\(f\)\)"):
        to_jax(functx.grad(net(POLICIES["offload"][0]))).program(*arrays(args))
    assert "<host>" in str(jax.make_jaxpr(jax.grad(f))(*arrays(args)))


def writes(w, x):
    y = x @ w
    y[0].mul_(2)
    return torch.tanh(y) @ w


def stops(w, x):
    y = torch.tanh(x @ w)
    return y.detach() * torch.sin(y @ w)


def named(w, x):
    return layer(x, w, w)


BODIES = [(named, cp.save_only_these_names("middle")), (writes, cp.dots_saveable)]


@pytest.mark.parametrize(("body", "policy"), [*BODIES, (stops, ~cp.dots_saveable)])
def test_a_policy_holds_for_any_body_and_second_derivatives(body, policy, args):
    region = functx.remat(body, policy=policy)

    def f(region):
        return lambda w, x: (region(w, x) ** 2).sum()

    w, x = args[0][0], args[1]
    for gradient in (to_jax(functx.grad(f(region))), jax.grad(to_jax(f(region)))):
        assert_close(gradient(*arrays((w, x))), torch.func.grad(f(body))(w, x), rtol=1e-4)
    plain = torch.func.grad(lambda w: torch.func.grad(f(body))(w, x).sum())(w)
    # One of the two in JAX, where what is handed over carries derivatives; or both inside.
    handed_over = jax.grad(lambda w, x: to_jax(functx.grad(f(region)))(w, x).sum())
    second = lambda region: functx.grad(lambda w, x: functx.grad(f(region))(w, x).sum())
    for derivative in (handed_over, to_jax(second(region))):
        assert_close(derivative(*arrays((w, x))), plain, rtol=1e-4)
    for of in (lambda region: functx.grad(f(region)), second):
        assert products(of(region), w, x) < products(of(functx.remat(body)), w, x)
