"""Layers of the same code become one ``lax.scan``, and nothing else about the function changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import functx
from functx import checkpoint_policies
from functx.compat import to_jax

from .. import helpers
from ..helpers import count_dots

LENGTH = 6


class Layer(nn.Module):
    """Has an operand of its own, one that all share, a second result, and dropout."""

    def __init__(self, rate):
        super().__init__()
        self.linear, self.rate = nn.Linear(4, 4, dtype=torch.float64), rate

    def forward(self, x, shift):
        y = nn.functional.dropout(torch.tanh(self.linear(x)) + shift, self.rate, self.training)
        return y, y.square().mean()


class Net(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.layers = nn.ModuleList(Layer(rate) for _ in range(LENGTH))

    def forward(self, x):
        shift, recorded = x.mean(), []
        for layer in self.layers:
            x, mean = layer(x, shift)
            recorded += [mean, x.sum()]
        return x, torch.stack(recorded)


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


X = np.linspace(-1, 1, 12).reshape(3, 4)


def loss_of(fn, *key):
    return lambda params, x: sum((out**2).sum() for out in fn(*key, params, x))


assert_close = partial(helpers.assert_close, rtol=1e-12)


def scans(f, *args):
    """The lengths of the loops of a function."""
    equations = jax.make_jaxpr(f)(*args).jaxpr.eqns
    inner = [e.params["jaxpr"].jaxpr.eqns for e in equations if e.primitive.name in ("pjit", "jit")]
    return [e.params["length"] for e in sum(inner, equations) if e.primitive.name == "scan"]


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_layers_become_one_scan_with_the_same_values_gradients_and_draws(rate):
    torch.manual_seed(0)
    net, key = Net(rate), (jax.random.key(0),) if rate else ()
    params, plain = to_jax(net, rng=bool(rate))
    _, scanned = to_jax(net, rng=bool(rate), scan="layers.*")
    assert scans(loss_of(plain, *key), params, X) == []
    assert scans(loss_of(scanned, *key), params, X) == [LENGTH]
    expected = jax.value_and_grad(loss_of(plain, *key), (0, 1))(params, X)
    assert_close(jax.value_and_grad(loss_of(scanned, *key), (0, 1))(params, X), expected)
    assert functx.remat_regions(net) == []


def test_the_layers_of_a_module_are_not_recomputed_and_regions_are():
    net = Net()
    params, scanned = to_jax(net, scan="layers.*")
    dots = count_dots(
        jax.grad(loss_of(scanned)), params, X
    )  # each of the loops' bodies has its own
    functx.apply_remat(net, "layers.*", policy=checkpoint_policies.nothing_saveable)
    _, recomputed = to_jax(net, scan=True)
    assert count_dots(jax.grad(loss_of(recomputed)), params, X) == dots + 1
    assert functx.remat_regions(net) == [f"layers.{i}" for i in range(LENGTH)]


def test_a_function_whose_layers_are_regions_is_scanned():
    net = functx.apply_remat(Net(), "layers.*")
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in net.named_parameters()}

    def loss(params, x):
        return functx.functional_call(net, params, (x,))[0].square().sum()

    assert scans(to_jax(loss, scan=True), params, X) == [LENGTH]
    expected = jax.hessian(to_jax(loss), 1)(params, X)
    assert_close(jax.hessian(to_jax(loss, scan=True), 1)(params, X), expected)


def test_a_layer_that_differs_ends_the_run():
    net = Net()
    net.layers[3].linear = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    params, scanned = to_jax(net, scan="layers.*")
    assert scans(loss_of(scanned), params, X) == [3, 2]
    assert_close(scanned(params, X), to_jax(net)[1](params, X))


def test_layers_with_other_operations_between_them_are_not_scanned_and_a_warning_says_so():
    net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(4, 4), nn.Tanh()))).double()
    params, scanned = to_jax(net, scan=nn.Linear)
    with pytest.warns(UserWarning, match="a layer reads what is computed between the layers"):
        out = scanned(params, X)
    assert_close(out, to_jax(net)[1](params, X))


def test_a_warning_names_the_first_operation_that_differs():
    net = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    )
    params, scanned = to_jax(net.double(), scan="[01]")
    with pytest.warns(UserWarning, match=r"aten.tanh.default at .* is not aten.relu.default"):
        scanned(params, X)


class Clamp(torch.autograd.Function):
    """Its gradient is none that JAX would find by itself."""

    @staticmethod
    def forward(ctx, x, limit, drop):
        ctx.save_for_backward(x)
        x = x.clamp(-limit, limit)
        return nn.functional.dropout(x, 0.5) if drop else x

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * x.cos(), None, None


class Clamped(nn.Module):
    def __init__(self, limit=0.5, drop=False):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4, dtype=torch.float64), (limit, drop)

    def forward(self, x):
        return Clamp.apply(self.linear(x), *self.how)


def test_layers_with_the_same_custom_function_are_scanned():
    net = nn.Sequential(*(Clamped() for _ in range(LENGTH)))
    params, plain = to_jax(net)
    _, scanned = to_jax(net, scan="*")
    assert scans(scanned, params, X) == [LENGTH]
    for transform in (jax.grad, jax.jacfwd, jax.hessian):
        of = lambda f: transform(lambda x: (f(params, x) ** 2).sum())(X)  # noqa: B023
        assert_close(of(scanned), of(plain))


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ([(0.5,), (0.25,)], r"clamp.*-0\.5, 0\.5\) at .* is not .*clamp.*-0\.25, 0\.25\) at"),
        ([(0.5, True)] * 2, "Clamp, a custom autograd.Function, draws random numbers"),
    ],
)
def test_layers_with_another_custom_function_or_draws_in_it_are_not(options, cause):
    net = nn.Sequential(*(Clamped(*option) for option in options))
    params, scanned = to_jax(net, rng=True, scan="*")
    with pytest.warns(UserWarning, match=cause) as warned:
        assert scans(scanned, jax.random.key(0), params, X) == []
    assert {w.filename for w in warned} == {__file__}


def test_what_to_scan_is_named_of_a_module_and_has_to_be_there():
    with pytest.raises(ValueError, match="matches no submodule"):
        to_jax(Net(), scan="blocks.*")
    with pytest.raises(ValueError, match="needs a module"):
        to_jax(torch.sin, scan="layers.*")


def test_layers_that_write_to_buffers_are_scanned():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(LENGTH)]
    net = nn.Sequential(*layers).double()
    params, buffers, plain = to_jax(net, buffers=True)
    _, _, scanned = to_jax(net, buffers=True, scan="[0-9]")
    assert scans(scanned, params, buffers, X) == [LENGTH]
    assert_close(scanned(params, buffers, X), plain(params, buffers, X))
