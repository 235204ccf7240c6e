"""The house rules: layers, private names, optional JAX, short files. Every check can fail."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import house
import pytest

# Lowest first. A module imports from its own layer and those below it. The longest entry counts: a
# package alone is its `__init__.py` and every module of it without an entry of its own.
LAYERS = [
    ("functx._errors", "functx._arrays", "functx._torch", "functx._torch_compiler"),
    ("functx._torch_fake",),
    (
        "functx._torch_operators",
        "functx._torch_modules",
        "functx._torch_modes",
        "functx._torch_memory",
        "functx._torch_globals",
        "functx._torch_kernels",
        "functx._torch_vmap",
        "functx._torch_edges",
        "functx._torch_nodes",
        "functx._torch_observed",
        "functx._torch_scripted",
    ),
    ("functx._torch_norms", "functx._statistics"),
    ("functx._tree", "functx._validate", "functx._policies", "functx._where", "functx._unwritten"),
    ("functx._policy_kinds", "functx._offload", "functx._forward"),
    ("functx.checkpoint_policies",),
    ("functx._places", "functx._pictures", "functx._padding"),
    ("functx._storages", "functx._traced", "functx.memory"),
    (
        "functx._remat._code_names",
        "functx._remat._much_memory",
        "functx._remat._levels",
        "functx._remat._options",
        "functx._remat._past_torch",
        "functx._remat._slots",
        "functx._remat._whose",
        "functx._remat._alike",
        "functx._remat._cond",
        "functx._remat._tapes",
    ),
    (
        "functx._remat._holders",
        "functx._remat._of_a_run",
        "functx._remat._reached",
        "functx._remat._really_held",
    ),
    ("functx._remat._one_by_one", "functx._remat._follows"),
    ("functx._remat._partial",),
    ("functx._remat._in_turn", "functx._remat._hung_inside"),
    (
        "functx._remat._aliases",
        "functx._remat._apart",
        "functx._remat._packed",
        "functx._remat._arguments",
        "functx._remat._by_name",
        "functx._remat._callers_own",
        "functx._remat._cells",
        "functx._remat._containers",
        "functx._remat._depth",
        "functx._remat._hung_on_given",
        "functx._remat._in_parts",
        "functx._remat._named_arrays",
        "functx._remat._observers",
        "functx._remat._parts_of_given",
        "functx._remat._python_random",
        "functx._remat._unseen",
        "functx._remat._wrappers",
        "functx._remat._written_back",
    ),
    ("functx._remat._contents_by_place",),
    ("functx._remat._reached_by_hooks", "functx._remat._state_of_hooks"),
    ("functx._remat._contents", "functx._remat._come_by", "functx._remat._bound"),
    ("functx._remat._keepers", "functx._remat._read_results"),
    ("functx._remat._taken_off", "functx._remat._module_hooks"),
    (
        "functx._remat._profile",
        "functx._remat._within_reach",
        "functx._remat._custom",
        "functx._remat._watch",
    ),
    (
        "functx._remat._writes",
        "functx._remat._escape",
        "functx._remat._gradients",
        "functx._remat._given",
        "functx._remat._hung_at_ends",
        "functx._remat._module_state",
        "functx._remat._per_thread",
        "functx._remat._advanced",
        "functx._remat._large_arrays",
        "functx._remat._rare",
        "functx._remat._ways",
    ),
    ("functx._remat._entry", "functx._remat._functions", "functx._remat._stored"),
    ("functx._remat._answers", "functx._remat._users_code"),
    ("functx._remat._tracker",),
    ("functx._remat._scripted", "functx._remat._one_example"),
    (
        "functx._remat._parts",
        "functx._remat._saving",
        "functx._remat._step",
    ),
    ("functx._remat._asked", "functx._remat._live", "functx._remat._tangents"),
    ("functx._remat._checksum", "functx._remat._computed", "functx._remat._read_by"),
    ("functx._remat._written_since", "functx._remat._record"),
    ("functx._remat._ledger", "functx._remat._known_runs"),
    ("functx._remat._prune", "functx._remat._letting_go"),
    ("functx._remat._leaving", "functx._remat._constant"),
    ("functx._remat._whole",),
    ("functx._pullback", "functx._jacobian", "functx._transforms", "functx._vmap"),
    ("functx._linearize",),
    (
        "functx._remat._departure",
        "functx._remat._interrupted",
        "functx._remat._room",
    ),
    ("functx._remat._lines",),
    ("functx._remat._straight_line",),
    ("functx._remat._known_pullbacks",),
    ("functx._remat._replay", "functx._remat._lenient"),
    ("functx._remat._recording",),
    ("functx._remat._region", "functx._remat._kept_inside"),
    ("functx._remat._environment", "functx._remat._operator"),
    ("functx._remat._overwritten",),
    ("functx._remat._about_gradients",),
    ("functx._remat._foreign",),
    ("functx._remat._asking",),
    ("functx._remat._compared",),
    ("functx._remat._other_names",),
    ("functx._remat._capture", "functx._remat._pullback"),
    ("functx._remat._by_sight", "functx._remat._recording_run"),
    ("functx._remat._dual_level", "functx._remat._names"),
    ("functx._remat._pulled_back",),
    ("functx._remat._node",),
    ("functx._remat._rules",),
    ("functx._remat._function",),
    ("functx._remat._module",),
    ("functx._remat",),
    ("functx._transformers",),
    ("functx._checkpoint",),
    ("functx._apply", "functx._patch"),
    ("functx._schedules",),
    ("functx._while",),
    ("functx._loops", "functx._sequential"),
    ("functx._chain",),
    ("functx._costs",),
    ("functx._plan",),
    ("functx._origins", "functx._labels", "functx._residuals"),
    ("functx._saved",),
    ("functx._flags",),
    ("functx._program",),
    ("functx._generator_watch",),
    ("functx._record",),
    ("functx._rows",),
    ("functx._surroundings",),
    ("functx._unforeseen",),
    ("functx._budget",),
    ("functx.per_sample",),
    ("functx",),
    ("functx.compat._torch", "functx.compat._jax", "functx.compat._counters"),
    ("functx.compat._environment",),
    ("functx.compat._lowering",),
    ("functx.compat",),
    ("functx._demo",),
    ("functx.__main__",),
]

# Who may use private torch names, and why.
PRIVATE_TORCH = {
    "functx._torch": "the one place for them",
    "functx._torch_globals": "its part about what users set for a process",
    "functx._torch_nodes": "its part about hooks on nodes, and leaves",
    "functx._torch_modules": "those of modules",
    "functx._torch_modes": "entering and leaving modes",
    "functx._torch_memory": "those of memory, for many tensors at a time",
    "functx._torch_fake": "fake tensors, in one place",
    "functx._torch_kernels": "flags that choose kernels",
    "functx._torch_vmap": "those of torch's older vmap",
    "functx._torch_norms": "batching rules that it replaces",
    "functx._torch_compiler": "its part about the compiler and checkpoint",
    "functx._torch_observed": "what torch asks while a region runs",
    "functx._torch_operators": "its part about operators",
    "functx._tree": "torch's pytrees have no public name; this file is their one place",
    "functx.compat._torch": "the one place for them on the JAX side",
    "functx._torch_scripted": "TorchScript",
}
PRIVATE_JAX = {"functx.compat._jax": "the one place for them"}

MAY_IMPORT_JAX = ("functx.compat", "functx._demo")

SOURCES = {name: path.read_text() for name, path in house.sources().items()}
PACKAGES = {name for name, path in house.sources().items() if path.name == "__init__.py"}
OWN = set().union(*(house.own_names(source) for source in SOURCES.values()))


def test_nothing_imports_from_above():
    assert not house.upward_imports(SOURCES, LAYERS, PACKAGES)


@pytest.mark.parametrize("statement", ["import b", "from b import x", "def f():\n    import b.c"])
def test_upward_import_is_found(statement):
    found = house.upward_imports({"a": statement, "b": "import a"}, [("a",), ("b",)], {"a", "b"})
    assert found == ["a -> b"]


def test_relative_upward_import_is_found():
    sources = {"p": "", "p.a": "from . import b\nfrom .b import x", "p.b": ""}
    assert house.upward_imports(sources, [("p", "p.a"), ("p.b",)], {"p"}) == ["p.a -> p.b"] * 2


def test_imports_for_the_type_checker_do_not_count():
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b"
    assert not house.upward_imports({"a": source, "b": ""}, [("a",), ("b",)], set())


def test_a_module_without_layer_is_an_error():
    with pytest.raises(LookupError, match="stranger"):
        house.upward_imports({"stranger": ""}, LAYERS, set())


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_private_names_are_in_one_place(module):
    if module not in PRIVATE_TORCH:
        assert not house.private_names(SOURCES[module], "torch")
    if module not in PRIVATE_JAX:
        assert not house.private_names(SOURCES[module], "jax")
        assert not house.private_names(SOURCES[module], "jaxlib")
    if module not in PRIVATE_TORCH and module not in PRIVATE_JAX:
        assert not house.foreign_private_attributes(SOURCES[module], OWN)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch._C import x",
        "from torch.utils import _pytree",
        "from torch.autograd.graph import _engine_run_backward as run",
        "import torch\nx = torch._C._functorch.peek_interpreter_stack()",
        "def f():\n    from torch.utils._python_dispatch import TorchDispatchMode",
    ],
)
def test_private_name_is_found(source):
    assert house.private_names(source, "torch")


def test_private_attribute_is_found():
    assert house.foreign_private_attributes("node._sequence_nr()", {"_mine"}) == {"_sequence_nr"}
    assert not house.foreign_private_attributes("self._mine; type(x).__name__", {"_mine"})


def test_every_exception_is_needed():
    for module in PRIVATE_TORCH:
        assert house.private_names(SOURCES[module], "torch"), f"{module} needs no exception"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_jax_is_imported_where_it_may(module):
    if not module.startswith(MAY_IMPORT_JAX):
        used = {name for name in house.imports(SOURCES[module]) if name.split(".")[0] == "jax"}
        assert not used


def loaded_by(statements: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after ``statements``."""
    code = f"{statements}\nimport sys\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in run.stdout.split()}


