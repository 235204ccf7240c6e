"""A region inside another one, that does something else in a replay of the outer one."""

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx import checkpoint_policies as policies

pytestmark = pytest.mark.usefixtures("no_hooks")

NOW = {}
X = numbers(3, 4)

READS = {
    "a number": (lambda x: (x * NOW["it"]).sin(), 2.0, 3.0),
    "a number of another type": (lambda x: x.sin() ** NOW["it"], 2, 2.0),
    "a flag": (lambda x: x.sin() if NOW["it"] else x.cos(), True, False),
    "one of two": (lambda x, y: (x, y)[NOW["it"]].sin() + (x * y), 0, 1),
    "a dtype": (lambda x: x.to(NOW["it"]).sin().double(), torch.float64, torch.float32),
    "in a region of its own": (
        functx.remat(lambda x: functx.remat(lambda x: x.sin() * NOW["it"])(x).cos()),
        2.0,
        3.0,
    ),
}


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
@pytest.mark.parametrize("reads", READS)
def test_what_it_reads_has_changed(reads, policy):
    f, before, after = READS[reads]
    inner = functx.remat(f, policy=policy)
    given = (lambda x: (x, x.exp())) if reads == "one of two" else lambda x: (x,)
    outer = functx.remat(lambda x: inner(*given(x.cos())).exp(), policy=policy)
    x = X.clone().requires_grad_()
    NOW["it"] = before
    y = outer(x)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    NOW["it"] = after
    with pytest.raises(functx.ReplayError, match="a region inside it"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    NOW["it"] = before
    assert_same(torch.autograd.grad(y.sum(), x)[0], expected)


def test_under_transforms():
    NOW["it"] = 2.0
    inner = functx.remat(READS["a number"][0])
    y, pull = functx.vjp(functx.vmap(functx.remat(lambda x: inner(x.cos()).exp())), X)
    expected = pull(y)
    NOW["it"] = 3.0
    with pytest.raises(functx.ReplayError, match="a region inside it"):
        pull(y)
    NOW["it"] = 2.0
    assert_same(pull(y), expected)


def test_a_nan_is_like_another():
    inner = functx.remat(lambda x: x.sin().nan_to_num(float("nan")))
    outer = functx.remat(lambda x: inner(x).cos())
    x = X.clone().requires_grad_()
    outer(x).sum().backward()
    assert_same(x.grad, -x.sin().sin() * x.cos(), eps=4)


def test_not_where_nobody_wants_it_checked():
    NOW["it"] = 2.0
    inner = functx.remat(READS["a number"][0], determinism_check="none")
    x = X.clone().requires_grad_()
    y = functx.remat(lambda x: inner(x.cos()).exp())(x)
    NOW["it"] = 3.0
    y.sum().backward()
    assert x.grad is not None
