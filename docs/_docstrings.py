"""For the site: docstrings as mkdocstrings reads them.

It knows Google's section names alone, and Markdown in place of Sphinx's roles. Names that have an
entry in the reference become links.
"""

import re
from pathlib import Path

import griffe

SECTIONS = {
    "Example:": "Examples:",
    "Options in addition to those of `grads`:": "Other Parameters:",
}
PAGES = [page.read_text() for page in (Path(__file__).parent / "api").glob("*.md")]
ENTRIES = {name for text in PAGES for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)}


class Docstrings(griffe.Extension):
    """Turns section names, roles and names in each docstring into what mkdocstrings renders."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite the docstring of an object that was found in the source."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        for ours, theirs in SECTIONS.items():
            text = re.sub(rf"^(\s*){re.escape(ours)}$", rf"\1{theirs}", text, flags=re.MULTILINE)
        text = re.sub(r":(?:func|class|mod|meth|attr|data):(`[^`]+`)", r"\1", text)
        obj.docstring.value = re.sub(r"(?<!`)`(functx\.[\w.]+)`(?!`)", _linked, text)


def _linked(match: re.Match[str]) -> str:
    name = match[1]
    return f"[{match[0]}][{name}]" if name in ENTRIES else match[0]
