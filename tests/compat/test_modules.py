"""Modules, exported programs and library models as ``(params, fn)``: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import functx
from functx._errors import LoweringError
from functx.compat import to_jax

from .networks import arrays, assert_close


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


INDEX = torch.tensor([[0, 4, 2], [3, 3, 1]])
NETS = {
    "LSTM": (lambda: nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), rand(2, 3, 4)),
    "GRU": (lambda: nn.GRU(4, 5, 2, bias=False), rand(3, 2, 4)),
    "RNN": (lambda: nn.RNN(4, 5), rand(3, 4)),
    "Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
                    rand(2, 3, 8), rand(2, 4, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
                rand(2, 3, 8)),
    "batch norm": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)).eval(),
                   rand(2, 3, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), rand(2, 3, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, 1), rand(2, 3, 4, 4)),
    "circular": (lambda: nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"), rand(2, 3, 5)),
    "bicubic": (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Upsample((7, 9), mode="bicubic")),
                rand(1, 1, 4, 4)),
    "bag": (lambda: nn.EmbeddingBag(5, 4, mode="max"), INDEX),
    "bags": (lambda: nn.EmbeddingBag(5, 4), INDEX[0], torch.tensor([0, 2])),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), rand(2, 3), rand(2, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), rand(2, 3)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), rand(2, 4)),
    "tied": (Tied, INDEX),
    "remat": (lambda: functx.remat(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), rand(2, 3)),
}  # fmt: skip


def _first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", NETS)
def test_value_and_gradient(name):
    torch.manual_seed(0)
    build, *inputs = NETS[name]
    net = build().double()

    def loss(params, *inputs):
        out = _first(functional_call(net, params, inputs))
        return (out * torch.linspace(0.5, 2, out.shape[-1], dtype=out.dtype)).square().sum()

    plain = {n: p.detach() for n, p in net.named_parameters()}
    with jax.enable_x64(True):
        params, fn = to_jax(net)
        assert set(params) == set(plain)
        assert_close(_first(fn(params, *arrays(inputs))), _first(net(*inputs)), rtol=1e-9)
        got = jax.grad(to_jax(loss))(params, *arrays(inputs))
        assert_close(got, torch.func.grad(loss)(plain, *inputs), rtol=1e-9)


def test_inside_gradient_of_a_fused_layer():
    net, x = nn.LSTM(4, 5, bidirectional=True), torch.randn(3, 2, 4)
    f = lambda x: net(x)[0].square().sum()  # noqa: E731
    g = torch.func.grad(f)
    assert_close(to_jax(g)(arrays(x)), g(x))
    hessian = torch.autograd.functional.hessian(f, x)
    assert_close(jax.jacrev(to_jax(g))(arrays(x)), hessian, rtol=1e-5)


@pytest.mark.parametrize(
    "kind", [nn.RNN, *(pytest.param(k, marks=pytest.mark.sweep) for k in (nn.LSTM, nn.GRU))]
)
def test_dropout_between_recurrent_layers(kind):
    """torch's decomposition leaves it out."""
    net, x = kind(4, 5, 3, dropout=0.5, bidirectional=True), torch.randn(6, 2, 4)
    params, fn = to_jax(net, rng=True)
    keys = jax.random.split(jax.random.key(0), 300)
    got = np.asarray(jax.vmap(lambda key: fn(params, arrays(x), rng=key)[0])(keys))
    with torch.random.fork_rng(), torch.no_grad():
        expected = torch.stack([net(x)[0] for _ in range(300)]).numpy()
    np.testing.assert_allclose(got.std(0).mean(), expected.std(0).mean(), rtol=0.1)
    one = fn(params, arrays(x), rng=keys[0])
    assert [v.shape for v in jax.tree_util.tree_leaves(one)][1] == (6, 2, 5)


def test_buffers_as_arguments_and_results():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    params, buffers, fn = to_jax(net, buffers=True)
    x = torch.randn(5, 3)

    def loss(params, buffers, x):
        out, new = fn(params, buffers, x)
        return out[0].sum(), new

    for _ in range(2):
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, buffers), gradient = step(params, buffers, arrays(x))
        net.zero_grad()
        expected = net(x)[0].sum()
        expected.backward()
        assert_close(value, expected)
        assert_close(buffers, dict(net.named_buffers()))
        named = {n: p.grad for n, p in net.named_parameters()}
        assert_close(gradient, named, rtol=1e-4)
    assert int(buffers["1.num_batches_tracked"]) == 2


