"""Reads the source: what imports what, and which private names of other libraries are used."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sources():
    """Every module that is installed, by its dotted name."""
    found = {}
    for package, folder in (("functx", "functx"), ("functx.compat", "compat")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


@functools.cache
def nodes(source):
    return [*ast.walk(ast.parse(source))]


def dotted(node):
    """``a.b.c``, of an attribute of a name; of anything else nothing."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imports(source):
    """Dotted names that ``source`` imports, wherever it does: ``from a import b`` gives ``a.b``."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "an import is absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private(name):
    """Whether one part of a dotted name starts with an underscore, dunders aside."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_names(source, library):
    """Private names of ``library`` that ``source`` imports or reaches by attribute."""
    found = {name for name in imports(source) if name.split(".")[0] == library}
    for node in nodes(source):
        if isinstance(node, ast.Attribute):
            chain = dotted(node)
            if chain.startswith(f"{library}.") and not chain.startswith(f"{library}.ops."):
                found.add(chain)
    return {name for name in found if is_private(name)}


def private_attributes(source):
    """Private attributes that ``source`` reads of whatever has them: ``node._sequence_nr``."""
    return {
        node.attr
        for node in nodes(source)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and is_private(node.attr)
        and not dotted(node).startswith("torch.ops.")
    }


def own_names(source):
    """Private names that ``source`` gives to something."""
    names = set()
    for node in nodes(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.split(".")[-1])
    return {name for name in names if name and name.startswith("_")}


# Wings: the modules in each, and the lines that it may have at most.
WINGS = {
    "engine": (("functx._remat",), 4_540),
    "transforms": (
        (
            *("functx._transforms", "functx._jacobians", "functx._vmap", "functx._reverse_mode"),
            *("functx._dead_wrappers", "functx._arrays", "functx._tree", "functx._validate"),
            *("functx._errors", "functx._lines", "functx"),
            "functx._objects",
        ),
        1_390,
    ),
    "normalisations": (("functx._norms",), 150),
    "policies": (
        (
            *("functx._save_policies", "functx._aten", "functx.checkpoint_policies"),
            *("functx._offload", "functx._names"),
        ),
        600,
    ),
    "insight": (
        (
            *("functx._residuals", "functx.memory", "functx._storages", "functx._tensor_names"),
            "functx._pictures",
        ),
        1_020,
    ),
    "whole models": (
        (
            *("functx._plan", "functx._chain", "functx._costs", "functx._recording"),
            *("functx._apply", "functx._submodules", "functx._patch", "functx._checkpoint"),
            "functx._distributed",
        ),
        1_564,
    ),
    "loops": (("functx._loops", "functx._while", "functx._schedules"), 600),
    "per_sample": (("functx.per_sample",), 2_680),
    "jit, graph": (("functx._jit", "functx.graph"), 1_420),
    "private torch": (("functx._torch",), 781),
    "command line, demo": (("functx.__main__", "functx._command", "functx._demo"), 1_360),
    "compat": (("functx.compat",), 11_000),
}


def wing_of(module):
    """The wing of a module: that which names it, or else a package around it."""
    while module:
        for wing, (modules, _) in WINGS.items():
            if module in modules:
                return wing
        module = module.rpartition(".")[0]
    raise LookupError(module)


def lines(wing):
    return sum(
        len(path.read_text().splitlines())
        for module, path in sources().items()
        if wing_of(module) == wing
    )


def picture():
    """Which wing imports which, as a diagram in mermaid."""
    known = sources()
    edges = {
        (wing_of(module), wing_of(name if name in known else name.rpartition(".")[0]))
        for module, path in known.items()
        if module != "functx"  # which imports all
        for name in imports(path.read_text())
        if name.split(".")[0] == "functx" and name != "functx"
    }
    ids = {wing: re.sub(r"\W+", "_", wing) for wing in WINGS}
    arrows = sorted(f"    {ids[a]} --> {ids[b]}" for a, b in edges if a != b)
    boxes = [f'    {ids[wing]}["{wing}"]' for wing in WINGS]
    return "\n".join(["```mermaid", "graph LR", *boxes, *arrows, "```"])


PAGE = ROOT / "docs" / "architecture.md"


def with_picture(text):
    """The page with the picture of today."""
    before, _, rest = text.partition("<!-- imports -->")
    return f"{before}<!-- imports -->\n{picture()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_picture(PAGE.read_text()))
