"""Importing ``functx.compat`` needs no JAX, imports none, and changes nothing in torch."""

import subprocess
import sys

NO_JAX = 'import sys; sys.modules["jax"] = sys.modules["jaxlib"] = None\n'


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_without_jax_names_say_what_to_install():
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

assert not hasattr(functx.compat, "no_such_name") and "to_jax" in dir(functx.compat)
for name in ("to_jax", "from_jax", "module_from_jax", "crosscheck"):
    told(lambda: getattr(functx.compat, name))
keys = random.split(random.key(0), 3)
x = torch.vmap(lambda key: random.dropout(key, random.normal(key, (4,)), 0.1))(keys)
assert x.shape == (3, 4)
told(lambda: random.to_jax(keys))
"""
    done = run(NO_JAX + code)
    assert done.returncode == 0, done.stderr


def test_functx_compat_works_after_an_import_of_functx_alone():
    """The README writes ``functx.compat``; it is loaded when it is asked for, and JAX later."""
    code = """
import functx, pickle, sys
assert "functx.compat" not in sys.modules and "compat" in dir(functx)
assert not hasattr(functx, "compact")
everything = {}
exec("from functx import *", everything)
assert "compat" not in everything and "functx.compat" not in sys.modules
compat = functx.compat
assert compat is sys.modules["functx.compat"] and compat is functx.compat
from functx import compat as again
import functx.compat as and_again
assert again is compat is and_again
assert functx.compat.random.key(0) is not None
assert pickle.loads(pickle.dumps(functx.compat.random.key)) is functx.compat.random.key
assert "jax" not in sys.modules or sys.modules["jax"] is None
"""
    for first in ("", NO_JAX):
        done = run(first + code)
        assert done.returncode == 0, done.stderr


BEFORE_AND_AFTER = """
import torch

def f(x):
    return torch.nn.functional.gelu(x).sin().sum()

def seen():
    torch.compiler.reset()
    x, graphs = torch.linspace(-1, 1, 12, requires_grad=True), []
    def backend(module, inputs):
        graphs.append(len(module.graph.nodes))
        return module
    torch.compile(f, backend=backend, fullgraph=True)(x)
    out = torch.compile(f, backend="aot_eager", fullgraph=True)(x)
    return {
        "graphs": graphs,
        "compiled": (out.item(), torch.autograd.grad(out, x)[0].tolist()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "modes": torch.overrides._get_current_function_mode_stack(),
        "tensor": (dir(torch.Tensor), torch.Tensor.__add__, torch.Tensor.numpy),
        "classes": (torch.autograd.Function.apply, torch.nn.Module.__call__),
        "functions": [torch.add, torch.tensor, torch.manual_seed, torch.vmap, torch.compile],
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }

names = dir(torch)
def different():
    after = seen()
    return {key for key in before if before[key] != after[key]}

before = seen()
import functx.compat
from functx.compat import crosscheck, from_jax, random, testing, to_jax
import jax
w, x = torch.randn(3, 3), torch.randn(4, 3)
crosscheck(lambda w, x: torch.tanh(x @ w).sum(), w, x).assert_agrees()
to_jax(torch.sin)(jax.numpy.ones(3))
from_jax(jax.numpy.sin)(torch.ones(3))
random.dropout(random.key(0), x)
assert not different(), different()
assert names == [name for name in dir(torch) if name in names]

# The comparison can fail.
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("high")
torch.Tensor.numpy = lambda t: None
assert different() >= {"dtype", "precision", "tensor"}, different()
"""


# Slow: a process of its own, which compiles.
def test_torch_is_as_it_was_before_the_import():
    done = run(BEFORE_AND_AFTER)
    assert done.returncode == 0, done.stderr
