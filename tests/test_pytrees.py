"""Containers that users register with torch are containers, however they do it."""

import collections
import dataclasses

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx import _tree, per_sample


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


def test_registered_later():
    for name in ("One", "Other"):
        cls = dataclasses.make_dataclass(name, ["x", "y"])
        torch.utils._pytree.register_dataclass(cls)
        leaves, spec = _tree.flatten([cls(1, (2, None))])
        assert leaves == [1, 2, None]
        assert _tree.unflatten(spec, [3, 4, 5]) == [cls(3, (4, 5))]


def test_transforms():
    batch = Batch(X, Y)
    expected = torch.func.grad(loss, 1)(W, batch)
    assert_same(functx.grad(loss, 1)(W, batch).x, expected.x)
    outputs, pullback = functx.vjp(lambda x: Batch(x.sin(), x.cos()), X)
    assert_same(pullback(Batch(X, Y.new_zeros(5, 3)))[0], X * X.cos())
    assert_same(outputs.x, X.sin())
    region = functx.remat(loss)
    found = functx.vmap(functx.grad(region), (None, Batch(0, 0)))(W, batch)
    assert_same(found, torch.func.vmap(torch.func.grad(loss), (None, 0))(W, batch))


@pytest.mark.parametrize("chunk_size", [None, 2, 1])
def test_examples(chunk_size):
    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(W, Batch(X, Y))
    f = per_sample.grads(loss, chunk_size=chunk_size)
    assert_same(f(W, Batch(X, Y)), expected, eps=8)
    assert_same(f(W, iter([Batch(X[:2], Y[:2]), Batch(X[2:], Y[2:])])), expected, eps=8)


@pytest.mark.parametrize(
    "batch",
    [Unknown(X, Y), collections.UserDict(x=X, y=Y)],
    ids=["dataclass", "mapping"],
)
def test_what_is_no_container_is_not_shared_by_mistake(batch):
    """Each example would see the whole batch."""
    f = per_sample.grads(lambda w, batch, y: (batch["x"] @ w - y).square().sum())
    with pytest.raises(ValueError, match=r"is no pytree: pass a dict"):
        f(W, batch, Y)
    shared = per_sample.grads(lambda w, batch, y: (w * y).sum(), in_dims=(None, None, 0))
    assert shared(W, batch, Y).shape == (5, 3, 2)


@dataclasses.dataclass
class OfOptree:
    x: torch.Tensor
    y: torch.Tensor


FORWARD = {
    "jvp": lambda f, one: functx.jvp(f, (one,), (one,)),
    "jacfwd": lambda f, one: functx.jacfwd(f)(one),
    "hessian": lambda f, one: functx.hessian(f)(one),
}
REVERSE = {
    "grad": lambda f, one: functx.grad(f)(one),
    "vjp": lambda f, one: functx.vjp(f, one),
    "jacrev": lambda f, one: functx.jacrev(f)(one),
    "linearize": lambda f, one: functx.linearize(f, one),
}


def product(one):
    return (one.x * one.y).sum()


@pytest.mark.parametrize("name", [*FORWARD, *REVERSE])
def test_a_class_that_is_no_pytree_is_named_with_what_makes_it_one(name):
    """As torch does, which sees no tensors in it."""
    x = numbers(3)
    with pytest.raises((ValueError, RuntimeError), match=r"_pytree\.register_dataclass\(Unknown\)"):
        {**FORWARD, **REVERSE}[name](product, Unknown(x, x))


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_takes_what_torch_takes(name):
    x = numbers(3)
    found = FORWARD[name](product, Batch(x, x.cos()))
    expected = getattr(torch.func, name)
    one = Batch(x, x.cos())
    wanted = expected(product, (one,), (one,)) if name == "jvp" else expected(product)(one)
    assert_same(_tree.leaves(found), _tree.leaves(wanted))
    optree = pytest.importorskip("optree")
    if not _tree.is_node(OfOptree(x, x)):
        optree.register_pytree_node(
            OfOptree, lambda o: ((o.x, o.y), None), lambda _, o: OfOptree(*o), namespace="torch"
        )
    functx.grad(product)(OfOptree(x, x))
    with pytest.raises(RuntimeError, match=r"_pytree\.register_dataclass\(OfOptree\)"):
        FORWARD[name](product, OfOptree(x, x))
    with pytest.raises(RuntimeError, match="convert it with"):
        functx.jvp(lambda x: x, (1.0,), (x,))
