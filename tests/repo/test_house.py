"""The rules of the house: one place for private names, one door for each wing, optional JAX."""

import ast
import functools
import re
import subprocess
import sys
import tomllib

import pytest

import functx

from . import house

PRIVATE_TORCH = ("functx._torch",)
PRIVATE_JAX = ("functx.compat._jax",)
COMPAT = ("_backend", "_bridge", "_to_jax", "_from_jax", "_crosscheck")
# The modules of `_torch` are lists of names that may be imported one by one: loading all of them
# takes a while.
WINGS_WITH_A_DOOR = (
    *(f"functx.{name}" for name in house.layers() if name not in ("_torch", "compat")),
    *(f"functx.compat.{name}" for name in COMPAT),
)
MAY_IMPORT_JAX = ("functx.compat", "functx._cli.demo")

# Of objects of torch and Python, which the engine asks for more often than a function could be
# called that hides it.
ATTRIBUTES = {
    *("_is_view", "_version", "_use_count", "_cdata", "_sequence_nr"),  # tensors, memory, nodes
    "_backward_hooks",  # which a backward of torch sets
    *("_schema", "_op", "_has_same_storage_numel", "_efficientzerotensor"),  # operators
    "_new_zeros_with_same_feature_meta",
    *("_call_impl", "_forward_hooks", "_forward_pre_hooks"),  # modules
    *("_current_level", "_getframe", "_fields", "_replace", "_asdict"),
}
SOURCES = {name: path.read_text() for name, path in house.sources().items()}
PACKAGES = {name for name, path in house.sources().items() if path.name == "__init__.py"}
OWN = set().union(*(house.own_names(source) for source in SOURCES.values()))
# Of modules, set past their own:
OWN |= {"_functx_options", "_functx_jit", "_functx_jitted", "_functx_of"}


def is_in(module, packages):
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


@functools.cache
def handed_out(wing):
    """What the ``__init__`` of a wing imports under a name of its own: ``from x import a as a``."""
    aliases = (
        alias
        for node in house.nodes(SOURCES[wing])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
    return {f"{wing}.{alias.asname or alias.name}" for alias in aliases}


def past_a_door(module, source):
    """What a module imports of a wing that it is not in, other than by the wing's ``__init__``."""
    for wing in WINGS_WITH_A_DOOR:
        inner = {name for name in SOURCES if name.startswith(f"{wing}.")}
        if not is_in(module, [wing]):
            for name in house.imports(source):
                if name in handed_out(wing):
                    continue
                if name in inner or name.rpartition(".")[0] in inner:
                    yield name


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_keeps_to_the_rules(module):
    source = SOURCES[module]
    assert not [*past_a_door(module, source)]
    if not is_in(module, PRIVATE_TORCH):
        assert not house.private_names(source, "torch")
    if not is_in(module, PRIVATE_JAX):
        assert not house.private_names(source, "jax") | house.private_names(source, "jaxlib")
    if not is_in(module, PRIVATE_TORCH + PRIVATE_JAX):
        assert not house.private_attributes(source) - OWN - ATTRIBUTES
        assert not [name for name in house.imports(source) if ".experimental" in name]
    if not is_in(module, MAY_IMPORT_JAX):
        assert not [name for name in house.imports(source) if name.split(".")[0] == "jax"]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch._C import x",
        "from torch.utils import _pytree",
        "import torch\nx = torch._C._functorch.peek_interpreter_stack()",
        "def f():\n    from torch.utils._python_dispatch import TorchDispatchMode",
    ],
)
def test_a_private_name_is_found(source):
    assert house.private_names(source, "torch")


def test_a_private_attribute_is_found():
    found = house.private_attributes("node._sequence_nr()\ntype(x).__name__\nself._mine = 1")
    assert found == {"_sequence_nr"}


def test_an_import_past_a_door_is_found():
    for source in ("from functx._remat.node import x", "from functx._remat import node"):
        assert [*past_a_door("functx._budget.plan", source)]
        assert not [*past_a_door("functx._remat.api", source)]
    assert not [*past_a_door("functx._budget.plan", "from functx._remat import remat")]


def loaded_by(statements):
    """Top-level modules that a fresh interpreter has loaded after ``statements``."""
    code = f"{statements}\nimport sys\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in run.stdout.split()}


# Starts an interpreter.
def test_imports_load_no_optional_package():
    modules = ("compat", "compat.random", "memory", "__main__")
    loaded = loaded_by(f"import {', '.join(f'functx.{name}' for name in modules)}")
    assert "functx" in loaded
    assert not loaded & {"jax", "jaxlib", "sklearn", "matplotlib", "rich"}


def test_every_module_is_imported_by_something():
    """Files of rules, which a package imports by listing its folder, and programs aside."""
    used = {name for source in SOURCES.values() for name in house.imports(source)}
    used |= {name.rpartition(".")[0] for name in used}
    unused = {m for m in SOURCES if m not in used and not is_in(m, ["functx.compat._to_jax.rules"])}
    unused -= PACKAGES
    assert unused <= {"functx.__main__", "functx.compat._backend.backend"}


def test_packages_are_all_installed():
    listed = tomllib.loads((house.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(listed["packages"]) == PACKAGES


def test_the_makefile_has_its_targets_and_no_addresses():
    makefile = (house.ROOT / "Makefile").read_text()
    for target in ("demo", "test", "lint", "bench", "sweep", "docs", "gpu", "help"):
        assert f"\n{target}:" in makefile
    assert "://" not in makefile  # where packages come from is the machine's business
    assert "\nmake test\n" in (house.ROOT / ".ci" / "run").read_text()


def test_what_needs_a_gpu_is_where_make_gpu_looks():
    """It collects few files: the others may import what is not installed there."""
    mark = "mark." + "gpu"
    files = {p for p in (house.ROOT / "tests").rglob("*.py") if mark in p.read_text()}
    folders = {str(path.parent.relative_to(house.ROOT)) for path in files}
    assert folders <= {"tests/gpu"}
    assert "-m gpu -W default $(ARGS) tests/gpu" in (house.ROOT / "Makefile").read_text()


def test_help_lists_the_whole_surface():
    missing = [n for n in functx.__all__ if not re.search(rf"\b{n}\b", functx.__doc__)]
    assert not missing


def test_the_page_shows_what_imports_what():
    text = house.PAGE.read_text()
    assert text == house.with_picture(text), "run python -m tests.repo.house"
