"""What `to_jax` can't lower is refused by name, with what to do instead."""

import jax.numpy as jnp
import pytest
import torch
from torch.fx.experimental import proxy_tensor

from functx._errors import LoweringError
from functx.compat import to_jax
from functx.compat._lowering import _table
from functx.compat._lowering._check import check
from functx.compat._lowering._trace import Spec, trace

SPEC = Spec((3,), torch.float32)
STATE = {"seen": torch.zeros(3)}


def replaces(x):
    STATE["seen"] += 0
    return x


def untraced(x):
    """With the tracer off, as a transform that bakes its inputs in would run it."""
    with proxy_tensor.disable_proxy_modes_tracing():
        return torch.sin(x)


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda x: x * x.sum().item(), LoweringError, ["_local_scalar_dense"]),
        (lambda x: x if x.sum() > 0 else -x, LoweringError, ["_local_scalar_dense"]),
        (lambda x: x[x > 0], LoweringError, ["index"]),
        (torch.nonzero, LoweringError, ["nonzero"]),
        (torch.unique, LoweringError, ["unique"]),
        (
            lambda x: torch.special.airy_ai(x) + torch.hash_tensor(x),
            LoweringError,
            ["special_airy_ai", "hash_tensor"],  # all that is missing
        ),
        (
            lambda x: torch.tensor_split(x, torch.tensor([1, 2])),
            LoweringError,
            ["as Python numbers"],
        ),
        (
            lambda x: x.to(torch.float8_e4m3fnuz),
            LoweringError,
            ["JAX has no counterpart of torch.float8_e4m3fnuz"],
        ),
        (torch.nn.Dropout(0.5).forward, LoweringError, ["rng=True"]),
        (lambda x: STATE["seen"].add_(x), LoweringError, ["closes over"]),
        (replaces, LoweringError, ["closes over"]),
        (lambda x: object(), TypeError, ["returned a object"]),
    ],
)
def test_a_function_that_can_not_be_lowered_is_refused_by_name(f, error, words):
    with pytest.raises(error) as caught:
        to_jax(f)(jnp.ones(3))
    for word in words:
        assert word in str(caught.value)
    assert STATE["seen"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((jnp.ones(2), torch.ones(2)), {}, TypeError, r"argument at \[0\]\[1\] is a torch tensor"),
        ((jnp.ones(2), {1, 2}), {}, TypeError, "neither an array nor hashable"),
        ((jnp.ones(2, jnp.int4), 1), {}, LoweringError, "torch has no counterpart"),
        ((jnp.ones(2), 1), {"rng": True}, TypeError, r"jax\.random key"),
    ],
)
def test_an_argument_that_can_not_be_lowered_is_refused(args, options, error, message):
    with pytest.raises(error, match=message):
        to_jax(lambda x, y: x + 1, **options)(*args)


@pytest.mark.parametrize("bad", [3, "f", torch.ones(2), None])
def test_what_is_no_function_is_refused(bad):
    with pytest.raises(TypeError, match="torch function, module or exported program"):
        to_jax(bad)


def test_batch_norm_in_training_is_refused():
    params, fn = to_jax(torch.nn.BatchNorm1d(2))
    with pytest.raises(LoweringError, match=r"module\.eval\(\)") as caught:
        fn(params, jnp.ones((3, 2)))
    assert "buffers=True" in str(caught.value)


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


def test_a_rule_of_the_wrong_shape_is_refused(monkeypatch):
    to_jax(torch.sinh)(jnp.ones(3))
    monkeypatch.setitem(_table._rules, "aten::sinh", _table.Rule(lambda x: x[:1]))
    with pytest.raises(LoweringError, match=r"gave shape \(1,\)"):
        to_jax(lambda x: torch.sinh(x))(jnp.ones(3))
