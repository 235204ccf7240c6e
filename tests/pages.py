"""Runs the code of a page of ``docs/``: all its python blocks, in order, as one program.

``python tests/pages.py docs/dp_sgd.md`` makes the page's pictures anew, next to it; of
docs/insight.md, the files that it quotes too.
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def program(page):
    """The python of a page."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


def pictures(page):
    """What the page shows, as it names it."""
    return re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())


def run(page, folder):
    """Run a page in a folder, in which its pictures are left; returns its names."""
    folder = Path(folder)
    (folder / "pictures").mkdir(exist_ok=True)
    names = {"__name__": page.stem}
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(program(page), str(page), "exec"), names)
    finally:
        os.chdir(before)
    return names


def printouts(page, folder):
    """Run a page in a folder; what each of its blocks prints that prints anything."""
    names, texts, start = {"__name__": page.stem}, [], 0
    before = Path.cwd()
    os.chdir(folder)
    try:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * start + block, f"{page.stem}.py", "exec"), names)
            texts += [out.getvalue()] if out.getvalue() else []
            start += block.count("\n")
    finally:
        os.chdir(before)
    return texts


def quoted(page):
    """The files that a page quotes, in order."""
    found = re.findall(r"<!-- file:(\S+) -->", page.read_text())
    return [DOCS.parent / name for name in found]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name).resolve()
        if page.stem == "insight":
            for path, text in zip(quoted(page), printouts(page, DOCS / "pictures"), strict=True):
                path.write_text(text)
        else:
            run(page, DOCS)
