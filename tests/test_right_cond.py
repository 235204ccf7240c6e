"""`torch.cond` in a region is as an ``if`` there, under transforms that torch's own is not for."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same, count
from right import X, check
from torch.nn import functional

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

W = numbers(4, start=1.0)


def by_an_if(pred, yes, no, operands):
    return yes(*operands) if pred else no(*operands)


def by_where(pred, yes, no, operands):
    pairs = zip(yes(*operands)["out"], no(*operands)["out"])
    return {"out": [torch.where(pred, a, b) for a, b in pairs]}


def body(cond, x, w):
    """Branches that close over a tensor, draw, and return a tree."""

    def yes(x, y):
        return {"out": [functional.dropout(x * w, 0.5).exp(), y * 2]}

    def no(x, y):
        return {"out": [(x - w).cos() * y, x]}

    y = x.sin()
    first, second = cond(y.sum() > 0, yes, no, (x, y))["out"]
    return first * w + second


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("nested", [True, False])
def test_every_way(sign, nested):
    def build(remat):
        f = remat(lambda x, w: body(by_an_if if remat is identity else torch.cond, x, w))
        f = remat(f) if nested else f
        w = W.clone().requires_grad_()
        return lambda x: f(x * sign, w), [w]

    check(build, ways=["backward", "grad", "jvp"])


def test_where_examples_choose():
    def program(remat, cond):
        f = remat(lambda x, w: body(cond, x, w).sum())
        batched = functx.vmap(functx.grad(f, (0, 1)), (0, None), randomness="different")
        torch.manual_seed(3)
        return batched(numbers(5, 4, start=-1.0), W)

    for _ in range(6):
        assert_same(program(functx.remat, torch.cond), program(identity, by_where))


def test_one_branch_runs():
    def gradient(cond):
        return functx.grad(lambda x: functx.remat(body)(cond, x, W).sum())

    assert count(gradient(torch.cond), X) == count(gradient(by_an_if), X)


def test_another_branch_in_the_replay():
    flag = torch.ones(())
    x = X.clone().requires_grad_()
    out = functx.remat(lambda x: torch.cond(flag * 1 > 0, torch.sin, torch.cos, (x,)).exp())(x)
    with torch.no_grad():
        flag.zero_()
    with pytest.raises(RuntimeError):
        out.sum().backward()
