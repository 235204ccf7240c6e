"""Figures of README.md and docs/: what stands between two markers is made from a file of results.

``<!-- bench:NAME -->`` opens the table of ``bench/results/NAME.json``. Behind the name may be keys
of columns, or their numbers, to show these alone, and ``rows:0,3,5`` for the rows of these numbers.
``<!-- file:PATH -->`` opens the text of a file in this repository. ``<!-- end -->`` closes either.
Figures of a GPU, ``cuda/NAME``, may not have been measured: then that is what it says.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench._common import RESULTS, Result

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_MEASURED = "Not measured yet."
MARKERS = re.compile(r"(<!-- (bench|file):(\S+)((?: [\w:,]+)*) -->)\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with every marked part made anew.

    Raises:
        FileNotFoundError: There are no results of that name.
    """

    def fill(match: re.Match[str]) -> str:
        marker, kind, name, keys = match.groups()
        body = _table(name, keys.split()) if kind == "bench" else _text(name)
        return f"{marker}\n{body}\n<!-- end -->"

    return MARKERS.sub(fill, text)


def _table(name: str, keys: list[str]) -> str:
    path = RESULTS / f"{name}.json"
    if name.startswith("cuda/") and not path.exists():
        return NOT_MEASURED
    result = Result.read(path)
    for key in [key for key in keys if key.startswith("rows:")]:
        result.rows = [result.rows[int(n)] for n in key.removeprefix("rows:").split(",")]
        keys.remove(key)
    if keys:
        numbered = enumerate(result.columns)
        result.columns = [column for n, column in numbered if {column.key, str(n)} & {*keys}]
    return result.markdown()


def _text(name: str) -> str:
    lines = (ROOT / name).read_text().splitlines()
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```"])
