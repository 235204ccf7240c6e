"""The private names that ``compat`` relies on exist, and are imported in one file."""

import ast
import pathlib

import pytest

import functx.compat
from functx.compat import _torch

HERE = pathlib.Path(functx.compat.__file__).parent
FILES = sorted(HERE.rglob("*.py"))


@pytest.mark.parametrize("name", _torch.__all__)
def test_a_private_name_of_torch_exists(name):
    assert getattr(_torch, name) is not None


def private_imports(source):
    """Modules with a private part, of torch or JAX, that a file imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            root, *rest = name.split(".")
            private = any(p.startswith("_") and p != "__future__" for p in rest)
            if root in ("torch", "jax", "jaxlib") and (private or "experimental" in rest):
                found.append(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_private_names_live_in_one_file(path):
    if path.name not in ("_torch.py", "_jax.py"):
        assert not private_imports(path.read_text())
    assert private_imports("from torch._ops import OpOverload\nimport jax._src.core")