def test_imports_load_no_optional_package():
    """One process imports all of them: it takes seconds to start."""
    optional = {"jax", "jaxlib", "sklearn", "matplotlib", "rich"}
    modules = ("functx", "functx.compat", "functx.memory", "functx.__main__")
    loaded = loaded_by(f"import {', '.join(modules)}")
    assert "functx" in loaded
    assert not loaded & optional


def test_the_check_for_jax_can_fail():
    assert "jax" in loaded_by("import functx, jax")


def test_packages_are_all_installed():
    listed = tomllib.loads((house.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(listed["packages"]) == PACKAGES


@pytest.mark.parametrize("folder", ["functx", "compat", "tests", "bench"])
def test_files_are_short(folder):
    long = {
        str(path.relative_to(house.ROOT)): lines
        for path in (house.ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_makefile():
    makefile = (house.ROOT / "Makefile").read_text()
    for target in ("demo", "test", "lint", "bench", "sweep", "gpu", "help"):
        assert f"\n{target}:" in makefile
    assert "://" not in makefile  # where packages come from is the machine's business
    assert "\nmake test\n" in (house.ROOT / ".ci" / "run").read_text()


def test_what_needs_a_gpu_is_where_make_gpu_looks():
    """It collects few files: the others may import what is not installed there."""
    mark = "mark." + "gpu"
    files = {p for p in (house.ROOT / "tests").rglob("*.py") if mark in p.read_text()}
    folders = {str(path.parent.relative_to(house.ROOT)) for path in files}
    assert folders <= {"tests", "tests/gpu"}
    assert "tests/gpu \\\n" in (house.ROOT / "Makefile").read_text()
