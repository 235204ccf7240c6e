"""Figures of README.md and docs/: what stands between two markers is made from a file of results.

``<!-- bench:NAME -->`` opens the table of ``bench/results/NAME.json``, ``<!-- file:PATH -->`` the
text of a file in this repository; ``<!-- end -->`` closes either. Figures of a GPU,
``cuda/NAME``, may not have been measured: then that is what it says.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench._common import RESULTS, Result

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_MEASURED = "Not measured yet."
MARKERS = re.compile(r"<!-- (bench|file):(\S+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with every marked part made anew.

    Raises:
        FileNotFoundError: There are no results of that name.
    """

    def fill(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "bench":
            path = RESULTS / f"{name}.json"
            missing = name.startswith("cuda/") and not path.exists()
            body = NOT_MEASURED if missing else Result.read(path).markdown()
        else:
            lines = (ROOT / name).read_text().splitlines()
            body = "\n".join(["```text", *(line.rstrip() for line in lines), "```"])
        return f"<!-- {kind}:{name} -->\n{body}\n<!-- end -->"

    return MARKERS.sub(fill, text)
