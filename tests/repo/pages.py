"""Runs the code of a page of ``docs/``: all its python blocks, in order, as one program.

A ``text`` block right behind a python block shows what that prints.

``python tests/repo/pages.py docs/dp_sgd.md`` makes the page's pictures anew, next to it, and
what its blocks print; of docs/insight.md, the files that it quotes too. Of a page that is also a
notebook, in ``examples/``, it writes that.
"""

import contextlib
import io
import json
import os
import re
import sys
import textwrap
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(text):
    """The python blocks of a text."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


SHOWN = re.compile(r"(?<=```\n\n)```text\n(.*?)```", re.DOTALL)


def shown(text):
    """What a page says that its blocks print: the text blocks that follow a block."""
    return SHOWN.findall(text)


def showing(text, printed):
    """The page with what its blocks have printed, in lines of at most 100 characters."""
    lines = iter([_wrapped(one) for one in printed])
    return SHOWN.sub(lambda match: f"```text\n{next(lines)}```", text)


def _wrapped(printed):
    wrap = textwrap.TextWrapper(100, break_on_hyphens=False)
    lines = [wrap.fill(one) if len(one) > 100 else one for one in printed.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def notebook(text):
    """A page as a notebook: a cell for each python block, and for the text in between."""
    cells = []
    for part in re.split(r"(```python\n.*?```(?:\n\n```text\n.*?```)?)", text, flags=re.DOTALL):
        is_code = part.startswith("```python")
        text = blocks(part)[0] if is_code else re.sub(r"\]\((?!http)", "](../docs/", part)
        source = text.strip().splitlines(keepends=True)
        kind = {"cell_type": "code", "execution_count": None, "outputs": []}
        if source:
            kind = kind if is_code else {"cell_type": "markdown"}
            cells.append(kind | {"id": f"cell-{len(cells)}", "metadata": {}, "source": source})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    found = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(found, indent=1) + "\n"


def pictures(page):
    """What the page shows, as it names it."""
    return re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())


def links(page):
    """The files that a page links to."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]


def quoted(page):
    """The files that a page quotes, in order."""
    return [ROOT / name for name in re.findall(r"<!-- file:(\S+) -->", page.read_text())]


def run(text, name, folder):
    """Run the blocks of a text in a folder, as a module; returns what each prints that prints."""
    module = sys.modules[name] = types.ModuleType(name)
    printed, lines, before = [], 0, Path.cwd()
    (Path(folder) / "pictures").mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        for block in blocks(text):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * lines + block, f"{name}.py", "exec"), vars(module))
            printed += [out.getvalue()] if out.getvalue() else []
            lines += block.count("\n")
    finally:
        os.chdir(before)
        del sys.modules[name]
    return printed


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        page = Path(argument).resolve()
        is_insight = page.stem == "insight"
        printed = run(page.read_text(), page.stem, DOCS / "pictures" if is_insight else DOCS)
        if len(shown(page.read_text())) == len(printed):
            page.write_text(showing(page.read_text(), printed))
        for path, text in zip(quoted(page), printed, strict=False):
            path.write_text(text)
        copy = ROOT / "examples" / f"{page.stem}.ipynb"
        if copy.exists():
            copy.write_text(notebook(page.read_text()))
