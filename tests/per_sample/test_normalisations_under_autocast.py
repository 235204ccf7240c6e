"""Normalisations of mixed dtypes, under every transform that maps examples or cotangents.

The kind: on a CPU, autocast gives a normalisation an input in bfloat16 and a weight in float32.
torch's kernels take both, and its formulas for ``vmap`` do not. Which formula is met depends on the
layer, on grad mode, on the order of the transforms, on regions, and on where autocast is entered.
The reference is a loop over the examples in plain autograd. bfloat16 has 8 bits.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import functx
from functx import per_sample

BFLOAT16 = {"rtol": 0.05, "atol": 0.06}
NORMS = {
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "layer_norm": lambda: nn.LayerNorm([4, 4]),
    "instance_norm": lambda: nn.InstanceNorm1d(4, affine=True),
    "batch_norm in eval": lambda: nn.BatchNorm1d(4).eval(),
}


def network(norm, region=False):
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 4, 3), NORMS[norm](), nn.Flatten(1), nn.Linear(16, 3)
    net = nn.Sequential(*layers)
    for parameter in net[1].parameters():
        parameter.data += torch.randn_like(parameter) / 4
    return functx.apply_remat(net, ["0", "1"]) if region else net


torch.manual_seed(1)
X, Y = torch.randn(3, 2, 6), torch.tensor([0, 1, 2])
cast = lambda: torch.autocast("cpu", torch.bfloat16)


def loss_of(net):
    call = lambda p, x: functx.functional_call(net, p, (x[None],))
    return lambda p, x, y: F.cross_entropy(call(p, x), y[None])


def slow(net):
    """The gradients of each example, stacked, from plain autograd."""
    params = {name: p for name, p in net.named_parameters() if p.requires_grad}
    rows = []
    for x, y in zip(X, Y):
        with cast():
            loss = F.cross_entropy(net(x[None]), y[None])
        rows.append(torch.autograd.grad(loss, [*params.values()]))
    return dict(zip(params, map(torch.stack, zip(*rows))))


def check(found, net):
    expected = slow(net)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[name], **BFLOAT16)


@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_all_of_per_sample_has_the_gradients_of_a_loop(norm, region):
    net = network(norm, region)
    flat = torch.cat([g.flatten(1) for g in slow(network(norm)).values()], 1)
    pair = (net, F.cross_entropy)
    for size in (None, 2, 1):
        f = lambda name, size=size, **options: getattr(per_sample, name)(
            pair, chunk_size=size, **options
        )
        with cast():
            check(f("grads")(X, Y), network(norm))
            torch.testing.assert_close(f("norms")(X, Y), flat.norm(dim=1), **BFLOAT16)
            total = torch.cat([g.flatten() for g in f("clipped_sum", max_norm=1e9)(X, Y).values()])
            torch.testing.assert_close(total, flat.sum(0), **BFLOAT16)
            kernel = f("gram")(X, Y)
            torch.testing.assert_close(kernel, flat @ flat.T, rtol=0.05, atol=0.1)
            check(f("jacobian")(X, Y), network(norm))
            assert f("jacobian", mode="forward")(X, Y)["1.weight"].shape == (
                3,
                *net[1].weight.shape,
            )


STACKS = {
    "vmap of grad": lambda f: functx.vmap(functx.grad(f), (None, 0, 0)),
    "vmap of jacrev": lambda f: functx.vmap(functx.jacrev(f), (None, 0, 0)),
    "jacrev of vmap": lambda f: functx.jacrev(functx.vmap(f, (None, 0, 0))),
    "vmap of vjp": lambda f: functx.vmap(
        lambda p, x, y: functx.vjp(lambda p: f(p, x, y), p)[1](torch.ones(()))[0], (None, 0, 0)
    ),
    "vmap of grad, with autocast inside": lambda f: functx.vmap(
        functx.grad(lambda *args: cast()(f)(*args)), (None, 0, 0)
    ),
}


@pytest.mark.parametrize(("norm", "name"), [*itertools.product(NORMS, STACKS)])
def test_gradients_are_those_of_a_loop_with_and_without_grad_mode(norm, name):
    net = network(norm)
    params = {name: p.detach() for name, p in net.named_parameters()}
    for recording in (False, True):
        outside = torch.autocast("cpu", torch.bfloat16, enabled="inside" not in name)
        with torch.set_grad_enabled(recording), outside:
            found = STACKS[name](loss_of(net))(params, X, Y)
        check(found, net)


def test_a_model_of_two_dtypes_without_autocast():
    net = network("group_norm")
    net[0].bfloat16()
    net[3].bfloat16()
    x = X.bfloat16()
    found = per_sample.grads((net, F.cross_entropy))(x, Y)
    alone = per_sample.grads((net, F.cross_entropy), chunk_size=1)(x, Y)
    for name, gradient in found.items():
        assert gradient.dtype == net.get_parameter(name).dtype
        torch.testing.assert_close(gradient, alone[name], **BFLOAT16)


def test_what_a_layer_returns_has_the_dtype_that_it_has_without_vmap():
    weight = torch.ones(4)
    f = lambda x: F.group_norm(x[None], 2, weight).sum()
    for chunk_size in (None, 1):
        grads = per_sample.grads(lambda w, x: f(w * x), chunk_size=chunk_size, return_values=True)
        _, extras = grads(torch.ones(4, 5).bfloat16(), torch.randn(3, 4, 5).bfloat16())
        assert extras.values.dtype == torch.bfloat16


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm"])
def test_keyword_arguments_and_the_functions_of_torch_are_known_too(norm):
    mean, var, weight = torch.zeros(4), torch.ones(4), torch.full((4,), 2.0)
    calls = {
        "layer_norm": [
            lambda x: F.layer_norm(input=x, normalized_shape=(4,), weight=weight),
            lambda x: torch.layer_norm(x, (4,), weight, None, 1e-5, False),
        ],
        "batch_norm": [
            lambda x: F.batch_norm(x, running_mean=mean, running_var=var, weight=weight),
            lambda x: torch.batch_norm(x, weight, None, mean, var, False, 0.1, 1e-5, False),
        ],
    }
    x = torch.randn(3, 2, 4).bfloat16()
    for f in calls[norm]:
        with torch.no_grad():
            found = functx.vmap(functx.grad(lambda x, f=f: f(x).float().square().sum()))(x)
        leaf = x.clone().requires_grad_()
        sum(f(row).float().square().sum() for row in leaf).backward()
        torch.testing.assert_close(found, leaf.grad, **BFLOAT16)