def test_buffers_among_the_parameters():
    net = nn.BatchNorm1d(3).eval()
    params, fn = to_jax(net)
    x = torch.randn(5, 3)
    doubled = {n: 2 * b for n, b in net.named_buffers()}
    expected = functional_call(net, doubled, (x,))
    assert_close(fn({**params, **arrays(doubled)}, arrays(x)), expected)


def test_training_statistics_need_buffers():
    params, fn = to_jax(nn.BatchNorm1d(2))
    with pytest.raises(LoweringError, match=r"buffers=True"):
        fn(params, jnp.ones((3, 2)))


def test_a_function_has_no_buffers():
    with pytest.raises(ValueError, match="a function has no buffers"):
        to_jax(torch.sin, buffers=True)


HOOKS = {
    "full": lambda net: net[0].register_full_backward_hook(lambda *_: None),
    "before": lambda net: net.register_full_backward_pre_hook(lambda *_: None),
    "parameter": lambda net: net[1].weight.register_hook(lambda g: 2 * g),
}


@pytest.mark.parametrize("name", HOOKS)
def test_backward_hooks_are_refused(name):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = jnp.ones((5, 3))
    params, fn = to_jax(net)
    expected = np.asarray(fn(params, x))
    handle = HOOKS[name](net)
    for refused in (lambda: fn(params, x), lambda: to_jax(lambda x: net(x))(x)):
        with pytest.raises(LoweringError, match="backward hooks"):
            refused()
    handle.remove()
    np.testing.assert_array_equal(fn(params, x), expected)


def test_what_was_compiled():
    net = nn.Linear(3, 2)
    params, fn = to_jax(torch.compile(net))
    assert list(params) == ["weight", "bias"]
    x = torch.randn(5, 3)
    assert_close(fn(params, arrays(x)), net(x))
    compiled = torch.compile(torch.sin)
    assert_close(to_jax(compiled)(arrays(x)), x.sin())
    with pytest.raises(LoweringError, match=r"torch\.compile"):
        to_jax(lambda x: 2 * compiled(x))(arrays(x))


# torch.export uses what torch.utils._pytree deprecates.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_program(decomposed):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.GELU()).eval()
    x = torch.randn(5, 3)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    if decomposed:
        program = program.run_decompositions()
    params, fn = to_jax(program)
    for batch in (x, torch.randn(7, 3)):
        assert_close(fn(params, arrays(batch)), net(batch))
    gradient = jax.grad(lambda p: fn(p, arrays(x)).sum())(params)
    net(x).sum().backward()
    assert_close(gradient, {n: p.grad for n, p in net.named_parameters()}, rtol=1e-5)


def test_named_results_keep_their_type():
    out = jax.jit(to_jax(lambda x: x.max(0)))(jnp.asarray([[1.0, 5.0], [3.0, 2.0]]))
    assert type(out) is torch.return_types.max
    assert out.values.tolist() == [3, 5]
    assert out.indices.tolist() == [1, 0]
    back = to_jax(lambda m: m.values * 2)(out)
    assert back.tolist() == [6, 10]


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, use_cache=False))


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, use_cache=False))


def _bert():
    from transformers import BertConfig, BertForMaskedLM

    size = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**size, **layers))


@pytest.mark.parametrize("build", [_gpt2, _llama, _bert])
def test_library_models(build):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = build().eval()
    ids = torch.randint(1, 50, (2, 7))
    params, fn = to_jax(net)
    step = jax.jit(jax.value_and_grad(lambda p, i: fn(p, input_ids=i, labels=i).loss))
    loss, gradient = step(params, arrays(ids))
    expected = net(input_ids=ids, labels=ids).loss
    expected.backward()
    assert_close(loss, expected)
    assert_close(gradient, {n: p.grad for n, p in net.named_parameters()}, rtol=1e-4)
