"""Parameters and examples in classes that are registered as pytrees.

The kind: a registered class may take nothing but tensors, of shapes that fit each other, and its
constructor may check that. `per_sample` takes arguments apart and puts results together in chunks,
groups and prefixes; on the way it never makes such a class of numbers, labels, None or of rows of a
chunk. Where ``vmap(grad)`` works of a dict, these work, and the results are of the user's class.
"""

import dataclasses

import optree
import pytest
import torch
from cases import numbers
from references import assert_same
from torch.utils import _pytree as pytree

import functx
from functx import per_sample

W, B, X, Y = numbers(4, 3), numbers(4, start=2.0), numbers(5, 3), numbers(5, 4, start=1.0)


def check(weight, bias):
    assert isinstance(weight, torch.Tensor)
    assert isinstance(bias, torch.Tensor)
    assert weight.shape[:-1] == bias.shape


@dataclasses.dataclass
class Layer:
    weight: torch.Tensor
    bias: torch.Tensor

    def __post_init__(self):
        check(self.weight, self.bias)


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self):
        assert isinstance(self.x, torch.Tensor)
        assert isinstance(self.y, torch.Tensor)
        assert self.x.shape[:-1] == self.y.shape[:-1]


class Node:
    """Registered with a context that has no hash."""

    def __init__(self, weight, bias):
        check(weight, bias)
        self.weight, self.bias = weight, bias


class OfOptree(Node):
    """Known to optree alone."""


pytree.register_dataclass(Layer)
pytree.register_dataclass(Example)
pytree.register_pytree_node(Node, lambda n: ([n.weight, n.bias], {"a": [1]}), lambda c, _: Node(*c))
optree.register_pytree_node(
    OfOptree, lambda n: ((n.weight, n.bias), None), lambda _, c: OfOptree(*c), namespace="torch"
)

PARAMS = {
    "dataclass": Layer(W, B),
    "node": Node(W, B),
    "of optree": OfOptree(W, B),
    "in a dict": {"layer": Layer(W, B)},
}


def loss(params, example):
    layer = params["layer"] if isinstance(params, dict) else params
    return (layer.weight @ example.x + layer.bias - example.y).square().sum().sin()


def with_aux(params, example):
    return loss(params, example), {"layer": params, "example": example}


def flat(params):
    layer = params["layer"] if isinstance(params, dict) else params
    return [layer.weight, layer.bias]


def of_tensors(weight, bias, x, y):
    return (weight @ x + bias - y).square().sum().sin()


EACH = torch.func.vmap(torch.func.grad(of_tensors, (0, 1)), (None, None, 0, 0))(W, B, X, Y)
ROWS = torch.cat([g.flatten(1) for g in EACH], 1)
SUMS = [g.sum(0) for g in EACH]


def same(actual, expected):
    assert_same([*actual], [*expected], eps=64)


def grads(params, batch, **options):
    found = per_sample.grads(loss, **options)(params, batch)
    assert type(found) is type(params)
    same(flat(found), EACH)


def grads_and_more(params, batch, **options):
    options |= {"has_aux": True, "return_values": True, "return_norms": True}
    found, extras = per_sample.grads(with_aux, **options)(params, batch)
    same(flat(found), EACH)
    same([extras.norms], [ROWS.norm(dim=1)])
    assert type(extras.aux["example"]) is Example
    assert type(extras.aux["layer"]) is type(params)
    same([extras.aux["example"].x, flat(extras.aux["layer"])[0]], [X, W.expand(5, 4, 3)])


def norms(params, batch, **options):
    same([per_sample.norms(loss, **options)(params, batch)], [ROWS.norm(dim=1)])
    by_label = per_sample.norms(loss, groups="all", **options)(params, batch)
    same([by_label["all"]], [ROWS.norm(dim=1)])


def clipped_sum(params, batch, **options):
    found = per_sample.clipped_sum(loss, max_norm=1e9, **options)(params, batch)
    assert type(found) is type(params)
    same(flat(found), SUMS)
    options |= {"groups": "all", "return_norms": True, "return_values": True}
    found, _ = per_sample.clipped_sum(loss, max_norm=1e9, **options)(params, batch)
    same(flat(found), SUMS)


def gram(params, batch, **options):
    same([per_sample.gram(loss, **options)(params, batch)], [ROWS @ ROWS.T])
    found = per_sample.gram(loss, **options)(params, batch, others=Example(X[:2], Y[:2]))
    same([found], [ROWS @ ROWS[:2].T])


