"""`ctc_loss` and fractional pooling, whose operators in torch read values, and draws."""

import functools
import gc

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import functx
from functx.compat import to_jax

from .networks import arrays, assert_close

TARGETS = torch.tensor([[1, 2, 2, 3], [3, 4, 1, 1], [2, 2, 2, 2]])
INPUTS, LENGTHS = (5, 4, 5), (4, 2, 2)


@pytest.fixture
def log_probs():
    torch.manual_seed(0)
    return torch.randn(5, 3, 5).log_softmax(-1)


CASES = {
    "mean": {},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
    "no targets": {"target_lengths": (0, 2, 2)},
    "impossible counts as nothing": {"input_lengths": (2, 4, 5), "zero_infinity": True},
    "one behind the other": {"targets": TARGETS.reshape(-1)[:8]},
}


def options(**case):
    return {"targets": TARGETS, "input_lengths": INPUTS, "target_lengths": LENGTHS, **case}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, log_probs):
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
    for gradient in (jax.grad(to_jax(f)), to_jax(functx.grad(f))):
        np.testing.assert_allclose(gradient(arrays(log_probs)), expected, rtol=1e-4, atol=1e-6)
    assert expected.isnan().any() != zero_infinity


def test_a_program_keeps_nothing_of_its_trace(log_probs):
    """The second derivative can't be traced; the error that says so is kept, its frames aren't."""

    def traced():
        before = {id(x) for x in gc.get_objects()}
        h = to_jax(lambda x: F.ctc_loss(x, **options()))
        h(arrays(log_probs))
        gc.collect()
        states = torch.get_rng_state().shape
        found = [x for x in gc.get_objects() if type(x) is torch.Tensor and id(x) not in before]
        return h, [x for x in found if x.shape == states]

    _, states = traced()
    assert states == []


@pytest.mark.parametrize("targets", [TARGETS, TARGETS.reshape(-1)[:8]], ids=["rows", "one row"])
def test_lengths_may_be_traced(targets, log_probs):
    loss = functools.partial(F.ctc_loss, reduction="none")
    args = (log_probs, targets, torch.tensor(INPUTS), torch.tensor(LENGTHS))
    assert_close(jax.jit(to_jax(loss))(*arrays(args)), loss(*args), rtol=1e-5)


def test_under_transforms(log_probs):
    def f(x):
        return F.ctc_loss(x.log_softmax(-1), **options())

    rows = torch.stack([log_probs, 2 * log_probs])
    leaf = rows.clone().requires_grad_()  # torch.func.grad can't, in torch
    (expected,) = torch.autograd.grad(f(leaf[0]) + f(leaf[1]), leaf)
    assert_close(jax.jit(jax.vmap(jax.grad(to_jax(f))))(arrays(rows)), expected, rtol=1e-4)
    assert_close(to_jax(functx.vmap(functx.grad(f)))(arrays(rows)), expected, rtol=1e-4)
    assert_close(to_jax(functx.grad(functx.remat(f)))(arrays(log_probs)), expected[0], rtol=1e-4)


def test_the_operation_in_torch(log_probs):
    """Where a graph is run operation by operation, as `crosscheck` does to find a difference."""
    args = (log_probs, TARGETS, torch.tensor(INPUTS), torch.tensor(LENGTHS))
    expected = F.ctc_loss(*args, reduction="none")
    assert torch.equal(torch.ops.functx.ctc_loss(*args, 0, False), expected)
    leaf = log_probs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.ctc_loss(leaf, *args[1:], reduction="sum"), leaf)
    assert torch.equal(torch.ops.functx.ctc_loss_backward(torch.ones(3), *args, 0, False), gradient)


def test_one_example(log_probs):
    def f(x):
        return F.ctc_loss(x, TARGETS[0], (5,), (4,), reduction="none")

    assert_close(to_jax(f)(arrays(log_probs[:, 0])), f(log_probs[:, 0]), rtol=1e-5)


POOLS = {
    "2d": (F.fractional_max_pool2d, (2, 3), (4, 5), (2, 3, 9, 11)),
    "one window": (F.fractional_max_pool2d, 2, 1, (2, 3, 9, 11)),
    "3d": (F.fractional_max_pool3d, (2, 3, 2), (3, 2, 2), (2, 3, 7, 6, 5)),
}


@pytest.mark.parametrize("name", POOLS)
def test_fractional_pools(name):
    pool, kernel, size, shape = POOLS[name]
    torch.manual_seed(0)
    x, samples = torch.randn(shape), torch.rand(2, 3, len(shape) - 2)

    def f(x, samples):
        return pool(x, kernel, output_size=size, return_indices=True, _random_samples=samples)

    def loss(x, samples):
        return (f(x, samples)[0] ** 2).sum()

    assert_close(to_jax(f)(*arrays((x, samples))), f(x, samples), rtol=1e-6)
    expected = torch.func.grad(loss)(x, samples)
    assert_close(jax.jit(jax.grad(to_jax(loss)))(*arrays((x, samples))), expected, rtol=1e-6)
    assert_close(to_jax(functx.grad(loss))(*arrays((x, samples))), expected, rtol=1e-6)


def test_draws_have_torch_s_derivatives():
    """A normal number has none in its mean and deviation."""

    def f(mean, deviation):
        return torch.normal(mean, deviation).sum() + mean.sum()

    key, x = jax.random.key(0), torch.ones(3)
    got = jax.grad(to_jax(f, rng=True), (1, 2))(key, *arrays((x, x)))
    assert_close(got, (torch.ones(3), torch.zeros(3)), rtol=1e-6)
