"""Each guard of the lowering, made to go off; and what it would let through otherwise."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental import proxy_tensor

import functx
from functx._errors import LoweringError
from functx.compat import to_jax
from functx.compat._environment import environment_of
from functx.compat._kept import kept_by_jax, kept_by_torch
from functx.compat._lowering import _table
from functx.compat._lowering._check import check
from functx.compat._lowering._trace import Spec, trace

from .networks import arrays

SPEC = Spec((3,), torch.float32)


def untraced(f):
    """Run with the tracer off, as a transform that bakes its inputs in would."""

    def run(x):
        with proxy_tensor.disable_proxy_modes_tracing():
            return f(x)

    return run


def test_a_value_that_the_tracer_lost_is_refused():
    lost = untraced(torch.sin)
    with pytest.raises(LoweringError, match="lost track of a value"):
        trace(lambda x: [x + lost(x)], [SPEC])


def test_an_input_that_the_graph_lost_is_refused():
    lost = untraced(torch.sin)

    def f(x):
        lost(x)
        return [torch.ones(3)]

    with pytest.raises(LoweringError, match="inputs \\[0\\]"):
        trace(f, [SPEC])


def test_an_input_that_is_not_used_is_fine():
    check(trace(lambda x, y: [y * 2, torch.ones(x.shape)], [SPEC, SPEC]))


def test_dead_code_is_fine():
    check(trace(lambda x: (torch.sin(x), [torch.ones(3)])[1], [SPEC]))


def test_the_graph_does_not_write():
    def f(x):
        y = x.clone()
        y[0].mul_(2)
        y.relu_()
        torch.add(y, 1, out=y)
        return [y]

    module = trace(f, [SPEC]).module
    assert not any("_." in str(n.target) or "out" in str(n.target).split(".")[-1:] for n in
                   module.graph.nodes if n.op == "call_function")  # fmt: skip


def test_a_rule_of_the_wrong_shape_is_refused(monkeypatch):
    to_jax(torch.sinh)(jnp.ones(3))
    wrong = _table.Rule(lambda x: x[:1])
    monkeypatch.setitem(_table._rules, "aten::sinh", wrong)
    with pytest.raises(LoweringError, match=r"gave shape \(1,\)"):
        to_jax(lambda x: torch.sinh(x))(jnp.ones(3))


def test_two_rules_for_one_operation_are_refused():
    with pytest.raises(ValueError, match="two rules for aten::sin"):
        _table.rule("sin")(jnp.sin)


def test_a_rule_goes_before_a_decomposition():
    assert torch.ops.aten.gelu.default not in _table.decompositions()
    assert torch.ops.aten.silu.default not in _table.decompositions()


def test_unknown_dtype():
    with pytest.raises(LoweringError, match="torch has no counterpart"):
        to_jax(torch.sin)(jnp.ones(3, jnp.int4))
    with pytest.raises(LoweringError, match=r"JAX has no counterpart of torch\.float8_e4m3fnuz"):
        to_jax(lambda x: x.to(torch.float8_e4m3fnuz))(jnp.ones(3))


def test_indices_as_a_tensor_are_refused():
    with pytest.raises(LoweringError, match="as Python numbers"):
        to_jax(lambda x: torch.tensor_split(x, torch.tensor([1, 2])))(jnp.ones(3))


def test_environments():
    w = torch.ones(2)
    scale = 1

    def f(x):
        return x * w * scale

    first = environment_of(f)
    assert environment_of(f) == first
    w.add_(1)
    assert environment_of(f) == first  # values are read at the call
    scale = 2
    assert environment_of(f) != first
    scale = 1
    assert environment_of(f) == first
    w = torch.ones(2)
    assert environment_of(f) != first


def test_ambient_settings_are_part_of_the_environment():
    h = to_jax(lambda x: x @ x)
    x = jnp.ones((2, 2))
    assert h(x).dtype == jnp.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert h(x).dtype == jnp.bfloat16
    assert h(x).dtype == jnp.float32


def test_few_programs_are_kept(monkeypatch):
    monkeypatch.setattr("functx.compat._to_jax._MOST_PROGRAMS", 2)
    w = torch.ones(())
    h = to_jax(lambda x, n: x * w * n)
    for n in range(5):
        assert h(jnp.ones(()), n) == n
    assert len(h._programs) == 2
    for n in range(5):
        w = torch.full((), 2.0)
        assert h(jnp.ones(()), n) == 2 * n
    assert len(h._programs) == len(h._arrays) == 2


def test_a_function_that_is_dropped_is_freed():
    w = torch.ones(3)
    h = to_jax(lambda x: x * w)
    h(jnp.ones(3))
    ref = weakref.ref(h)
    del h
    gc.collect()
    jax.clear_caches()
    gc.collect()
    assert ref() is None


def test_donated_arguments():
    h = jax.jit(to_jax(lambda x: x + 1), donate_argnums=0)
    assert h(jnp.zeros(3)).tolist() == [1, 1, 1]


def test_sharded_arguments():
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh([device], ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.ones((4, 2)), place)
    out = jax.jit(to_jax(lambda x: x @ x.T))(x)
    np.testing.assert_array_equal(out, 2 * np.ones((4, 4)))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3))
def test_kept_bytes_agree_for_any_segmentation(segments, rows):
    ws = [torch.randn(4, 4) for _ in range(sum(segments))]
    x = torch.randn(rows, 4)

    def run(x, *ws):
        for w in ws:
            x = torch.tanh(x @ w)
        return x

    def net(ws, x):
        at = 0
        for n in segments:
            x = functx.remat(run)(x, *ws[at : at + n])
            at += n
        return x.square().sum()

    ours = kept_by_torch(net, (ws, x))
    lowered = to_jax(net)
    theirs = kept_by_jax(
        lambda observe: lambda *args: lowered.observed(observe, *args), arrays((ws, x))
    )
    assert ours == theirs
    assert ours.activations == (len(segments) - 1) * x.nbytes
