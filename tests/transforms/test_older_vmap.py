"""torch's older vmap: ``is_grads_batched``, ``vectorize=True``; with captures, nesting, dropout."""

import pytest
import torch
from cases import DTYPE, identity, numbers
from references import assert_same
from torch.autograd.functional import hessian, jacobian
from torch.nn.functional import dropout

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(4)
EYE = torch.eye(4, dtype=DTYPE)


def rows(f, x):
    return torch.autograd.grad(f(x) * x, x, EYE, is_grads_batched=True, create_graph=True)[0]


def second(f, x, w):
    return torch.autograd.grad(rows(f, x).square().sum(), (x, w))


def batched_second(f, x, w):
    (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient, (x, w), EYE, is_grads_batched=True)


def batched_twice(f, x, w):
    first = rows(f, x)
    return torch.autograd.grad(first, (x, w), EYE[:, None] * EYE, is_grads_batched=True)


def of_jacobian(f, x, w):
    j = jacobian(f, x, vectorize=True, create_graph=True)
    return j, torch.autograd.grad(j.square().sum(), (x, w))


def hessians(f, x, w):
    return hessian(lambda x: f(x).sin().sum(), x, vectorize=True)


WAYS = [second, batched_second, batched_twice, of_jacobian, hessians]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("body", ["plain", "random", "nested"])
def test_it_runs_regions_as_it_runs_functions(way, body):
    def program(remat):
        x, w = X.clone().requires_grad_(), numbers(4, start=1.0).requires_grad_()

        def f(x):
            y = (x * w).sin().exp()
            return dropout(y, 0.5) if body == "random" else y

        region = remat(f)
        if body == "nested":
            region = remat(lambda x, inner=region: inner(x.cos()) * x)
        torch.manual_seed(4)
        return way(region, x, w)

    assert_same(program(functx.remat), program(identity), eps=128)
