"""Where something around a region keeps what it makes, or gives it what it can't have.

The kind: the tool that stands in the way (a cache of parametrized weights, a library's hooks on
layers, a cache of keys and values that holds a trained prefix) is not in the user's function, so an
error that speaks of the function alone does not help. Each of these names the tool and what to do,
and what it names works, with the numbers of the program without regions.
"""

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import functx

X = numbers(3, 4)
NORMS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


def network(norm):
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4)).to(DTYPE)
    return net.eval()  # in which spectral_norm iterates no further


def twice_in_one(region, net, x):
    return region(lambda x: net(net[0](x)))(x).sum()


def in_two(region, net, x):
    run = region(net)
    return (run(x) + run(2 * x)).sum()


def filled_before(region, net, x):
    assert net[0].weight.shape == (4, 4)
    return region(net)(x).sum()


USES = [twice_in_one, in_two, filled_before]


def gradients(net, loss):
    return torch.autograd.grad(loss, [*net.parameters()])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("use", USES)
def test_a_cache_of_weights_around_the_forward_only_is_named(use, norm):
    """(No later run follows one that fills it: a weight leaves without being returned.)"""
    net = network(NORMS[norm])
    with parametrize.cached():
        loss = use(functx.remat, net, X)
    with pytest.raises(functx.ReplayError, match=r"parametrize.cached\(\).*inside of the region"):
        loss.backward()


@pytest.mark.parametrize("norm", NORMS)
def test_a_cache_of_weights_around_forward_and_backward_is_named(norm):
    net = network(NORMS[norm])
    with parametrize.cached():
        loss = twice_in_one(functx.remat, net, X)
        with pytest.raises(functx.ReplayError, match=r"parametrize.cached\(\)"):
            loss.backward()


def test_a_cache_of_weights_under_a_transform_is_named():
    net = network(NORMS["weight_norm"])

    def loss(x):
        with parametrize.cached():
            return functx.remat(net)(x).sum()

    with pytest.raises(functx.RematError, match=r"parametrize.cached\(\)"):
        functx.grad(loss)(X)


@pytest.mark.parametrize("norm", NORMS)
def test_a_cache_of_weights_inside_of_the_region_works(norm):
    net = network(NORMS[norm])

    def run(x):
        with parametrize.cached():
            return net(net[0](x)).sum()

    assert_same(gradients(net, functx.remat(run)(X)), gradients(net, run(X)))


def test_another_departure_in_a_parametrized_layer_still_names_its_causes(speed):
    net = network(NORMS["weight_norm"])
    region = functx.remat(net)
    speed.prepare(lambda: region(X))
    with speed:
        loss = region(X).sum()
    parametrize.remove_parametrizations(net[0], "weight")
    with pytest.raises(functx.ReplayError, match="If the calls depend on") as caught:
        loss.backward()
    assert "parametrize.cached" not in str(caught.value)


def keep_inputs_and_outputs(net):
    """Hooks that keep what layers are given and return, as BackPACK's do."""

    def keep(layer, args, output):
        layer.input0, layer.output = args[0], output

    for layer in net.modules():
        if not [*layer.children()]:
            layer.register_forward_hook(keep)
    return net


def test_hooks_on_layers_inside_are_named_and_regions_of_single_layers_work():
    plain = keep_inputs_and_outputs(network(lambda layer: layer))
    expected = gradients(plain, plain(X).sum())
    net = keep_inputs_and_outputs(network(lambda layer: layer))
    with pytest.raises(functx.RematError, match="single layers") as caught:
        functx.grad(lambda x: functx.remat(net)(x).sum())(X)
    assert "BackPACK" in str(caught.value)
    net = functx.apply_remat(keep_inputs_and_outputs(network(lambda layer: layer)), nn.Linear)
    assert_same(gradients(net, net(X).sum()), expected)
    assert net[0].output.shape == (3, 4)
