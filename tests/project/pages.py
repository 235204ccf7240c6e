"""Runs the code of a page of ``docs/``: all its python blocks, in order, as one program.

A ``text`` block right behind a python block shows what that prints.

``python tests/project/pages.py docs/dp_sgd.md`` makes the page's pictures anew, next to it, and
what its blocks print; of docs/insight.md, the files that it quotes too.
"""

import contextlib
import io
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
