"""Runs the code of a page of ``docs/``: all its python blocks, in order, as one program.

``python tests/pages.py docs/dp_sgd.md`` makes the page's pictures anew, next to it.
"""

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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name).resolve(), DOCS)
