"""What `to_jax` can't lower is refused by name, with what to do instead; so is narrowing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._higher_order_ops import map as map_rows
from torch.fx.experimental import proxy_tensor

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax
from functx.compat._to_jax.functional_graph import Spec, trace
from functx.compat._to_jax.lower.refusals import check
from functx.compat._to_jax.rules import table as _table

from ..helpers import assert_close

SPEC = Spec((3,), torch.float32)
MASK, INDEX = torch.tensor([True, False]), torch.tensor([1])
STATE, BUFFER = {"seen": torch.zeros(3)}, torch.zeros(3)


def untraced(x):
    """With the tracer off, as a transform that bakes its inputs in would run it."""
    with proxy_tensor.disable_proxy_modes_tracing():
        return torch.sin(x)


REFUSED = [
    (lambda x: x * x.sum().item(), "_local_scalar_dense"),
    (lambda x: x[x > 0], "index"),
    (torch.nonzero, "nonzero"),
    # All that is missing.
    (lambda x: torch.special.airy_ai(x) + torch.hash_tensor(x), "special_airy_ai", "hash_tensor"),
    (lambda x: torch.tensor_split(x, torch.tensor([1, 2])), "as Python numbers"),
    (lambda x: x.to(torch.float8_e4m3fnuz), "JAX does not have the dtype torch.float8_e4m3fnuz"),
    (torch.nn.Dropout(0.5).forward, "rng=True"),
    (
        lambda x: torch.nn.functional.interpolate(
            x.expand(1, 1, 9, 3), (2, 3), mode="bilinear", antialias=True, align_corners=True
        ),
        "Use align_corners=False",
    ),
    (lambda x: STATE["seen"].add_(x), "closes over"),
    (functx.remat(lambda x: x * BUFFER.add_(1.0)), "buffers=True"),
    (lambda x: map_rows(torch.sin, x), "no rule: map_impl"),
    (lambda x: object(), "returned a object"),
]


@pytest.mark.parametrize(("f", "words"), [(f, words) for f, *words in REFUSED])
def test_a_function_that_can_not_be_lowered_is_refused_by_name(f, words):
    with pytest.raises(TypeError if "returned a object" in words else LoweringError) as caught:
        to_jax(f)(jnp.ones(3))
    for word in words:
        assert word in str(caught.value)
    assert STATE["seen"].tolist() == [0, 0, 0]


def assigns_to_a_mask_and_an_index(x):
    y = x * 1
    y[MASK, INDEX] = 1.0
    return y


class Converting(torch.nn.Linear):
    def forward(self, x):
        return super(Converting, self.to(torch.float32)).forward(x)


def converts(x):
    return torch.func.functional_call(Converting(2, 2), {"weight": x, "bias": x[0]}, (x,))


# A word of the line that an error names, and of the way out.
AT_A_LINE = [
    (functx.remat(lambda x: torch.special.airy_ai(x)), r"from_jax\(g\)"),
    (lambda x: torch.rand_like(x), r"to_jax\(f, rng=True\)"),
    (lambda x: x.double(), r"jax\.enable_x64"),
    (lambda x: x * x.sum().item(), "Use torch.where"),
    (lambda x: x * x.tolist()[0][0], "as a static Python argument"),
    (functx.remat(lambda x: -x if bool((x > 0).all()) else x), "torch.where"),
    (functx.grad(lambda x: x[x > 0].sum()), "torch.where, masks"),
    (lambda x: x * float(x.numpy()[0, 0]), "numpy(.|\n)*Compute with the tensor"),
    (lambda x: torch.tensor_split(x, torch.tensor([1])), "as Python numbers"),
    (lambda x: torch.compile(torch.sin)(x), "Call the original function or module"),
    (converts, "Convert the module before"),
    (assigns_to_a_mask_and_an_index, r"mask among other indices(.|\n)*torch\.where"),
]


@pytest.mark.parametrize(("f", "way_out"), AT_A_LINE)
def test_an_error_names_the_line_of_the_user_and_a_way_out(f, way_out):
    with pytest.raises(LoweringError, match=rf"at {__file__}:\d+ in (.|\n)*{way_out}"):
        to_jax(f)(jnp.ones((2, 2)))


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((jnp.ones(2), torch.ones(2)), {}, TypeError, r"argument at \[0\]\[1\] is a torch tensor"),
        ((jnp.ones(2), {1, 2}), {}, TypeError, "neither an array nor hashable"),
        ((jnp.ones(2, jnp.int4), 1), {}, LoweringError, "torch does not have the JAX dtype"),
        ((jnp.ones(2), 1), {"rng": True}, TypeError, r"jax\.random key"),
    ],
)
def test_an_argument_that_can_not_be_lowered_is_refused(args, options, error, message):
    with pytest.raises(error, match=message):
        to_jax(lambda x, y: x + 1, **options)(*args)


@pytest.mark.parametrize("bad", [3, "f", torch.ones(2), None, jnp.sin])
def test_what_is_no_function_of_torch_is_refused(bad):
    with pytest.raises(TypeError, match="takes a torch function"):
        to_jax(bad)
    with pytest.raises(
        TypeError, match=r"<lambda> calls JAX at .*test_refusals.py:\d+ in <lambda>"
    ):
        to_jax(lambda x: jnp.sin(x))(jnp.ones(2))


def test_batch_norm_in_training_is_refused():
    params, fn = to_jax(torch.nn.BatchNorm1d(2))
    with pytest.raises(LoweringError, match=r"module\.eval\(\)") as caught:
        fn(params, jnp.ones((3, 2)))
    assert "buffers=True" in str(caught.value)
    params, buffers, fn = to_jax(torch.nn.BatchNorm1d(2, momentum=None), buffers=True)
    with pytest.raises(LoweringError, match="momentum=None"):  # its average reads a counter
        fn(params, buffers, jnp.ones((3, 2)))


def test_a_write_to_an_argument_warns():
    with pytest.warns(UserWarning, match="writes to 1 of its arguments"):
        out = to_jax(lambda x: x.add_(1))(jnp.zeros(2))
    assert out.tolist() == [1, 1]


def test_a_value_that_the_tracer_lost_is_refused():
    with pytest.raises(LoweringError, match="lost track of a value"):
        trace(lambda x: [x + untraced(x)], [SPEC])
    with pytest.raises(LoweringError, match="inputs \\[0\\]"):
        trace(lambda x: (untraced(x), [torch.ones(3)])[1], [SPEC])
    # Dead code and inputs that nobody reads are fine.
    check(trace(lambda x, y: (torch.sin(x), [y * 2])[1], [SPEC, SPEC]))


def test_what_a_hook_records_in_a_layer_is_refused_where_layers_are_scanned():
    class Recorded(torch.nn.Sequential):
        def forward(self, x):
            seen = []
            with self[0][1].register_forward_hook(lambda *args: seen.append(args[-1])):
                return super().forward(x), seen[0]

    layers = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()) for _ in range(2))
    params, fn = to_jax(Recorded(*layers), scan="[01]")
    with pytest.raises(LoweringError, match=r"a layer of scan= .* output_attentions"):
        fn(params, jnp.ones((3, 2)))


class Lazy(torch.nn.Module):
    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.cos(torch.arange(3.0))
        return x * self.table


def test_a_table_that_a_trace_fills_is_refused_until_it_is_filled_before():
    net, x = Lazy(), torch.ones(2, 3)
    params, fn = to_jax(net)
    for _ in range(2):
        with pytest.raises(LoweringError, match=r"is kept(.|\n)*clear that"):
            fn(params, jnp.ones(3))
    net.table = None
    expected = net(x)
    assert_close(fn(params, jnp.ones((2, 3))), expected)


@pytest.mark.parametrize("asks", [False, True])
def test_a_tensor_left_in_a_list_is_refused(asks):
    kept = [torch.ones(1)]

    def f(x):
        kept.append(x.detach())
        return x if asks and x.requires_grad else x.sin()

    with pytest.raises(LoweringError, match="has changed something" if asks else "is kept"):
        to_jax(f)(jnp.ones(3))
    with pytest.raises(AssertionError, match="FakeTensor"):
        torch.ones(3) * kept[1]


def test_a_function_that_is_traced_twice_may_not_change_what_it_reads():
    kept = []

    def energy(x):
        kept.append(x.tanh())
        (force,) = torch.autograd.grad(kept[-1].sum(), x, create_graph=True)
        return kept.pop() + force

    with pytest.raises(LoweringError, match=r"traced once more(.|\n)*functx\.grad"):
        to_jax(energy)(jnp.ones(3))


def test_a_change_of_an_argument_is_refused():
    with pytest.raises(LoweringError, match="changes an argument, a list"):
        to_jax(lambda x, seen: (seen.append(x), x.cos())[1])(jnp.ones(3), [])


def test_gradients_set_on_what_is_closed_over_are_refused_and_put_back():
    net = torch.nn.Linear(3, 3)
    before = net.weight.grad = torch.ones(3, 3)

    def f(x):
        loss = net(x).sum()
        loss.backward()
        return loss

    with pytest.raises(LoweringError, match=r"sets \.grad of a tensor(.|\n)*functx\.grad"):
        to_jax(f)(jnp.ones(3))
    assert net.weight.grad is before
    assert net.bias.grad is None


def test_a_rule_of_the_wrong_shape_is_refused(monkeypatch):
    to_jax(torch.sinh)(jnp.ones(3))
    monkeypatch.setitem(_table._rules, "aten::sinh", _table.Rule(lambda x: x[:1]))
    with pytest.raises(LoweringError, match=r"returned shape \(1,\)"):
        to_jax(lambda x: torch.sinh(x))(jnp.ones(3))


def test_labels_are_int64_to_torch():
    seen = []

    def f(x, y):
        seen.append(y.dtype)
        return torch.nn.functional.cross_entropy(x, y)

    logits = torch.randn(3, 4)
    got = to_jax(f)(jnp.asarray(logits.numpy()), jnp.array([0, 1, 3]))
    np.testing.assert_allclose(got, f(logits, torch.tensor([0, 1, 3])), rtol=1e-6)
    with jax.enable_x64(True):
        to_jax(f)(jnp.ones((3, 4), jnp.float32), jnp.array([0, 1, 3]))
        assert to_jax(lambda x: x + 1)(jnp.ones(2, jnp.int32)).dtype == jnp.int32
    assert set(seen) == {torch.int64}


def test_float64_is_refused_and_the_error_says_how():
    for f in (lambda x: x.double() * 2, lambda x: x + torch.ones(2, dtype=torch.float64)):
        with pytest.raises(LoweringError, match=r"jax\.enable_x64"):
            to_jax(f)(jnp.ones(2))
        with jax.enable_x64(True):
            assert to_jax(f)(jnp.ones(2, jnp.float32)).tolist() == [2, 2]
    with pytest.raises(LoweringError, match="float64"):
        to_jax(torch.sin)(np.ones(2))
    with pytest.raises(LoweringError, match=r"triu.* does not fit"):
        to_jax(lambda x: x.triu(-(2**40)))(jnp.ones((2, 2)))


def test_float32_is_not_computed_in_float64():
    x = torch.linspace(-2, 2, 50)
    f = lambda x: torch.nn.functional.gelu(x) + torch.nn.functional.gelu(x, approximate="tanh")
    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(to_jax(f))(jnp.asarray(x.numpy())))
    assert "f64[50]" not in text


WIDE = {
    "drawn": lambda x: torch.randint(2**40, x.shape),
    "filled": lambda x: torch.full(x.shape, 2**40),
    "added": lambda x: x.long() + 2**40,
    "padded": lambda x: torch.nn.functional.pad(x.long(), (1, 1), value=2**40),
    "bits of another dtype": lambda x: x.view(torch.int64),
}


@pytest.mark.parametrize("what", WIDE)
def test_wide_integers_of_the_function_are_refused(what):
    lowered = to_jax(WIDE[what], rng=True)
    x = jnp.ones(2, jnp.float32)
    with pytest.raises(LoweringError, match=r"64-bit integers(.|\n)*jax\.enable_x64"):
        lowered(jax.random.key(0), x)
    with jax.enable_x64(True):
        got = lowered(jax.random.key(0), x)
    if "drawn" not in what:
        assert got.tolist() == WIDE[what](torch.ones(2)).tolist()


def test_numbers_that_fit_pass_and_others_do_not():
    small, big = torch.tensor([5]), torch.tensor([2**40])
    assert to_jax(lambda x: x + small)(jnp.ones(1, jnp.int32)).tolist() == [6]
    with pytest.raises(LoweringError, match="do not fit"):
        to_jax(lambda x: x + big)(jnp.ones(1, jnp.int32))
    with jax.enable_x64(True):
        assert to_jax(lambda x: x + big)(jnp.ones(1, jnp.int64)).tolist() == [2**40 + 1]
    x = jnp.ones(4, jnp.float32)
    assert to_jax(lambda x: x[1:].long() + (2**31 - 1) - 1)(x).tolist() == [2**31 - 1] * 3
    assert to_jax(lambda x: x + 2**40)(x).tolist() == [2.0**40] * 4
    assert to_jax(lambda x: x.to(torch.uint32) * 0 + (2**32 - 1))(x).tolist() == [2**32 - 1] * 4
    drawn = to_jax(lambda x: torch.empty_like(x).random_(), rng=True)(jax.random.key(0), x)
    assert (drawn >= 0).all()
