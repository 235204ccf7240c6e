"""Models of Flax (linen and NNX) and Equinox as users have them, trained in torch.

Each is trained three steps by plain gradient descent in both frameworks, and must stay the same.
"""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import functx
from functx.compat import from_jax, module_from_jax

from .. import helpers

eqx = pytest.importorskip("equinox")
linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(1, 0, 16, dtype=np.float32).reshape(8, 2)
RATE = 0.1
assert_close = partial(helpers.assert_close, rtol=2e-5)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.Dense(5)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.5, deterministic=not train)(linen.gelu(x))
        return linen.Dense(2)(x)


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, 4, decode=False, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        h = self.first(x)[None]
        return self.last(h + self.attention(h, h, h))[0]


def linen_model():
    model = linen.Sequential([linen.Dense(5), linen.tanh, linen.Dense(2)])
    return model.apply, model.init(jax.random.key(0), X)


def nnx_model():
    definition, weights, rest = nnx.split(NNXBlock(nnx.Rngs(0)), nnx.Param, ...)
    return lambda weights, x: nnx.merge(definition, weights, rest)(x), weights


def equinox_model():
    model = eqx.nn.MLP(3, 2, 5, 2, key=jax.random.key(0))
    weights, static = eqx.partition(model, eqx.is_array)
    return lambda weights, x: jax.vmap(eqx.combine(weights, static))(x), weights


MODELS = {"linen": linen_model, "nnx": nnx_model, "equinox": equinox_model}


def trained_in_jax(fn, params, steps=3):
    loss = lambda params: jnp.mean((fn(params, X) - Y) ** 2)

    @jax.jit
    def step(params):
        return jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(loss)(params))

    for _ in range(steps):
        params = step(params)
    return params


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_jax_and_has_its_per_example_gradients(name):
    fn, params = MODELS[name]()
    net = module_from_jax(fn, params)
    forward = net if name == "linen" else functx.remat(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    for _ in range(3):
        optimizer.zero_grad()
        (forward(x) - y).square().mean().backward()
        optimizer.step()
    assert_close(net.jax_params(), trained_in_jax(fn, params))
    assert_close(params, MODELS[name]()[1])  # the model's own arrays are as they were
    loss = lambda weights, x: torch.func.functional_call(net, weights, (x[None],)).square().mean()
    got = functx.vmap(functx.grad(loss), (None, 0))(dict(net.named_parameters()), x)
    gradient = jax.grad(lambda p, x: jnp.mean(fn(p, x[None]) ** 2))
    expected = jax.jit(jax.vmap(gradient, (None, 0)))(net.jax_params(), X)
    assert_close([*got.values()], expected)


def test_modes_statistics_and_keys_of_linen_go_over():
    model = LinenBlock()
    variables = model.init(jax.random.key(0), X, train=False)
    params, statistics = variables["params"], {"batch_stats": variables["batch_stats"]}

    def apply(params, statistics, x, key):
        variables = {"params": params, **statistics}
        return model.apply(variables, x, True, rngs={"dropout": key}, mutable=["batch_stats"])

    f = from_jax(apply)
    tensors = jax.tree.map(lambda a: torch.from_numpy(np.array(a)).requires_grad_(), params)
    key = jax.random.key(3)
    out, updated = f(tensors, statistics, torch.from_numpy(X), key)
    expected, expected_updated = jax.jit(apply)(params, statistics, X, key)
    assert_close(out, expected)
    assert_close(updated, expected_updated)
    out.sum().backward()
    expected = jax.jit(jax.grad(lambda p: apply(p, statistics, X, key)[0].sum()))(params)
    assert_close(jax.tree.map(lambda t: t.grad, tensors), expected)
    net = module_from_jax(model.apply, variables, static_argnames=("train",))
    evaluated = net(torch.from_numpy(X), train=False)
    expected = model.apply(variables, X, train=False)
    assert_close(evaluated, expected)


def test_a_module_is_saved_copied_and_part_of_others():
    fn, params = linen_model()
    net = module_from_jax(fn, params)
    x = torch.from_numpy(X)
    copied = copy.deepcopy(net)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2)
    assert not torch.allclose(copied(x), net(x))
    copied.load_state_dict(net.state_dict())
    assert torch.equal(copied(x), net(x))
    whole = torch.nn.Sequential(torch.nn.Linear(3, 3), net)
    whole(x).sum().backward()
    assert all(p.grad is not None for p in whole.parameters())
    assert "from_jax" in repr(net)


def test_leaves_that_are_no_parameters_are_kept_and_names_that_collide_refused():
    params = {"w": jnp.ones(3), "table": jnp.arange(3), "key": jax.random.key(1)}
    params |= {"mode": "double", "half": jnp.ones(3, jnp.bfloat16)}

    def fn(p, x):
        noise = jax.random.uniform(p["key"], (3,))
        return (p["w"] * p["table"] * x + noise) * (2 if p["mode"] == "double" else 1) * p["half"]

    net = module_from_jax(fn, params)
    assert sorted(dict(net.named_parameters())) == ["half_", "w"]
    assert sorted(dict(net.named_buffers())) == ["table"]
    noise = np.asarray(jax.random.uniform(params["key"], (3,)))
    np.testing.assert_allclose(net(torch.ones(3)).detach(), (np.arange(3) + noise) * 2, rtol=1e-6)
    back = net.jax_params()
    assert back["key"] is params["key"]
    assert back["half"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="two leaves of params have the name"):
        module_from_jax(lambda p: 0, {"a.b": jnp.ones(1), "a_b": jnp.ones(1)})


class Power(eqx.Module):
    weight: jax.Array
    order: int = eqx.field(static=True)
    activation: callable = jnp.tanh

    def __call__(self, x):
        return jnp.sum(self.activation(self.weight @ x) ** self.order)


def test_the_advice_for_a_module_of_equinox_under_a_transform_works():
    model = Power(jnp.ones((2, 3)) / 3, 2)
    x = torch.ones(3)
    f = from_jax(lambda model, x: model(x))
    for transform in (functx.grad, functx.jacrev, functx.hessian, functx.value_and_grad):
        with pytest.raises(TypeError, match=r"tensors and JAX arrays.*from_dlpack.*may close over"):
            transform(f)(model, x)
        moved = jax.tree.map(lambda a: torch.from_dlpack(a) if eqx.is_array(a) else a, model)
        with pytest.raises(ValueError, match=r"jax\.tree\.flatten\(x\).*equinox\.partition"):
            transform(f)(moved, x)
    weights, static = eqx.partition(model, eqx.is_array)
    leaves, tree = jax.tree.flatten(weights)
    put_together = lambda leaves: eqx.combine(jax.tree.unflatten(tree, leaves), static)
    f = from_jax(lambda leaves, x: put_together(leaves)(x))
    (gradient,) = functx.grad(f)([torch.from_dlpack(leaf) for leaf in leaves], x)
    expected = eqx.filter_grad(lambda model: model(jnp.ones(3)))(model)
    assert_close(gradient, expected.weight)
    closing = from_jax(lambda x: model(x))
    assert_close(functx.grad(closing)(x), jax.grad(model)(jnp.ones(3)))