def jacobian(params, batch, **options):
    for mode in ("reverse", "forward"):
        found = per_sample.jacobian(loss, mode=mode, **options)(params, batch)
        assert type(found) is type(params)
        same(flat(found), EACH)
        found, _ = per_sample.jacobian(with_aux, mode=mode, has_aux=True, **options)(params, batch)
        same(flat(found), EACH)


def map_reduce(params, batch, **options):
    f, options = functx.grad(loss), {"in_dims": (None, 0), **options}
    same(flat(per_sample.map_reduce(f, **options)(params, batch)), SUMS)
    found = per_sample.map_reduce(f, "mean", **options)(params, batch)
    assert type(found) is type(params)
    same(flat(found), [g.mean(0) for g in EACH])
    added = per_sample.map_reduce(f, lambda rows: [g.sum(0) for g in flat(rows)], **options)
    same(added(params, batch), SUMS)


EVERY = grads, grads_and_more, norms, clipped_sum, gram, jacobian, map_reduce


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"chunk_size": 1}])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_class_of_the_users_is_made_of_tensors_alone(params, options):
    for function in EVERY:
        function(params, Example(X, Y), **options)


@pytest.mark.parametrize("function", EVERY)
def test_a_class_is_made_of_tensors_alone_while_memory_is_measured(function):
    function(PARAMS["dataclass"], Example(X, Y), budget=1.0)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_padding_iterators_and_mapped_parameters_are_of_the_class_too(params):
    f, batch, padding = per_sample.grads(loss), Example(X, Y), torch.arange(5) == 4
    found = f(params, batch, is_padding_example=padding)
    same(flat(found), [torch.cat([g[:4], g[4:] * 0]) for g in EACH])
    nothing = f(params, batch, is_padding_example=torch.ones(5, dtype=torch.bool))
    same(flat(nothing), [g * 0 for g in EACH])
    same(flat(f(params, iter([batch, batch]))), [torch.cat([g, g]) for g in EACH])
    leaves = [one.expand(5, *one.shape) for one in (W, B)]
    mapped = type(params)(*leaves) if not isinstance(params, dict) else {"layer": Layer(*leaves)}
    same(flat(per_sample.grads(loss, in_dims=0)(mapped, batch)), EACH)


@pytest.mark.parametrize("has_aux", [False, True])
def test_compiled_chunks_are_of_the_class_too(has_aux):
    f = per_sample.grads(
        with_aux if has_aux else loss, has_aux=has_aux, compile={"backend": "eager"}
    )
    found = f(Layer(W, B), Example(X, Y))
    if has_aux:
        found, aux = found
        same([aux["example"].y], [Y])
    assert type(found) is Layer
    same(flat(found), EACH)


def test_thresholds_and_groups_below_and_above_a_class():
    both = {"one": Layer(W, B), "other": [Layer(W, B), W.sum()]}

    def of_both(params, example):
        return loss(params["one"], example) + loss(params["other"][0], example) * params["other"][1]

    plain = torch.func.vmap(
        torch.func.grad(
            lambda w, b, w2, b2, s, x, y: of_tensors(w, b, x, y) + of_tensors(w2, b2, x, y) * s,
            (0, 1, 2, 3, 4),
        ),
        (*[None] * 5, 0, 0),
    )(W, B, W, B, W.sum(), X, Y)
    parts = plain[:2], plain[2:]
    norms = [torch.cat([g.reshape(5, -1) for g in part], 1).norm(dim=1) for part in parts]
    f = per_sample.norms(of_both, groups={"other": "b", "one": "a"})
    found = f(both, Example(X, Y))
    same([found["a"], found["b"]], norms)
    limits = {"other": 0.5, "one": 0.25}  # in another order than the parameters
    total, found = per_sample.clipped_sum(of_both, max_norm=limits, return_norms=True)(
        both, Example(X, Y)
    )
    same([found.norms["one"], found.norms["other"]], norms)
    scales = [(limit / norm).clamp(max=1) for limit, norm in zip((0.25, 0.5), norms)]
    same(flat(total["one"]), [torch.tensordot(scales[0], g, 1) for g in plain[:2]])
    same([total["other"][1]], [torch.tensordot(scales[1], plain[4], 1)])
