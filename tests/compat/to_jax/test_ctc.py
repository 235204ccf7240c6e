"""`ctc_loss` and fractional pooling, whose operators in torch read values, and draws."""

import functools

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import functx
from functx.compat import to_jax

from ..helpers import arrays, assert_close

TARGETS = torch.tensor([[1, 2, 2, 3], [3, 4, 1, 1], [2, 2, 2, 2]])
INPUTS, LENGTHS = (5, 4, 5), (4, 2, 2)


@pytest.fixture
def log_probs():
    torch.manual_seed(0)
    return torch.randn(5, 3, 5).log_softmax(-1)


CASES = {
    "mean": {},
    "none": {"reduction": "none"},
    "no targets": {"target_lengths": (0, 2, 2)},
    "impossible counts as nothing": {"input_lengths": (2, 4, 5), "zero_infinity": True},
    "one behind the other": {"targets": TARGETS.reshape(-1)[:8]},
}


def options(**case):
    return {"targets": TARGETS, "input_lengths": INPUTS, "target_lengths": LENGTHS, **case}


@pytest.mark.parametrize("case", CASES)
def test_ctc_has_torch_s_value_and_gradient(case, log_probs):
    def f(x):
        return F.ctc_loss(x, **options(**CASES[case])).sum()

    x = log_probs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x), x)
    value, got = jax.jit(jax.value_and_grad(to_jax(f)))(arrays(log_probs))
    assert_close(value, f(log_probs), rtol=1e-5)
    assert_close(got, gradient, rtol=1e-4)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_what_is_impossible_has_no_derivative(zero_infinity, log_probs):
    def f(x):
        case = options(input_lengths=(2, 4, 5), zero_infinity=zero_infinity, reduction="none")
        return (F.ctc_loss(x, **case) * torch.tensor([2.0, 3.0, 4.0])).sum()

    x = log_probs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(x), x)
    assert expected.isnan().any() != zero_infinity
    for gradient in (jax.grad(to_jax(f)), to_jax(functx.grad(f))):
        found = jax.jit(gradient)(arrays(log_probs))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("targets", [TARGETS, TARGETS.reshape(-1)[:8]], ids=["rows", "one row"])
def test_the_lengths_of_ctc_may_be_traced(targets, log_probs):
    loss = functools.partial(F.ctc_loss, reduction="none")
    args = (log_probs, targets, torch.tensor(INPUTS), torch.tensor(LENGTHS))
    assert_close(jax.jit(to_jax(loss))(*arrays(args)), loss(*args), rtol=1e-5)


def test_ctc_under_transforms(log_probs):
    def f(x):
        return F.ctc_loss(x.log_softmax(-1), **options())

    rows = torch.stack([log_probs, 2 * log_probs])
    leaf = rows.clone().requires_grad_()  # torch.func.grad can't, in torch
    (expected,) = torch.autograd.grad(f(leaf[0]) + f(leaf[1]), leaf)
    assert_close(jax.jit(jax.vmap(jax.grad(to_jax(f))))(arrays(rows)), expected, rtol=1e-4)
    inside = functx.vmap(functx.grad(functx.remat(f)))
    assert_close(jax.jit(to_jax(inside))(arrays(rows)), expected, rtol=1e-4)


POOLS = {
    "2d": (F.fractional_max_pool2d, (2, 3), (4, 5), (2, 3, 9, 11)),
    "3d": (F.fractional_max_pool3d, (2, 3, 2), (3, 2, 2), (2, 3, 7, 6, 5)),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_fractional_pool_has_torch_s_value_and_gradient(name):
    pool, kernel, size, shape = POOLS[name]
    torch.manual_seed(0)
    x, samples = torch.randn(shape), torch.rand(2, 3, len(shape) - 2)

    def f(x, samples):
        return pool(x, kernel, output_size=size, return_indices=True, _random_samples=samples)

    def loss(x, samples):
        return (f(x, samples)[0] ** 2).sum()

    assert_close(jax.jit(to_jax(f))(*arrays((x, samples))), f(x, samples), rtol=1e-6)
    expected = torch.func.grad(loss)(x, samples)
    assert_close(jax.jit(jax.grad(to_jax(loss)))(*arrays((x, samples))), expected, rtol=1e-6)
    assert_close(jax.jit(to_jax(functx.grad(loss)))(*arrays((x, samples))), expected, rtol=1e-6)
