"""Operations where torch's database of samples misses a case: kinks, NaN, padding, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import functx
from functx._core.errors import LoweringError
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
        return F.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True)

    return attention


def by_group(x):
    """Six rows by the matrices of four groups, one of them empty."""
    ends = torch.tensor([2, 5, 5, 6], dtype=torch.int32)
    return F.grouped_mm(x[0, :6].sin(), x.transpose(1, 2), offs=ends)


LABELS = torch.tensor([[0, 2, -1, 1], [-1, 0, 0, 0], [3, 1, 0, 2]])
COUNTS, WEIGHTS = torch.tensor([1, 2, 1, 3]), torch.tensor([0.1, 0.5, 0.2, 0.4])
PLACES = torch.tensor([[0, 1, 0, 3], [3, 3, 4, 0]])


def embed(**options):
    return lambda w: F.embedding(PLACES, w, **options)


def bag(**options):
    return lambda w: F.embedding_bag(PLACES, w, **options)


def fractional(pool, *size):
    samples = torch.rand(2, 3, len(size[0]), generator=torch.Generator().manual_seed(2))

    def pooled(x):
        y, places = pool(x, *size, return_indices=True, _random_samples=samples)
        return torch.stack([y, places * y])

    return pooled


ALL = slice(None)
MASK, BLOCK = torch.tensor([True, False, True]), torch.tensor([[1, 0, 1], [0, 1, 1]]).bool()


def assigned(*at, shape):
    """Values that are computed, written where masks are true."""

    def f(x):
        y = x * 1
        y[at] = x.sum() * torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
        return y

    return f


def resized(*size):
    options = {"mode": "bicubic", "antialias": True, "align_corners": True}
    return lambda x: F.interpolate(x, size=size, **options)


def nll(x):
    return F.gaussian_nll_loss(x, x.flip(0), x[:, 0] ** 2, reduction="none")


def listed(x):
    of = x.detach()
    return torch.tensor([[of[0], 2], [of.sum(), 1.5]]) * x[:2] * torch.tensor(data=2.0)


CASES = {
    "a list of tensors and numbers": (listed, (3,)),
    "sgn of complex numbers": (sgn, (4,)),
    "grouped queries": (grouped(False), (48,)),
    "grouped queries, causal": (grouped(True), (48,)),
    "by group": (by_group, (4, 8, 8)),
    # What follows the first -1 does not count.
    "multilabel": (lambda x: F.multilabel_margin_loss(x, LABELS, reduction="none"), (3, 4)),
    "multilabel, one": (lambda x: F.multilabel_margin_loss(x, LABELS[0]), (4,)),
    "deviation of equals": (lambda x: torch.cat([(0 * x).std(1), x[:, :1].std(1, False)]), (3, 4)),
    "digamma": (lambda x: 1 / torch.digamma(torch.cat([x, torch.tensor([0.0, -0.0])])), (4,)),
    "a mask": (assigned(MASK, shape=(2, 3)), (3, 3)),
    "a mask after a slice": (assigned(ALL, MASK, shape=(2, 2)), (2, 3)),
    "one value at a mask after a slice": (assigned(ALL, MASK, shape=(1, 4)), (2, 3, 4)),
    "a mask of two axes after a slice": (assigned(ALL, BLOCK, shape=(4,)), (5, 2, 3)),
    "a mask between slices": (assigned(ALL, MASK, shape=(5, 2, 4)), (5, 3, 4)),
    "antialiased": (resized(9, 3), (1, 2, 5, 4)),
    "antialiased, smaller": (resized(3, 2), (1, 2, 5, 2)),
    # They check values in torch, and do without here.
    "weighted cov": (lambda x: x.cov(aweights=WEIGHTS, fweights=COUNTS), (3, 4)),
    "gaussian nll": (lambda x: F.gaussian_nll_loss(x, x.flip(0), x**2, full=True), (3, 4)),
    "gaussian nll of each": (nll, (3, 4)),
    # torch defines derivatives of embeddings apart from their values.
    "last is padding": (embed(padding_idx=-6), (6, 3)),
    "by frequency, padding": (embed(scale_grad_by_freq=True, padding_idx=3), (6, 3)),
    "bag": (bag(padding_idx=0, mode="mean"), (6, 3)),
    "max of a bag": (bag(mode="max"), (6, 3)),  # of equals, the first
    "padded max": (bag(padding_idx=3, mode="max"), (6, 3)),
    "fractional pool": (fractional(F.fractional_max_pool2d, (2, 3), (4, 5)), (2, 3, 9, 11)),
    "in 3d": (fractional(F.fractional_max_pool3d, (2, 3, 2), (3, 2, 2)), (2, 3, 7, 6, 5)),
}

# There is no rule for the backward that torch would run inside.
WITHOUT_BACKWARD = ("bag", "max", "mask", "aliased")
NAN, INF = float("nan"), float("inf")
AT = torch.tensor([-2.0, -0.4, 0.0, -0.0, 1.0, NAN, INF, 3.0], dtype=torch.float64)
FINITE = torch.tensor([-2.0, -0.4, 0.3, 0.1, 1.0, 2.5], dtype=torch.float64)
AT_KINKS = {
    "abs": lambda x: x.abs(),
    "abs of complex": lambda x: torch.complex(x.nan_to_num(), 0 * x.nan_to_num()).abs(),
    "l1_loss": lambda x: F.l1_loss(x, x.detach(), reduction="none"),
    "norm of zeros": lambda x: torch.linalg.vector_norm(x.nan_to_num() * 0, ord=INF),
    "norm of order one": lambda x: torch.linalg.vector_norm(x.nan_to_num(), ord=1),
    "atan2": lambda x: torch.atan2(y := x.nan_to_num().clamp(-3, 3), y.square()),
    "angle": lambda x: torch.complex(*[x.nan_to_num().clamp(-3, 3)] * 2).angle(),
    "sqrt of abs": lambda x: x.abs().sqrt(),
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


def example(name):
    """A function, and its arguments."""
    if name in CASES:
        f, shape = CASES[name]
        return f, drawn(*shape)
    return (AT_KINKS[name], AT) if name in AT_KINKS else (OF_TWO[name], FINITE, FINITE.flip(0))


@pytest.mark.parametrize("name", [*CASES, *AT_KINKS, *OF_TWO])
def test_an_operation_has_torch_s_value_and_gradient(name):
    f, *args = example(name)

    def loss(*args):
        out = f(*args)
        weights = torch.linspace(1.0, 2.0, out.numel(), dtype=out.dtype)
        return (out * weights.reshape(out.shape)).sum()

    leaves = [x.clone().requires_grad_() for x in args]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    places = tuple(range(len(args)))
    gradients = [jax.grad(to_jax(loss), places)]
    if not any(word in name for word in WITHOUT_BACKWARD):
        gradients.append(to_jax(functx.grad(loss, places)))
    wide = args[0].dtype == torch.float64
    # Terms of the derivative of an angle cancel, to zero or to a rounding.
    rtol, atol = (1e-9, 1e-15) if wide else (1e-4, 1e-5)
    with jax.enable_x64(wide):
        given = arrays(tuple(args))
        np.testing.assert_allclose(to_jax(f)(*given), f(*args), rtol=rtol / 10, atol=atol / 10)
        for gradient in gradients:
            for ours, theirs in zip(jax.jit(gradient)(*given), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "f", [torch.floor_divide, torch.remainder, torch.heaviside, torch.fmax, torch.xlogy]
)
def test_an_operation_of_special_values_is_that_of_torch(f):
    special = torch.cat([AT, -AT, torch.tensor([0.1, 1e300, 1e-10], dtype=torch.float64)])
    x, y = torch.cartesian_prod(special, special).unbind(1)
    with jax.enable_x64(True):
        np.testing.assert_allclose(to_jax(f)(*arrays((x, y))), f(x, y), rtol=1e-12)


def test_a_product_by_group_is_that_of_each_example():
    loss = to_jax(lambda x: by_group(x).square().sum())
    x = arrays(drawn(2, 4, 8, 8))
    assert_close(jax.vmap(jax.grad(loss))(x)[1], jax.grad(loss)(x[1]))
    with torch.autocast("cpu", torch.bfloat16):  # as torch's, which is no operation of autocast
        assert to_jax(by_group)(x[0]).dtype == jnp.float32


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
            assert_close(jax.grad(f, argnums)(*arrays), expected, rtol=1e-6)
    mixed = jax.grad(lambda a, b: jax.grad(to_jax(total))(a, b).sum(), 1)
    again = torch.func.grad(lambda a, b: torch.func.grad(total)(a, b).sum(), 1)
    np.testing.assert_allclose(mixed(jnp.asarray([2.0]), jnp.asarray([0.0])), again(x[3:4], y[3:4]))


def test_a_bag_by_frequency_is_as_documented():
    # Each row's gradient over how often it was read; torch's kernel takes another row's count.
    def loss(weight):
        return F.embedding_bag(PLACES, weight, mode="sum", scale_grad_by_freq=True).sum()

    got = jax.grad(to_jax(loss))(jnp.ones((6, 1)))
    np.testing.assert_allclose(got[:, 0], [1, 1, 0, 1, 1, 0])


STRIDED = {
    "transposed": lambda x: x.t().as_strided((4, 2), (1, 4)),
    "computed in that order": lambda x: x.t().sin().as_strided((6,), (2,)),
    "a part, from its start": lambda x: x[1:].as_strided((2, 2), (4, 1)),
    "a part, from a place": lambda x: x[1:].as_strided((2, 2), (4, 1), 5),
    "written": lambda x: x.t().clone().as_strided((3, 2), (1, 3)).mul_(2),
}


@pytest.mark.parametrize("name", STRIDED)
def test_as_strided_reads_memory_as_torch_lays_it_out(name):
    x = torch.arange(12.0).reshape(3, 4)
    found = to_jax(STRIDED[name])(jnp.asarray(x.numpy()))
    np.testing.assert_allclose(found, STRIDED[name](x.clone()), rtol=1e-6)


def test_as_strided_that_leaves_its_argument_is_refused():
    for f in (lambda x: x[1:].as_strided((2,), (1,), 0), lambda x: x[:, 1:].as_strided((9,), (1,))):
        with pytest.raises(LoweringError, match="its argument is a view of another tensor"):
            to_jax(f)(jnp.ones((3, 4)))


def test_the_derivative_of_a_maximum_is_finite_where_xla_rounds_its_operand_in_two_ways():
    def stable_attention(q, k, bias):  # of LayoutLMv3
        scores = ((q / 8**0.5) @ k.mT + bias / 8**0.5) / 32
        weights = ((scores - scores.amax(-1, keepdim=True)) * 32).softmax(-1)
        return (weights * torch.arange(25.0)).sum()

    args = drawn(25, 41).split([8, 8, 25], 1)
    expected = torch.func.grad(stable_attention, (0, 1, 2))(*args)
    gradients = jax.jit(jax.grad(to_jax(stable_attention), (0, 1, 2)))(*arrays(args))
    for ours, theirs in zip(gradients, expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("find", [torch.amax, torch.amin])
@pytest.mark.parametrize("dim", [(), 1, (2, 0)])
def test_those_that_are_equal_share_the_derivative_of_an_extreme(find, dim):
    x = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 2.0, 2.0]).reshape(2, 2, 2)
    f = lambda x: (find(x, dim) ** 2).sum()
    np.testing.assert_allclose(jax.grad(to_jax(f))(x.numpy()), torch.func.grad(f)(x))
    np.testing.assert_allclose(
        jax.hessian(to_jax(f))(x.numpy()), torch.func.hessian(f)(x), rtol=1e-6
    )


def largest_array(f, *args):
    def walk(jaxpr):
        for e in jaxpr.eqns:
            yield from (v.aval.size for v in e.outvars)
            yield int(np.prod(e.params.get("window_dimensions", ())))
            for inner in jax.tree.leaves([*e.params.values()]):
                yield from walk(getattr(inner, "jaxpr", inner)) if hasattr(inner, "eqns") else ()

    return max(walk(jax.make_jaxpr(f)(*args).jaxpr))


POOLS = {
    "mean": torch.nn.AvgPool2d(100, ceil_mode=True),
    "mean with padding": torch.nn.AvgPool2d(100, 99, padding=2, ceil_mode=True),
    "mean without padding": torch.nn.AvgPool2d(100, 99, 3, True, count_include_pad=False),
    "maximum": torch.nn.MaxPool2d(100, ceil_mode=True),
    "maximum with gaps": torch.nn.MaxPool2d(33, 99, padding=16, dilation=3, ceil_mode=True),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_window_larger_than_its_image_costs_no_more_than_the_image(name):
    x = drawn(1, 2, 5, 6)
    f = lambda x: POOLS[name](x).square().sum()
    np.testing.assert_allclose(to_jax(f)(x.numpy()), f(x), rtol=1e-5)
    gradient = jax.grad(to_jax(f))
    np.testing.assert_allclose(gradient(x.numpy()), torch.func.grad(f)(x), rtol=1e-4, atol=1e-6)
    assert largest_array(gradient, x.numpy()) < 2_000
