"""When `to_jax` traces a function again, and what it reads at each call without doing so."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from functx._errors import LoweringError
from functx.compat import to_jax

from ..helpers import arrays, assert_close


class Log:
    """Compared by identity, so that filling it does not count as another environment."""

    def __init__(self):
        self.traces = []


def test_new_shapes_dtypes_and_statics_trace_again():
    log = Log()

    def g(x, flag):
        log.traces.append((tuple(x.shape), x.dtype, flag))
        return x + 1 if flag else x - 1

    h = to_jax(g)
    for x in (jnp.ones(2), jnp.ones(3), jnp.ones(3, jnp.float16), jnp.ones(3)):
        h(x, True)
    np.testing.assert_array_equal(h(jnp.ones(3), False), np.zeros(3))
    np.testing.assert_array_equal(h(jnp.ones(3), 1), 2 * np.ones(3))
    assert log.traces == [
        ((2,), torch.float32, True),
        ((3,), torch.float32, True),
        ((3,), torch.float16, True),
        ((3,), torch.float32, False),
        ((3,), torch.float32, 1),  # which is not True
    ]


def test_what_is_closed_over_is_read_at_each_call():
    w = torch.ones(3)
    h = to_jax(lambda x: x * w)
    assert h(jnp.ones(3)).tolist() == [1, 1, 1]
    w.mul_(2)
    assert h(jnp.ones(3)).tolist() == [2, 2, 2]
    w = torch.zeros(3)
    assert h(jnp.ones(3)).tolist() == [0, 0, 0]
    scale = 1
    h = to_jax(lambda x: x * scale)
    assert h(jnp.ones(3)).tolist() == [1, 1, 1]
    scale = 2
    assert h(jnp.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_writes_past_the_version_counter_are_seen(dtype):
    """Through ``.data``, as initialisation and clipping do, and to inference tensors."""
    w = torch.tensor([1, 0, 1], dtype=dtype)
    with torch.inference_mode():
        v = torch.zeros(3, dtype=dtype)
    h = to_jax(lambda: (w * 1, v * 1))
    h()
    w.data.zero_()
    with torch.inference_mode():
        v.fill_(1)
    assert [x.tolist() for x in h()] == [[0, 0, 0], [1, 1, 1]]


def test_a_module_is_read_at_each_call():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).eval()
    h = to_jax(lambda x: net(x))
    x = torch.ones(1, 2)
    assert_close(h(arrays(x)), net(x))
    with torch.no_grad():
        net[0].bias.add_(1)
    assert_close(h(arrays(x)), net(x))
    net[0].weight = torch.nn.Parameter(torch.ones(2, 2))
    assert_close(h(arrays(x)), net(x))
    net.train()
    with pytest.raises(LoweringError, match="need a key"):
        h(arrays(x))


def test_a_counter_that_is_only_increased_traces_nothing_again():
    appended, counts, n = [], {"n": 0}, 0

    def f(x):
        nonlocal n
        appended.append(x.shape)
        counts["n"] += 1
        n += 1
        return x * 2

    h = to_jax(f)
    for size, expected in ((3, 1), (3, 1), (4, 2), (3, 2)):
        h(jnp.ones(size))
        assert (len(appended), counts["n"], n) == (expected,) * 3


def test_ambient_settings_trace_again():
    h = to_jax(lambda x: x @ x)
    x = jnp.ones((2, 2))
    assert h(x).dtype == jnp.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert h(x).dtype == jnp.bfloat16
    assert h(x).dtype == jnp.float32
    with torch.no_grad():  # JAX differentiates, whatever torch's mode
        assert float(jax.grad(to_jax(torch.sin))(0.0 * jnp.ones(()))) == 1


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
