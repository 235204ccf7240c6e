"""Modules, exported programs and library models as ``(params, fn)``: values and gradients."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax

from ..helpers import arrays, assert_close


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


NETS = {
    "LSTM": (lambda: nn.LSTM(4, 5, 1, batch_first=True, bidirectional=True), rand(2, 3, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
                rand(2, 3, 8)),
    "batch norm": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)).eval(),
                   rand(2, 3, 5)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), rand(2, 4)),
    "remat": (lambda: functx.remat(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), rand(2, 3)),
}  # fmt: skip


def _first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", NETS)
def test_a_module_gives_torch_s_value_and_gradient(name):
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
        given = params, *arrays(inputs)
        assert_close(_first(jax.jit(fn)(*given)), _first(net(*inputs)), rtol=1e-9)
        got = jax.jit(jax.grad(to_jax(loss)))(*given)
        assert_close(got, torch.func.grad(loss)(plain, *inputs), rtol=1e-9)


@pytest.mark.parametrize("kind", [nn.RNN, pytest.param(nn.GRU, marks=pytest.mark.sweep)])
def test_recurrent_layers_drop_out_between_them(kind):
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


def test_a_recurrent_layer_is_traced_once_and_keeps_its_own_weights():
    """It notes the weights that it is called with, those of a trace too."""
    net, x = nn.LSTM(4, 5), torch.randn(6, 4)
    expected, runs = net(x), collections.deque()  # which is not looked into
    params, _ = to_jax(net)
    fn = to_jax(lambda params, x: runs.append(1) or functional_call(net, params, (x,)))
    for _ in range(3):
        assert_close(_first(fn(params, arrays(x))), _first(expected), rtol=1e-5)
    assert len(runs) == 1
    assert_close(net(x)[0], expected[0])


def test_buffers_are_arguments_and_results():
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


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed((x.abs() * 2).long().clamp(0, 5)).tanh())


TRAINED = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.float32),
    "tied": (Tied, torch.float32),
    "parametrized": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), torch.float32),
    "bfloat16": (lambda: nn.Linear(4, 3), torch.bfloat16),
    "float64": (lambda: nn.LSTM(4, 3), torch.float64),
}


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_trained_in_jax_go_back_to_a_state_dict(name):
    torch.manual_seed(0)
    build, dtype = TRAINED[name]
    net, x = build().to(dtype), torch.randn(5, 4).to(dtype)
    with jax.enable_x64(dtype == torch.float64):
        params, buffers, fn = to_jax(net, buffers=True)

        def loss(params, buffers, x):
            out, buffers = fn(params, buffers, x)
            return (_first(out).astype("float32") ** 2).sum(), buffers

        gradients, buffers = jax.jit(jax.grad(loss, has_aux=True))(params, buffers, arrays(x))
        trained = jax.tree.map(lambda p, g: p - 0.125 * g, params, gradients)
        # The lines of the page.
        state = {name: torch.from_dlpack(array) for name, array in (trained | buffers).items()}
        missing, unknown = net.load_state_dict(state, strict=False)
        assert unknown == []
        assert missing == (["head.weight"] if name == "tied" else [])
        expected, _ = fn(trained, buffers, arrays(x))
        assert_close(_first(net(x)).float(), _first(expected).astype("float32"), rtol=2e-2)
        for key, parameter in net.named_parameters():
            assert parameter.dtype == dtype
            assert_close(parameter.float(), trained[key].astype("float32"), rtol=0)
            with torch.no_grad():
                parameter.zero_()
            assert bool((trained[key] != 0).any())  # they share no memory


def test_buffers_may_be_given_among_the_parameters():
    net = nn.BatchNorm1d(3).eval()
    params, fn = to_jax(net)
    x = torch.randn(5, 3)
    doubled = {n: 2 * b for n, b in net.named_buffers()}
    expected = functional_call(net, doubled, (x,))
    assert_close(fn({**params, **arrays(doubled)}, arrays(x)), expected)
    with pytest.raises(ValueError, match="a function has no buffers"):
        to_jax(torch.sin, buffers=True)


def test_backward_hooks_are_refused():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), jnp.ones((5, 3))
    params, fn = to_jax(net)
    expected = np.asarray(fn(params, x))
    for register, hook in (
        (net[0].register_full_backward_hook, lambda *_: None),
        (net[0].weight.register_post_accumulate_grad_hook, lambda p: None),
        (net[1].weight.register_hook, lambda g: 2 * g),
    ):
        handle = register(hook)
        with pytest.raises(LoweringError, match="backward hooks"):
            fn(params, x)
        handle.remove()
        np.testing.assert_array_equal(fn(params, x), expected)


def test_what_was_compiled_is_lowered_as_it_was():
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
@pytest.mark.parametrize("decomposed", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_an_exported_program_is_lowered(decomposed):
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


def test_what_is_no_state_of_the_module_is_refused():
    """Torch would use the module's own parameter, whose derivative would be zero."""
    params, fn = to_jax(torch.nn.Linear(3, 2))
    x = jnp.ones((4, 3))
    with pytest.raises(ValueError, match="'weigth' is not the name of a parameter or buffer"):
        fn({"weigth": params["weight"]}, x)
    with pytest.raises(TypeError, match=r"call the function as fn\(params, \*args"):
        fn(x)
    params, buffers, fn = to_jax(torch.nn.BatchNorm1d(3), buffers=True)
    with pytest.raises(TypeError, match=r"call the function as fn\(params, buffers, \*args"):
        fn(params, x)
    assert fn({**params}, buffers, x)[0].shape == (4, 3)


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_shared_is_one_parameter_by_any_of_its_names(whole):
    """A module that is in two places, or a parameter of two modules."""
    first, second, x = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.ones(4, 3)
    second.weight = first.weight
    net = torch.nn.Sequential(first, torch.nn.Tanh(), first if whole else second)
    expected, own = net(x), first.weight
    params, fn = to_jax(net)
    renamed = {name.replace("0.weight", "2.weight"): p for name, p in params.items()}
    for state in (params, renamed):
        assert_close(fn(state, arrays(x)), expected)
    assert first.weight is own  # torch.func.functional_call leaves its argument there
    gradient = jax.grad(lambda p: fn(p, arrays(x)).sum())(params)
    expected.sum().backward()
    assert_close(gradient, {name: p.grad for name, p in net.named_parameters()})
    with pytest.raises(ValueError, match=r"'0\.weight' and '2\.weight' are tied; pass only one"):
        fn(arrays(net.state_dict()), arrays(x))


@pytest.mark.parametrize("scan", [False, "[01]"])
def test_a_parameter_that_is_left_out_is_the_module_s_own(scan):
    """Frozen, say; in a region too, where it is a leaf of the region's own tape."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)))
    params, fn = to_jax(functx.apply_remat(net, "1") if not scan else net, scan=scan)
    trained = {name: p for name, p in params.items() if name.startswith("1.")}
    x = torch.randn(4, 3)
    gradient = jax.grad(lambda p: fn(p, arrays(x)).sum())(trained)
    net(x).sum().backward()
    own = dict(net.named_parameters())
    assert_close(gradient, {name: own[name].grad for name in trained}, rtol=1e-5)
    assert_close(to_jax(functx.remat(net))[1]({}, arrays(x)), net(x))
