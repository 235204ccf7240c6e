"""A region's policy, names and offload in JAX: what is kept is what torch keeps."""

import jax
import jax.numpy as jnp
import pytest
import torch

import functx
from functx import checkpoint_policies as cp
from functx.compat import to_jax

from .networks import arrays, assert_close, count_dots

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


def tanh_only(ctx, op, *args, **kwargs):
    return op is torch.ops.aten.tanh.default


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
    "function": (tanh_only, 0),
    "or": (cp.save_only_these_names("middle") | cp.save_these_operators(torch.ops.aten.mm), 0),
    "and": (cp.dots_saveable & cp.save_smaller_than(1), 4),
    "small": (cp.save_smaller_than(1 << 20), 0),
    "offload": (cp.offload(cp.dots_saveable), 0),
}


@pytest.fixture
def args():
    torch.manual_seed(0)
    return [torch.randn(8, 8) / 3 for _ in range(LAYERS)], torch.randn(4, 8)


@pytest.mark.parametrize("name", POLICIES)
def test_products_that_run_again(name, args):
    policy, again = POLICIES[name]
    f = net(policy)
    assert count_dots(jax.grad(to_jax(f)), *arrays(args)) == PLAIN + again
    # As in torch.
    assert functx.memory.count(functx.grad(f), *args)["mm"] == PLAIN + again


@pytest.mark.parametrize("name", ["none", "names", "dots", "not dots"])
def test_values(name, args):
    got = jax.grad(to_jax(net(POLICIES[name][0])))(*arrays(args))
    assert_close(got, torch.func.grad(net(None))(*args), rtol=1e-5)
    twice = jax.jvp(lambda x: jax.grad(to_jax(net(POLICIES[name][0])), 1)(arrays(args)[0], x),
                    (arrays(args[1]),), (arrays(args[1]),))[1]  # fmt: skip
    expected = torch.func.jvp(
        lambda x: torch.func.grad(net(None), 1)(args[0], x), (args[1],), (args[1],)
    )[1]
    assert_close(twice, expected, rtol=1e-5)


def test_an_outer_vmap_does_not_change_what_is_kept(args):
    """JAX would take batched products for products with batch dimensions."""
    ws, x = arrays(args)
    rows = jnp.stack([x] * 3)

    def dots(policy):
        return count_dots(jax.vmap(jax.grad(to_jax(net(policy))), (None, 0)), ws, rows)

    assert dots(None) - dots(cp.dots_with_no_batch_dims_saveable) == LAYERS


def test_names_are_jax_s(args):
    """Of the function, for a policy of JAX's around it; also where there is no region."""
    f = to_jax(lambda ws, x: (layer(x, *ws[:2]) ** 2).sum())
    assert "name=middle" in str(jax.make_jaxpr(f)(*arrays(args)))
    policy = jax.checkpoint_policies.save_only_these_names("middle")
    plain, none, kept = (
        count_dots(jax.value_and_grad(g), *arrays(args))
        for g in (f, jax.checkpoint(f), jax.checkpoint(f, policy=policy))
    )
    assert (none - plain, kept - plain) == (2, 1)


def test_names_survive_a_second_trace(args):
    def f(ws, x):
        def body(x, a, b):
            y = x * 1
            y.mul_(2)
            return layer(y, a, b)

        x = functx.remat(body, policy=cp.save_only_these_names("middle"))(x, *ws[:2])
        x = x.clone()
        x[0] = 1.0
        return (x * x).sum()

    def plain(ws, x):
        return f(ws, x)

    again = count_dots(jax.grad(to_jax(f)), *arrays(args))
    assert again == 2 + 2 + 1 + 1
    assert_close(jax.grad(to_jax(f))(*arrays(args)), torch.func.grad(plain)(*args), rtol=1e-5)


SMOOTH = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_by_way_of_the_named_result(name):
    op = SMOOTH[name]

    def f(x):
        named = functx.checkpoint_name(op(x), "y")
        return (named * torch.linspace(1, 2, 3)).sum()

    x = torch.rand(2, 3) + 0.5
    for transform in (lambda f: f, functx.remat):
        g = to_jax(transform(f))
        assert_close(jax.grad(g)(arrays(x)), torch.func.grad(f)(x), rtol=1e-5)
        assert_close(jax.hessian(g)(arrays(x)), torch.func.hessian(f)(x), rtol=1e-5)
