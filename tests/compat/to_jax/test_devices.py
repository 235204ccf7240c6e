"""Lowered functions on several devices: sharded and donated arguments, ``shard_map``, export.

In a process of its own, since the number of host devices is set when JAX starts.
"""

import json
import os
import subprocess
import sys

SETUP = """
import jax, jax.numpy as jnp, numpy as np, torch, functx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from functx.compat import to_jax

assert len(jax.devices()) == 4
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

def loss(w, x):
    h = functx.remat(lambda w, x: torch.tanh(x @ w))(w, x)
    return (h ** 2).sum()

f = to_jax(loss)
w = jnp.asarray(np.random.RandomState(0).randn(8, 8), jnp.float32) / 3
x = jnp.asarray(np.random.RandomState(1).randn(16, 8), jnp.float32)
expected = np.asarray(jax.jit(jax.grad(f))(w, x))
"""

CASES = {
    "from_jax gathers": """
from functx.compat import from_jax
weights = jax.device_put(jnp.arange(4.0), rows)
assert from_jax(lambda: weights * 2)().tolist() == [0, 2, 4, 6]
assert from_jax(lambda w: w * 2)(weights).tolist() == [0, 2, 4, 6]
""",
    "sharded arguments": """
got = jax.jit(jax.grad(f))(jax.device_put(w, whole), jax.device_put(x, rows))
np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
out = jax.jit(to_jax(lambda w, x: torch.tanh(x @ w)))(w, jax.device_put(x, rows))
assert out.sharding.is_equivalent_to(rows, 2)
""",
    "shard_map": """
@jax.jit
def step(w, x):
    def local(w, x):
        return jax.lax.psum(jax.grad(f)(w, x), "data")
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                         check_vma=False)(w, x)
np.testing.assert_allclose(step(w, x), expected, rtol=1e-4, atol=1e-4)
""",
    "donated arguments": """
step = jax.jit(lambda w, x: w - 0.1 * jax.grad(f)(w, x), donate_argnums=0)
given = jax.device_put(w + 0, whole)
new = step(given, jax.device_put(x, rows))
np.testing.assert_allclose(new, w - 0.1 * expected, rtol=1e-4, atol=1e-4)
assert given.is_deleted()
""",
    "export": """
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


# Slow: a process of its own.
def test_a_lowered_function_runs_on_four_devices():
    flags = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"
    fails = {"a case that fails": "assert len(jax.devices()) == 5"}
    run = subprocess.run(
        [sys.executable, "-c", SETUP + RUN],
        input=json.dumps(CASES | fails),
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    failures = json.loads(run.stdout.splitlines()[-1])
    assert failures.keys() == fails.keys(), failures
