"""Importing ``functx.compat`` needs no JAX, imports none, and changes nothing in torch."""

import re
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


def test_jax_is_not_imported():
    """A process costs seconds, so one imports all of them, the smallest first."""
    modules = ("functx", "functx.compat", "functx.compat.random")
    done = run(
        "import sys" + "".join(f"; import {m}; assert 'jax' not in sys.modules" for m in modules)
    )
    assert done.returncode == 0, done.stderr


def test_the_check_can_fail():
    assert run("import sys, jax; assert 'jax' not in sys.modules").returncode != 0


def test_without_jax():
    """Names that need JAX say what to install; random numbers do without."""
    code = """
import torch
import functx.compat
from functx.compat import random

def told(get):
    try:
        get()
    except ImportError as error:
        assert "pip install 'functx[jax]'" in str(error) and "functx[cuda]" in str(error)
    else:
        raise AssertionError

for name in ("to_jax", "from_jax", "module_from_jax", "crosscheck"):
    told(lambda: getattr(functx.compat, name))
keys = random.split(random.key(0), 3)
x = torch.vmap(lambda key: random.dropout(key, random.normal(key, (4,)), 0.1))(keys)
assert x.shape == (3, 4)
told(lambda: random.to_jax(keys))
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


def test_the_comparison_can_fail():
    change = """
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("high")
torch.Tensor.numpy = lambda t: None
"""
    done = run(BEFORE_AND_AFTER.format(backend="eager", imports=change))
    assert done.returncode != 0
    (different,) = re.findall(r"AssertionError: \[(.*)\]", done.stderr)
    assert {"'dtype'", "'precision'", "'tensor'"} <= set(different.split(", "))
