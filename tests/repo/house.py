"""Reads the source: what imports what, and which private names of other libraries are used."""

import ast
import functools
import tomllib
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


def layers():
    """The folders of `functx`, from the lowest, as import-linter checks them in ``make lint``."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    found = [names.split(" : ") for names in config["contracts"][0]["layers"]]
    return [name for names in reversed(found) for name in names]


def folder_of(module):
    """The layer that a module is in, of a dotted name such as ``functx._remat.node``."""
    parts = module.split(".")
    return parts[1] if parts[0] == "functx" and len(parts) > 1 else ""


def picture():
    """Which folder imports which, as a diagram in mermaid."""
    known = layers()
    edges = {
        (folder_of(module), folder_of(name))
        for module, path in sources().items()
        for name in imports(path.read_text())
    }
    boxes = [f'    {name}["{name}"]' for name in known]
    arrows = [
        f"    {a} --> {b}"
        for a in reversed(known)
        for b in reversed(known)
        if (a, b) in edges and a != b
    ]
    return "\n".join(["```mermaid", "graph TD", *boxes, *arrows, "```"])


PAGE = ROOT / "docs" / "architecture.md"


def with_picture(text):
    """The page with the picture of today."""
    before, _, rest = text.partition("<!-- imports -->")
    return f"{before}<!-- imports -->\n{picture()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_picture(PAGE.read_text()))
