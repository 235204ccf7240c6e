"""Kernels that torch picks by grad mode, training or layout: the bits they give without remat."""

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import assert_same
from right import WAYS, check, weighted
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import (
    embedding,
    embedding_bag,
    scaled_dot_product_attention,
)

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(2, 5, 8)


def bias_attention(remat):
    bias = numbers(5, 5, start=2.0).requires_grad_()

    def f(x):
        q = x.unflatten(-1, (2, 4)).transpose(-3, -2)
        return scaled_dot_product_attention(q, q.sin(), q.exp(), attn_mask=bias)

    return remat(f), [bias]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "mask", "dropout", "plain"])
def test_attention(kind, dtype):
    def build(remat):
        mask = torch.ones(5, 5).tril().bool() if kind == "mask" else None

        def f(x):
            q = x.unflatten(-1, (2, 4)).transpose(-3, -2)
            return scaled_dot_product_attention(
                q,
                q.sin(),
                q.exp(),
                attn_mask=mask,
                dropout_p=0.3 if kind == "dropout" else 0.0,
                is_causal=kind == "causal",
            )

        return remat(f)

    check(build, X.to(dtype), ways=["backward", "grad"])


def test_attention_with_a_learned_bias():
    check(bias_attention, X, ways=["backward"])
    check(bias_attention, X[0], ways=["vmap"], eps=64, mixed=False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(training, weights):
    def build(remat):
        layer = seeded(lambda: nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True))
        layer = layer.to(DTYPE).train(training)
        region = remat(lambda x: layer(x, x.sin(), x, need_weights=weights))
        return region, list(layer.parameters())

    check(build, X, ways=["backward", "grad"], eps=32, mixed=False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(training, norm_first):
    def build(remat):
        layer = seeded(
            lambda: nn.TransformerEncoderLayer(
                8, 2, 16, dropout=0.2, batch_first=True, norm_first=norm_first
            )
        )
        return remat(layer.to(DTYPE).train(training))

    check(build, X, ways=["backward", "grad"], eps=64, mixed=False)


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_the_fast_path_is_taken_where_it_is_without_remat(grad_enabled):
    """In eval, without grad mode, an encoder layer is one fused kernel."""

    def build(remat):
        layer = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
        region = remat(layer.to(DTYPE).eval())

        def f(x):
            with torch.set_grad_enabled(grad_enabled):
                y = region(x)
            return y * x

        return f

    check(build, X, ways=["backward", "grad"], eps=64)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode):
    def build(remat):
        table = numbers(10, 4, start=1.0).requires_grad_()
        index, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 3])
        region = remat(lambda x: embedding_bag(index, table, offsets, mode=mode) * x.sin())
        return region, [table]

    check(build, numbers(2, 4), ways=["backward"])


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}])
def test_embedding(options):
    def build(remat):
        table = numbers(10, 4, start=1.0).requires_grad_()
        index = torch.tensor([1, 2, 2, 5])
        return remat(lambda x: embedding(index, table, **options).sin() * x), [table]

    check(build, numbers(4, 4), ways=["backward"])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent(kind, training):
    def build(remat):
        layer = seeded(lambda: kind(8, 6, num_layers=2, dropout=0.2, bidirectional=True))
        layer = layer.to(DTYPE).train(training)
        region = remat(lambda x: layer(x))
        return region, list(layer.parameters())

    check(build, X, ways=["backward"], eps=64)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_with_weights_lent_inside(kind):
    """What the layer keeps of them until its next call is nothing that is left behind."""
    layer = seeded(kind, 8, 6).to(DTYPE)
    weights = {name: 2 * p.detach() for name, p in layer.named_parameters()}

    def gradients(remat):
        f = remat(lambda weights: weighted(torch.func.functional_call(layer, weights, (X[0],))))
        return functx.grad(f)(weights), functx.jvp(f, (weights,), (weights,))

    assert_same(gradients(functx.remat), gradients(lambda f: f), eps=64)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_recurrent_cells(kind):
    def build(remat):
        cell = seeded(kind, 8, 6).to(DTYPE)

        def f(x):
            h = None
            for row in x.unbind(0):
                h = cell(row, h)
            return h

        return remat(f), list(cell.parameters())

    check(build, X, ways=["backward", "grad"], eps=64)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: x.mT @ w,
        lambda x, w: (x @ w.mT[:8]).mT,
        lambda x, w: torch.nn.functional.linear(x.mT, w.mT),
        lambda x, w: torch.einsum("bij,ik->bkj", x, w),
        lambda x, w: torch.bmm(x, x.mT) @ w,
        lambda x, w: torch.baddbmm(x, x, w[:, :8].mT.expand(2, 8, 5) @ w[:, :8]),
    ],
    ids=["mT", "right", "linear", "einsum", "bmm", "baddbmm"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_folded_matmuls(f, dtype):
    def build(remat):
        w = numbers(5, 9, start=1.0).to(dtype).requires_grad_()
        return remat(lambda x: f(x, w).sin()), [w]

    check(build, X.to(dtype), ways=["backward", "grad"])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions(layout):
    def build(remat):
        net = seeded(
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2)
            )
        )
        return remat(net.to(DTYPE).to(memory_format=layout))

    check(build, numbers(2, 2, 6, 6).to(memory_format=layout), ways=["backward", "grad"], eps=64)
    check(build, numbers(1, 2, 6, 6), ways=["vmap"], eps=64)


