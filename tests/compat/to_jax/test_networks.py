"""Whole networks: values, gradients and per-example gradients, by JAX or inside, are torch's."""

import jax
import pytest
import torch
from torch.func import functional_call

from functx.compat import to_jax

from ..agreement import NETWORKS
from ..helpers import arrays, assert_close

SLOW = ("ResNet", "BERT")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.sweep if n in SLOW else ()) for n in NETWORKS]
)
def test_values_and_gradients_are_torch_s(name):
    net, x = NETWORKS[name]()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params, x):
        return functional_call(net, params, (x,)).square().mean()

    expected = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")(params, x)
    args = arrays((params, x))
    per_example = jax.vmap(jax.value_and_grad(to_jax(loss)), (None, 0))
    values, gradients = jax.jit(per_example)(*args)
    assert_close(values, torch.stack([loss(params, one) for one in x]))
    assert_close(gradients, expected)
    inside = jax.jit(to_jax(torch.func.grad(loss)))(args[0], args[1][0])
    assert_close(inside, {name: g[0] for name, g in expected.items()})
