"""Whole networks: value, gradient, gradient inside, and per-example gradients are torch's."""

import jax
import pytest
import torch

from functx.compat import to_jax

from .networks import NETWORKS, arrays, assert_close, loss_of, params_of


@pytest.fixture(params=NETWORKS)
def case(request):
    torch.manual_seed(0)
    net, x = NETWORKS[request.param]()
    y = torch.randint(0, 5, (len(x),))
    return loss_of(net), (params_of(net), x, y)


def test_value(case):
    loss, args = case
    assert_close(to_jax(loss)(*arrays(args)), loss(*args))


def test_gradient_by_jax(case):
    loss, args = case
    assert_close(jax.jit(jax.grad(to_jax(loss)))(*arrays(args)), torch.func.grad(loss)(*args))


def test_gradient_inside(case):
    loss, args = case
    expected = torch.func.grad(loss)(*args)
    assert_close(jax.jit(to_jax(torch.func.grad(loss)))(*arrays(args)), expected)


def test_per_example_gradient(case):
    loss, (params, x, y) = case

    def one(params, x, y):
        return loss(params, x[None], y[None])

    expected = [torch.func.grad(one)(params, x[i], y[i]) for i in range(len(x))]
    expected = {k: torch.stack([e[k] for e in expected]) for k in params}
    got = jax.vmap(jax.grad(to_jax(one)), (None, 0, 0))(*arrays((params, x, y)))
    assert_close(got, expected)


def test_module_gives_params_and_function(case):
    loss, (params, x, _) = case
    net = loss.__closure__[0].cell_contents
    arrays_by_name, fn = to_jax(net)
    assert set(arrays_by_name) == set(params)
    assert_close(fn(arrays_by_name, arrays(x)), net(x))
    doubled = {k: 2 * p for k, p in params.items()}
    expected = torch.func.functional_call(net, doubled, (x,))
    assert_close(fn(arrays(doubled), arrays(x)), expected)
