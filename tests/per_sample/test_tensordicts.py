"""Parameters and examples in a TensorDict, which is a pytree with a batch size of its own.

The kind: containers that check the sizes of their tensors. The parameters have no batch size and
the examples have one, which a loss of one example must not see, whatever the chunks are and even if
all tensors agree in more dimensions than the batch. Tensorclasses, nested ones and modules that
take a TensorDict are of the kind.
"""

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx import per_sample

tensordict = pytest.importorskip("tensordict")
TensorDict = tensordict.TensorDict
# The tensors of an example agree in their first dimension, and it has the size of the batch.
W, B, X, Y = numbers(3, 3), numbers(3, start=2.0), numbers(3, 3), numbers(3, 3, start=1.0)


@tensordict.tensorclass
class Example:
    x: torch.Tensor
    y: torch.Tensor


PARAMS = {
    "flat": TensorDict({"w": W, "b": B}, []),
    "nested": TensorDict({"layer": {"w": W, "b": B}}, []),
    "in a list": [TensorDict({"w": W, "b": B}, [])],
}
BATCHES = {
    "dict": TensorDict({"x": X, "y": Y}, [3]),
    "class": Example(x=X, y=Y, batch_size=[3]),
    "in a dict": {"of": TensorDict({"x": X, "y": Y}, [3])},
}


def leaves(params):
    if isinstance(params, list):
        (params,) = params
    params = params.get("layer", params)
    return [params["w"], params["b"]]


def loss(params, batch):
    example = batch["of"] if isinstance(batch, dict) else batch
    assert example.batch_size == torch.Size([])
    w, b = leaves(params)
    x, y = (example.x, example.y) if type(example) is Example else (example["x"], example["y"])
    return (w @ x + b - y).square().sum().sin()


def of_tensors(w, b, x, y):
    return (w @ x + b - y).square().sum().sin()


EACH = torch.func.vmap(torch.func.grad(of_tensors, (0, 1)), (None, None, 0, 0))(W, B, X, Y)
ROWS = torch.cat([g.flatten(1) for g in EACH], 1)


def same(actual, expected):
    assert_same([*actual], [*expected], eps=64)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"chunk_size": 1}])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_tensordict_is_mapped_as_vmap_maps_it(params, batch, options):
    found = per_sample.grads(loss, **options)(params, batch)
    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, batch)
    assert type(found) is type(params)
    same(leaves(found), leaves(expected))
    if type(params) is TensorDict:
        assert found.batch_size == expected.batch_size == torch.Size([3])
    same([per_sample.norms(loss, **options)(params, batch)], [ROWS.norm(dim=1)])
    total = per_sample.clipped_sum(loss, max_norm=1e9, groups="all", **options)(params, batch)
    same(leaves(total), [g.sum(0) for g in EACH])
    same([per_sample.gram(loss, **options)(params, batch)], [ROWS @ ROWS.T])
    same(leaves(per_sample.jacobian(loss, **options)(params, batch)), EACH)
    mean = per_sample.map_reduce(functx.grad(loss), "mean", in_dims=(None, 0), **options)
    same(leaves(mean(params, batch)), [g.mean(0) for g in EACH])


def test_padding_and_iterators_of_tensordicts():
    params, batch, f = PARAMS["flat"], BATCHES["dict"], per_sample.grads(loss)
    found = f(params, batch, is_padding_example=torch.tensor([False, True, False]))
    same(leaves(found), [g * torch.tensor([1.0, 0, 1]).view(3, *[1] * (g.ndim - 1)) for g in EACH])
    same(leaves(f(params, iter([(batch,), (batch,)]))), [torch.cat([g, g]) for g in EACH])
    nothing = f(params, batch, is_padding_example=torch.ones(3, dtype=torch.bool))
    same(leaves(nothing), [g * 0 for g in EACH])
    same([per_sample.gram(loss)(params, iter([(batch,)]))], [ROWS @ ROWS.T])


def test_what_a_function_returns_in_a_tensordict_has_the_batch_size_of_vmap():
    def f(params, example):
        return loss(params, example), example.clone().set("square", example["x"].square())

    batch = BATCHES["dict"]
    for options in ({}, {"chunk_size": 1}):
        _, aux = per_sample.grads(f, has_aux=True, **options)(PARAMS["flat"], batch)
        assert type(aux) is TensorDict
        assert aux.batch_size == torch.Size([3])
        same([aux["square"], aux["y"]], [X.square(), Y])


def test_a_module_is_given_a_tensordict_of_one_example():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, example):
            assert example.batch_size == torch.Size([1])
            return example.set("out", self.layer(example["x"]))

    model, batch = Model(), BATCHES["dict"].clone()
    pair = model, lambda out: (out["out"] - out["y"]).square().sum()
    found = per_sample.grads(pair, chunk_size=2)(batch)
    w, b = (p.detach() for p in model.layer.parameters())
    each = torch.func.grad(lambda w, b, x, y: (w @ x + b - y).square().sum(), (0, 1))
    expected = torch.func.vmap(each, (None, None, 0, 0))(w, b, X, Y)
    same([found["layer.weight"], found["layer.bias"]], expected)
    assert [*batch.keys()] == ["x", "y"]
