"""Importing ``functx.compat`` needs no JAX, imports none, and changes nothing in torch."""

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


def test_torch_is_as_before():
    code = """
import torch
names = dir(torch), dir(torch.Tensor), torch.autograd.Function.apply, torch.nn.Module.__call__
import functx.compat
functx.compat.to_jax
assert names[0] == [n for n in dir(torch) if n in names[0]]
assert names[1] == dir(torch.Tensor)
assert names[2] == torch.autograd.Function.apply and names[3] is torch.nn.Module.__call__
assert not torch.overrides._get_current_function_mode_stack()
with torch.random.fork_rng():
    torch.rand(1)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
