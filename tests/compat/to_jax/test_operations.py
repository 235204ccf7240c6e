"""Operations where torch's database of samples misses a case: kinks, NaN, padding, masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn import functional as F

import functx
from functx.compat import to_jax

from ..helpers import arrays, assert_close


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def sgn(x):
    z = torch.complex(x, x.flip(0) * 2)
    return torch.view_as_real(torch.cat([z, 0 * z]).sgn())


def grouped(causal):
    def attention(x):
        q, k = x.reshape(1, 4, 6, 2), x.flip(0)[:24].reshape(1, 2, 6, 2)
        return functional.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True)

    return attention


LABELS = torch.tensor([[0, 2, -1, 1], [-1, 0, 0, 0], [3, 1, 0, 2]])
PLACES = torch.tensor([[0, 1, 0, 3], [3, 3, 4, 0]])


def embed(**options):
    return lambda w: functional.embedding(PLACES, w, **options)


def bag(**options):
    return lambda w: functional.embedding_bag(PLACES, w, **options)


CASES = {
    "sgn of complex numbers": (sgn, (4,)),
    "grouped queries": (grouped(False), (48,)),
    "grouped queries, causal": (grouped(True), (48,)),
    # What follows the first -1 does not count.
    "multilabel": (lambda x: functional.multilabel_margin_loss(x, LABELS), (3, 4)),
    "multilabel, each": (
        lambda x: functional.multilabel_margin_loss(x, LABELS, reduction="none"),
        (3, 4),
    ),
    "multilabel, one": (lambda x: functional.multilabel_margin_loss(x, LABELS[0]), (4,)),
    "deviation of equals": (
        lambda x: torch.cat([(0 * x + 1).std(1), x[:, :1].std(1, False)]),
        (3, 4),
    ),
    "digamma": (lambda x: 1 / torch.digamma(torch.cat([x, torch.tensor([0.0, -0.0])])), (4,)),
    # torch defines derivatives of embeddings apart from their values.
    "padding": (embed(padding_idx=0), (6, 3)),
    "last is padding": (embed(padding_idx=-6), (6, 3)),
    "by frequency, padding": (embed(scale_grad_by_freq=True, padding_idx=3), (6, 3)),
    "bag": (bag(padding_idx=0, mode="mean"), (6, 3)),
    "max of a bag": (bag(mode="max"), (6, 3)),  # of equals, the first
    "padded max": (bag(padding_idx=3, mode="max"), (6, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_has_torch_s_value_and_gradient(name):
    f, shape = CASES[name]
    x = drawn(*shape)
    loss = lambda x: (f(x) + 1).square().sum()
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    array = jnp.asarray(x.numpy())
    np.testing.assert_allclose(to_jax(f)(array), f(x), rtol=1e-5, atol=1e-6)
    gradients = [jax.grad(to_jax(loss))]
    if "bag" not in name and "max" not in name:  # whose backward has no rule
        gradients.append(to_jax(functx.grad(loss)))
    for gradient in gradients:
        np.testing.assert_allclose(jax.jit(gradient)(array), expected, rtol=1e-4, atol=1e-5)


def test_a_product_of_segments_has_a_gradient_at_zero():
    lengths = torch.tensor([2, 0, 2])
    product = lambda x: torch.segment_reduce(x, "prod", lengths=lengths).sum()
    got = jax.grad(to_jax(product))(jnp.asarray([2.0, 0.0, 3.0, 5.0]))
    np.testing.assert_allclose(got, [0, 2, 5, 3])


def test_a_power_of_zero_has_torch_s_derivatives():
    x, y = torch.tensor([0.0, 0, 0, 2, 2, -2, -2]), torch.tensor([0.0, 1, 2, 0, 3, 3, 0])
    total = lambda x, y: (x**y).sum()
    # NaN in the exponent of a negative base does not reach the base.
    for argnums, size in ((0, 7), (1, 5), ((0, 1), 5)):
        expected = torch.func.grad(total, argnums)(x[:size], y[:size])
        arrays = jnp.asarray(x[:size].numpy()), jnp.asarray(y[:size].numpy())
        for f in (to_jax(total), jax.jit(to_jax(total))):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
                jax.grad(f, argnums)(*arrays),
                expected,
            )
    mixed = jax.grad(lambda a, b: jax.grad(to_jax(total))(a, b).sum(), 1)
    again = torch.func.grad(lambda a, b: torch.func.grad(total)(a, b).sum(), 1)
    np.testing.assert_allclose(mixed(jnp.asarray([2.0]), jnp.asarray([0.0])), again(x[3:4], y[3:4]))


def test_a_bag_by_frequency_is_as_documented():
    # Each row's gradient over how often it was read; torch's kernel takes another row's count.
    def loss(weight):
        return functional.embedding_bag(PLACES, weight, mode="sum", scale_grad_by_freq=True).sum()

    got = jax.grad(to_jax(loss))(jnp.ones((6, 1)))
    np.testing.assert_allclose(got[:, 0], [1, 1, 0, 1, 1, 0])


NAN, INF = float("nan"), float("inf")
AT = torch.tensor([-2.0, -0.4, 0.0, -0.0, 1.0, NAN, INF, 3.0], dtype=torch.float64)
FINITE = torch.tensor([-2.0, -0.4, 0.3, 0.1, 1.0, 2.5], dtype=torch.float64)
AT_KINKS = {
    "abs": lambda x: x.abs(),
    "abs of complex": lambda x: torch.complex(x.nan_to_num(), 0 * x.nan_to_num()).abs(),
    "l1_loss": lambda x: torch.nn.functional.l1_loss(x, x.detach(), reduction="none"),
    "norm of zeros": lambda x: torch.linalg.vector_norm(x.nan_to_num() * 0, ord=INF),
    "sqrt of abs": lambda x: x.abs().sqrt(),
    "sgn": lambda x: x.sgn() * x,
    "clamp": lambda x: x.clamp(0, 1),
    "clamp by a tensor": lambda x: torch.clamp(x, torch.zeros_like(x)),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "max": lambda x: x.max(),
    "max of equals": lambda x: x[2:4].max() * x[4:5].min(),
}
OF_TWO = {
    "remainder": torch.remainder,
    "remainder of a number": lambda x, y: torch.remainder(torch.full_like(y, 2.0), y) * x,
    "fmod": torch.fmod,
    "of itself": lambda x, y: torch.maximum(x, x) * y,
}


def gradients(f, *args):
    args = [a.clone().requires_grad_() for a in args]
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)
    out = f(*args)
    return torch.autograd.grad((out * weights[: out.numel()].reshape(out.shape)).sum(), args)


@pytest.mark.parametrize("name", [*AT_KINKS, *OF_TWO])
def test_at_kinks_and_at_nan_values_and_derivatives_are_torch_s(name):
    f, args = (
        (OF_TWO[name], (FINITE, FINITE.flip(0))) if name in OF_TWO else (AT_KINKS[name], (AT,))
    )
    with jax.enable_x64(True):
        out, pull = jax.vjp(to_jax(f), *(jnp.asarray(a.numpy()) for a in args))
        weights = jnp.arange(1.0, 9.0)[: out.size].reshape(out.shape)
        np.testing.assert_allclose(out, f(*args), rtol=1e-12)
        for ours, theirs in zip(pull(weights), gradients(f, *args)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)


TARGETS = torch.tensor([[1, 2, 2, 3], [3, 4, 1, 1], [2, 2, 2, 2]])
INPUTS, LENGTHS = (5, 4, 5), (4, 2, 2)


@pytest.fixture
def log_probs():
    torch.manual_seed(0)
    return torch.randn(5, 3, 5).log_softmax(-1)


CTC = {
    "mean": {},
    "none": {"reduction": "none"},
    "no targets": {"target_lengths": (0, 2, 2)},
    "impossible counts as nothing": {"input_lengths": (2, 4, 5), "zero_infinity": True},
    "one behind the other": {"targets": TARGETS.reshape(-1)[:8]},
}


def options(**case):
    return {"targets": TARGETS, "input_lengths": INPUTS, "target_lengths": LENGTHS, **case}


@pytest.mark.parametrize("case", CTC)
def test_ctc_has_torch_s_value_and_gradient(case, log_probs):
    f = lambda x: F.ctc_loss(x, **options(**CTC[case])).sum()
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
    f = lambda x: F.ctc_loss(x.log_softmax(-1), **options())
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

    loss = lambda x, samples: (f(x, samples)[0] ** 2).sum()
    assert_close(jax.jit(to_jax(f))(*arrays((x, samples))), f(x, samples), rtol=1e-6)
    expected = torch.func.grad(loss)(x, samples)
    assert_close(jax.jit(jax.grad(to_jax(loss)))(*arrays((x, samples))), expected, rtol=1e-6)
    assert_close(jax.jit(to_jax(functx.grad(loss)))(*arrays((x, samples))), expected, rtol=1e-6)
