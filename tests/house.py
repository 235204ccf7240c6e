"""Reads the source: what imports what, and which private names of other libraries are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def sources() -> dict[str, Path]:
    """Every module that is installed, by its dotted name."""
    found = {}
    for package, folder in (("functx", "functx"), ("functx.compat", "compat")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


def imports(source: str, package: str = "") -> Iterator[str]:
    """Dotted names that ``source`` imports, wherever it does, but for the type checker only.

    ``from a import b`` gives ``a.b``: whether ``b`` is a module is for the reader to say.
    """
    tree = ast.parse(source)
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(inner) for branch in node.body for inner in ast.walk(branch)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_private(name: str) -> bool:
    """Whether one part of a dotted name starts with an underscore, dunders aside."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_names(source: str, library: str) -> set[str]:
    """Private names of ``library`` that ``source`` imports or reaches by attribute."""
    found = {name for name in imports(source) if name.split(".")[0] == library}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if chain.startswith(f"{library}.") and chain.replace(".", "").isidentifier():
                found.add(chain)
    return {name for name in found if is_private(name)}


def own_names(source: str) -> set[str]:
    """Private names that ``source`` gives to something."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[-1])
    return {name for name in names if name.startswith("_")}


def foreign_private_attributes(source: str, own: set[str]) -> set[str]:
    """Private attributes that ``source`` reads and nothing of ours defines: ``node._sequence_nr``.

    Args:
        source: The text of one module.
        own: Private names that our modules define.
    """
    named_tuple = {"_replace", "_asdict", "_fields", "_make"}
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and not node.attr.startswith("_functx")
        and node.attr not in own | named_tuple
    }


def layer_of(module: str, layers: list[tuple[str, ...]]) -> int:
    """The layer of a module: that of the longest entry which is it or a package around it."""
    matches = [
        (len(entry), level)
        for level, entries in enumerate(layers)
        for entry in entries
        if module == entry or module.startswith(entry + ".")
    ]
    if not matches:
        raise LookupError(f"{module} is in no layer: add it to LAYERS in tests/test_house.py")
    return max(matches)[1]


def resolve(name: str, modules: set[str]) -> str | None:
    """The module of ours that an imported dotted name is in, or None for another library's."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in modules:
            return ".".join(parts[:end])
    return None


def upward_imports(
    sources: dict[str, str], layers: list[tuple[str, ...]], packages: set[str]
) -> list[str]:
    """Imports of a module in a higher layer, as ``importer -> imported``.

    Args:
        sources: Text by module name.
        layers: Module or package names, lowest layer first.
        packages: Those of the modules that are packages.
    """
    found = []
    for module, source in sources.items():
        package = module if module in packages else module.rpartition(".")[0]
        level = layer_of(module, layers)
        for name in imports(source, package):
            target = resolve(name, set(sources))
            if target and target != module and layer_of(target, layers) > level:
                found.append(f"{module} -> {target}")
    return found
