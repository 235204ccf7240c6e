"""Dicts are known by their keys: in what order they were written makes no difference."""

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same

import functx
from functx import _tree, per_sample

PARAMS = {"a": numbers(3), "b": numbers(3, start=2.0)}
X = {"u": numbers(3), "v": numbers(4, 3)}


def loss(p, x):
    return (p["a"] * x["u"]).sin().sum() + (p["b"] * x["v"]).cos().sum()


def turned(tree):
    return dict(reversed(tree.items()))


def test_spread_and_leaves():
    assert _tree.spread({"b": 1, "a": None}, {"a": [0, 0], "b": 0}) == [None, None, 1]
    spec = _tree.flatten({"a": 0, "b": [0, 0]})[1]
    assert _tree.leaves_as(spec, {"b": [2, 3], "a": 1}) == [1, 2, 3]
    for other in ({"a": 0}, {"a": 0, "c": [0, 0]}, {"a": [0], "b": [0, 0]}, {"a": 0, "b": [0]}):
        with pytest.raises(ValueError, match=r"\S"):
            _tree.leaves_as(spec, other)
    with pytest.raises(ValueError, match="prefix"):
        _tree.spread({"c": 0}, {"a": 0})


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": {"a": 100.0, "b": 0.1}},
        {"max_norm": {"x": 100.0, "y": 0.1}, "groups": {"a": "x", "b": "y"}},
    ],
    ids=["thresholds", "groups"],
)
def test_clipping(options):
    dims = (None, {"u": None, "v": 0})
    expected = per_sample.clipped_sum(loss, in_dims=dims, **options)(PARAMS, X)
    each = functx.vmap(functx.grad(loss), dims)(PARAMS, X)
    assert_same(expected["a"], each["a"].sum(0), eps=8)
    scale = (0.1 / each["b"].norm(dim=1)).clamp(max=1)
    assert_same(expected["b"], (each["b"] * scale[:, None]).sum(0), eps=8)
    for key in options:
        other = options | {key: turned(options[key])}
        assert_same(per_sample.clipped_sum(loss, in_dims=dims, **other)(PARAMS, X), expected)
    found = per_sample.clipped_sum(loss, in_dims=(None, turned(dims[1])), **options)
    assert_same(found(turned(PARAMS), turned(X)), turned(expected))


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_dimensions_of_vmap(chunk_size):
    f = functx.vmap(loss, in_dims=(None, {"v": 0, "u": None}), chunk_size=chunk_size)
    assert_same(f(PARAMS, X), torch.stack([loss(PARAMS, X | {"v": v}) for v in X["v"]]), eps=8)
    assert_same(f(turned(PARAMS), turned(X)), f(PARAMS, X))
    with pytest.raises(ValueError, match="in_dims"):
        functx.vmap(loss, in_dims=(None, {"v": 0}))(PARAMS, X)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_dimensions_that_vmap_gives(chunk_size):
    def f(x):
        return {"a": x.expand(3, 2), "b": [2 * x.expand(5, 2), x.sum()]}

    x = numbers(7, 2)
    expected = torch.func.vmap(f, out_dims={"a": 1, "b": 0}, chunk_size=chunk_size)(x)
    assert expected["a"].shape == (3, 7, 2)
    for out_dims in ({"a": 1, "b": 0}, {"b": 0, "a": 1}, {"b": [0, 0], "a": -2}):
        assert_same(functx.vmap(f, 0, out_dims, chunk_size=chunk_size)(x), expected)
    dims = ({"v": 0, "u": 0},)
    found = functx.vmap(lambda d: f(d["u"]) | {"c": d["v"]}, dims, {"c": 1, "b": 0, "a": 1})
    assert_same(found({"u": x, "v": x}), expected | {"c": x.mT})
    for bad in ({"a": 1}, {"a": 1, "b": 0, "c": 0}, {"a": 1, "b": [0, 0, 0]}):
        with pytest.raises(ValueError, match=r"out_dims .* don't fit"):
            functx.vmap(f, out_dims=bad)(x)


def test_a_carry():
    def body(carry, x):
        return {"b": carry["b"] + 1, "a": carry["a"] * x}, x

    start = {"a": torch.ones(2, dtype=DTYPE), "b": torch.zeros(2, dtype=DTYPE)}
    carry, _ = functx.remat_scan(body, start, numbers(3))
    assert list(carry) == ["a", "b"]
    assert_same(carry, {"a": start["a"] * numbers(3).prod(), "b": start["b"] + 3}, eps=4)


def test_a_state_where_examples_end_at_different_steps():
    def until(x):
        def body(state):
            return {"b": state["b"] + 1, "a": state["a"] * 2}

        start = {"a": x, "b": torch.zeros((), dtype=DTYPE)}
        return functx.remat_loop(body, start, lambda state: state["a"] < 8)

    found = functx.vmap(until)(torch.tensor([1.0, 3.0, 9.0], dtype=DTYPE))
    assert_same(found["b"], torch.tensor([3.0, 2.0, 0.0], dtype=DTYPE))
    assert_same(found["a"], torch.tensor([8.0, 12.0, 9.0], dtype=DTYPE))
