"""Lowered functions on several devices: sharded and donated arguments, ``shard_map``, AOT, export.

In a process of its own, since the number of host devices is set when JAX starts.
"""

import json
import os
import subprocess
import sys

import pytest

SETUP = """
import jax, jax.numpy as jnp, numpy as np, torch, functx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from functx.compat import to_jax

assert len(jax.devices()) == 4
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0]

def loss(w, x):
    h = functx.remat(lambda w, x: torch.tanh(x @ w))(w, x)
    return (Scaled.apply(h) ** 2).sum()

f = to_jax(loss)
w = jnp.asarray(np.random.RandomState(0).randn(8, 8), jnp.float32) / 3
x = jnp.asarray(np.random.RandomState(1).randn(16, 8), jnp.float32)
expected = np.asarray(jax.grad(f)(w, x))
"""

CASES = {
    "sharded arguments": """
got = jax.jit(jax.grad(f))(jax.device_put(w, whole), jax.device_put(x, rows))
np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
out = jax.jit(to_jax(lambda w, x: torch.tanh(x @ w)))(w, jax.device_put(x, rows))
assert out.sharding.is_equivalent_to(rows, 2)
eager = jax.grad(f)(jax.device_put(w, whole), jax.device_put(x, rows))
np.testing.assert_allclose(eager, expected, rtol=1e-4, atol=1e-4)
""",
    "shard_map": """
@jax.jit
def step(w, x):
    def local(w, x):
        return jax.lax.psum(jax.grad(f)(w, x), "data")
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                         check_vma=False)(w, x)
np.testing.assert_allclose(step(w, x), expected, rtol=1e-4, atol=1e-4)

def total(w, x):
    def local(w, x):
        return jax.lax.psum(f(w, x), "data")
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)
np.testing.assert_allclose(jax.grad(total)(w, x), expected, rtol=1e-4, atol=1e-4)
""",
    "donated arguments": """
step = jax.jit(lambda w, x: w - 0.1 * jax.grad(f)(w, x), donate_argnums=0)
given = jax.device_put(w + 0, whole)
new = step(given, jax.device_put(x, rows))
np.testing.assert_allclose(new, w - 0.1 * expected, rtol=1e-4, atol=1e-4)
assert given.is_deleted()
""",
    "ahead of time": """
compiled = jax.jit(jax.grad(f)).lower(
    jax.ShapeDtypeStruct(w.shape, w.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)
).compile()
np.testing.assert_allclose(compiled(w, x), expected, rtol=1e-4, atol=1e-4)
exported = jax.export.export(jax.jit(f))(w, x)
np.testing.assert_allclose(exported.call(w, x), f(w, x), rtol=1e-5)
""",
    "vmap over devices": """
out = jax.vmap(jax.grad(f), (None, 0), spmd_axis_name="data")
got = jax.jit(out)(w, jax.device_put(x.reshape(4, 4, 8), rows)).sum(0)
np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
""",
}


RUN = """
import json, sys, traceback
failures = {}
for name, code in json.load(sys.stdin).items():
    try:
        exec(code, dict(globals()))
    except BaseException:
        failures[name] = traceback.format_exc()
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def failures():
    """What each case raised, of one process: it takes longer to start than any case."""
    four = "--xla_force_host_platform_device_count=4"
    flags = {
        "XLA_FLAGS": f"{four} {os.environ.get('XLA_FLAGS', '')}",
        "JAX_PLATFORMS": "cpu",
    }
    broken = {"a case that fails": "assert len(jax.devices()) == 5"}
    run = subprocess.run(
        [sys.executable, "-c", SETUP + RUN],
        input=json.dumps(CASES | broken),
        capture_output=True,
        text=True,
        env=os.environ | flags,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_on_four_devices(name, failures):
    assert name not in failures, failures[name]


def test_a_case_can_fail(failures):
    assert "AssertionError" in failures["a case that fails"]