@pytest.mark.parametrize("way", WAYS)
def test_attention_by_the_kernel_of_the_forward(way):
    """The one for which torch has second derivatives, in the forward alone."""

    def build(remat):
        attention = remat(scaled_dot_product_attention)

        def f(x):
            with sdpa_kernel(SDPBackend.MATH):
                return attention(x, x.sin(), x.cos())

        return functx.grad(lambda x: weighted(f(x)))

    check(build, numbers(1, 2, 4, 6), ways=[way])


def test_a_number_where_an_operator_of_torch_has_a_tensor():
    """Composites in C++ make a tensor of it, which dispatch modes are shown as a number again."""

    def program(remat):
        return functx.vmap(functx.grad(lambda a: remat(ramp)(a).sin().sum()))(numbers(3))

    def ramp(a):
        return torch.linspace(a, 1, 5, dtype=a.dtype) * a

    assert_same(program(functx.remat), program(lambda f: f))


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_the_order_in_which_einsum_multiplies(way):
    """A replay has that of the forward, whatever was set since."""

    def gradient(remat, then):
        def f(x):
            return torch.einsum("ij,jk,kl,lm,mi->", x, x[:, :2] / 3, x[:2], x / 7, x)

        x = torch.linspace(-1, 2, 49).view(7, 7)
        with torch.backends.opt_einsum.flags(enabled=True, strategy="optimal"):
            if way == "backward":
                y = remat(f)(x.requires_grad_())
                with torch.backends.opt_einsum.flags(**then):
                    return torch.autograd.grad(y, x)[0]
            _, pull_back = functx.vjp(remat(f), x)
            with torch.backends.opt_einsum.flags(**then):
                return pull_back(torch.ones(()))[0]

    expected = gradient(identity, {})
    assert torch.equal(gradient(functx.remat, {"enabled": False}), expected)


VALUES = {
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": torch.linalg.eigvalsh,
    "eigvals": lambda a: torch.linalg.eigvals(a).abs(),
    "cond": torch.linalg.cond,
    "matrix_norm": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "norm": lambda a: torch.linalg.norm(a, "nuc"),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_values_without_vectors(name, nested):
    """Torch computes them with vectors where a mode is active, and the last bits are others."""

    def run(region, a):
        def body(x):
            return x * VALUES[name](a).sum()

        x = numbers(3).requires_grad_()
        y = region(lambda x: region(body)(x.sin()))(x) if nested else region(body)(x)
        return y, torch.autograd.grad(y.sum(), x)

    for step in range(9):
        a = torch.randn(12, 12, dtype=DTYPE, generator=torch.Generator().manual_seed(step))
        a = a @ a.mT
        assert_same(run(functx.remat, a), run(identity, a))


def test_values_without_vectors_have_derivatives():
    def run(region):
        x = numbers(5, 4).requires_grad_()
        y = region(lambda x: torch.linalg.svdvals(x).sin() * torch.linalg.cond(x))(x)
        return y, torch.autograd.grad(y.sum(), x)

    for _ in range(7):
        assert_same(run(functx.remat), run(identity))
