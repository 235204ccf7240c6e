"""Registered classes are containers; thresholds in dicts are known by their keys."""

import collections
import dataclasses

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx import per_sample
from functx._core import tree as _tree


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


torch.utils._pytree.register_dataclass(Batch)


@dataclasses.dataclass
class Unknown:
    x: torch.Tensor
    y: torch.Tensor


W, X, Y = numbers(3, 2), numbers(5, 3), numbers(5, 2)


def loss(w, batch):
    return (batch.x @ w - batch.y).square().sum()


def test_transforms_see_the_tensors_in_a_registered_class():
    batch = Batch(X, Y)
    expected = torch.func.grad(loss, 1)(W, batch)
    assert_same(functx.grad(loss, 1)(W, batch).x, expected.x)
    outputs, pullback = functx.vjp(lambda x: Batch(x.sin(), x.cos()), X)
    assert_same(pullback(Batch(X, Y.new_zeros(5, 3)))[0], X * X.cos())
    assert_same(outputs.x, X.sin())
    found = functx.vmap(functx.grad(functx.remat(loss)), (None, Batch(0, 0)))(W, batch)
    assert_same(found, torch.func.vmap(torch.func.grad(loss), (None, 0))(W, batch))


@pytest.mark.parametrize("chunk_size", [None, 2, 1])
def test_per_sample_maps_the_tensors_in_one(chunk_size):
    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(W, Batch(X, Y))
    f = per_sample.grads(loss, chunk_size=chunk_size)
    assert_same(f(W, Batch(X, Y)), expected, eps=8)
    assert_same(f(W, iter([Batch(X[:2], Y[:2]), Batch(X[2:], Y[2:])])), expected, eps=8)


@pytest.mark.parametrize(
    "batch", [Unknown(X, Y), collections.UserDict(x=X, y=Y)], ids=["dataclass", "mapping"]
)
def test_what_is_no_container_is_not_shared_by_mistake(batch):
    f = per_sample.grads(lambda w, batch, y: (batch["x"] @ w - y).square().sum())
    with pytest.raises(ValueError, match=r"is not a pytree. Pass a dict"):
        f(W, batch, Y)
    shared = per_sample.grads(lambda w, batch, y: (w * y).sum(), in_dims=(None, None, 0))
    assert shared(W, batch, Y).shape == (5, 3, 2)


def product(one):
    return (one.x * one.y).sum()


FORWARD = {
    "jvp": lambda library, one: library.jvp(product, (one,), (one,)),
    "jacfwd": lambda library, one: library.jacfwd(product)(one),
    "hessian": lambda library, one: library.hessian(product)(one),
}
REVERSE = {
    "grad": lambda library, one: library.grad(product)(one),
    "vjp": lambda library, one: library.vjp(product, one),
    "jacrev": lambda library, one: library.jacrev(product)(one),
    "linearize": lambda library, one: library.linearize(product, one),
}


@pytest.mark.parametrize("run", {**FORWARD, **REVERSE}.values(), ids=[*FORWARD, *REVERSE])
def test_a_class_that_is_no_pytree_is_named_with_what_makes_it_one(run):
    """As torch does, which sees no tensors in it."""
    with pytest.raises((ValueError, RuntimeError), match=r"_pytree\.register_dataclass\(Unknown\)"):
        run(functx, Unknown(X, X))


@pytest.mark.parametrize("run", FORWARD.values(), ids=FORWARD)
def test_forward_mode_takes_what_torch_takes(run):
    one = Batch(X[0], X[1])
    assert_same(*(_tree.leaves(run(library, one)) for library in (functx, torch.func)))
    with pytest.raises(RuntimeError, match="convert it with"):
        functx.jvp(lambda x: x, (1.0,), (X,))


def test_in_dims_and_thresholds_go_by_key():
    params = {"a": numbers(3), "b": numbers(3, start=2.0)}
    batch, dims = {"u": numbers(3), "v": numbers(4, 3)}, (None, {"u": None, "v": 0})
    fit = lambda p, x: (p["a"] * x["u"]).sin().sum() + (p["b"] * x["v"]).cos().sum()
    turned = lambda tree: dict(reversed(tree.items()))
    each, limits = functx.vmap(functx.grad(fit), dims)(params, batch), {"a": 100.0, "b": 0.1}
    scale = (0.1 / each["b"].norm(dim=1)).clamp(max=1)
    expected = {"a": each["a"].sum(0), "b": (each["b"] * scale[:, None]).sum(0)}
    for limit, groups in ((turned(limits), {}), (limits, {"groups": {"b": "b", "a": "a"}})):
        f = per_sample.clipped_sum(fit, in_dims=dims, max_norm=limit, **groups)
        assert_same(f(params, batch), expected, eps=8)
        f = per_sample.clipped_sum(fit, in_dims=(None, turned(dims[1])), max_norm=limit, **groups)
        assert_same(f(turned(params), turned(batch)), turned(expected), eps=8)


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian", "vmap", "remat", "jit"])
def test_a_container_that_holds_itself_is_refused_in_words(name):
    """As torch.func does, and torch.utils.checkpoint, but these do not say what is wrong."""
    items = [1]
    items.append(items)
    options = {"in_dims": (0, None)} if name == "vmap" else {}
    f = getattr(functx, name)(lambda x, _: x.sin().sum(), **options)
    with pytest.raises(RecursionError, match="contains itself"):
        f(numbers(3).requires_grad_(name == "remat"), items)


def test_the_recursion_of_a_user_s_function_is_its_own():
    def endless(x):
        return endless(x)

    for transformed in (functx.grad(endless), functx.vmap(endless), functx.remat(endless)):
        with pytest.raises(RecursionError) as raised:
            transformed(numbers(3).requires_grad_())
        assert "contains itself" not in str(raised.value)
