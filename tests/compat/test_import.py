"""Importing ``functx.compat`` needs no JAX, imports none, and changes nothing in torch."""

import shutil
import subprocess
import sys

import pytest

NO_JAX = """
import importlib.util, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] == "jax" else real(name, *a)
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["functx", "functx.compat", "functx.compat.random"])
def test_jax_is_not_imported(module):
    done = run(f"import sys, {module}; assert 'jax' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_the_check_can_fail():
    assert run("import sys, jax; assert 'jax' not in sys.modules").returncode != 0


@pytest.mark.parametrize("name", ["to_jax", "from_jax", "module_from_jax", "crosscheck"])
def test_without_jax(name):
    done = run(NO_JAX + f"import functx.compat\nfunctx.compat.{name}")
    assert "ImportError" in done.stderr
    assert "pip install 'functx[jax]'" in done.stderr
    assert "functx[cuda]" in done.stderr


def test_random_numbers_do_without_jax():
    code = """
import torch
from functx.compat import random
keys = random.split(random.key(0), 3)
x = torch.vmap(lambda key: random.dropout(key, random.normal(key, (4,)), 0.1))(keys)
assert x.shape == (3, 4)
try:
    random.to_jax(keys)
except ImportError as error:
    assert "pip install" in str(error)
else:
    raise AssertionError
"""
    done = run(NO_JAX + code)
    assert done.returncode == 0, done.stderr


def test_unknown_name():
    import functx.compat

    with pytest.raises(AttributeError, match="no_such_name"):
        functx.compat.no_such_name  # noqa: B018
    assert "to_jax" in dir(functx.compat)


BEFORE_AND_AFTER = """
import warnings
import torch
from torch.utils.data import DataLoader, TensorDataset

BACKEND = {backend!r}

def f(x):
    return torch.nn.functional.gelu(x).sin().sum()

def seen():
    torch.compiler.reset()
    x = torch.linspace(-1, 1, 12, requires_grad=True)
    graphs = []
    def backend(module, inputs):
        graphs.append(len(module.graph.nodes))
        return module
    torch.compile(f, backend=backend, fullgraph=True)(x)
    compiled = torch.compile(f, backend=BACKEND, fullgraph=True)
    out = compiled(x)
    (gradient,) = torch.autograd.grad(out, x)
    torch.manual_seed(0)
    with torch.random.fork_rng():
        inside = torch.rand(3).tolist()
    after = torch.rand(3).tolist()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=3, pin_memory=True)
        batches = [batch[0].tolist() for batch in loader]
    return {{
        "graphs": graphs,
        "compiled": out.item(),
        "gradient": gradient.tolist(),
        "fork_rng": (inside, after),
        "loader": batches,
        "warnings": [str(w.message) for w in caught],
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "modes": torch.overrides._get_current_function_mode_stack(),
        "tensor": (dir(torch.Tensor), torch.Tensor.__add__, torch.Tensor.numpy),
        "apply": torch.autograd.Function.apply,
        "call": torch.nn.Module.__call__,
        "functions": [torch.add, torch.tensor, torch.manual_seed, torch.vmap, torch.compile],
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }}

names = dir(torch)
before = seen()
{imports}
after = seen()
different = [key for key in before if before[key] != after[key]]
assert not different, different
assert names == [name for name in dir(torch) if name in names]
"""
IMPORT = """
import functx.compat
from functx.compat import crosscheck, from_jax, random, testing, to_jax
"""
USE = """
import jax
w, x = torch.randn(3, 3), torch.randn(4, 3)
crosscheck(lambda w, x: torch.tanh(x @ w).sum(), w, x).assert_agrees()
to_jax(torch.sin)(jax.numpy.ones(3))
from_jax(jax.numpy.sin)(torch.ones(3))
random.dropout(random.key(0), x)
"""


def test_torch_is_as_before():
    done = run(BEFORE_AND_AFTER.format(backend="aot_eager", imports=IMPORT + USE))
    assert done.returncode == 0, done.stderr


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_stock_compile_is_as_before():
    done = run(BEFORE_AND_AFTER.format(backend="inductor", imports=IMPORT + USE))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ("torch.set_default_dtype(torch.float64)", "dtype"),
        ("torch.overrides.TorchFunctionMode().__enter__()", "modes"),
    ],
)
def test_the_comparison_can_fail(change, seen):
    done = run(BEFORE_AND_AFTER.format(backend="eager", imports=change))
    assert done.returncode != 0
    assert seen in done.stderr or "Error" in done.stderr
