"""For the site: docstrings as mkdocstrings reads them.

It knows Google's section names alone, and Markdown in place of Sphinx's roles.
"""

import re

import griffe

SECTIONS = {"Example:": "Examples:", "Options that are not those of `grads`:": "Other Parameters:"}


class Docstrings(griffe.Extension):
    """Turns section names and roles of each docstring into what mkdocstrings renders."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite the docstring of an object that was found in the source."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        for ours, theirs in SECTIONS.items():
            text = re.sub(rf"^(\s*){re.escape(ours)}$", rf"\1{theirs}", text, flags=re.MULTILINE)
        obj.docstring.value = re.sub(r":(?:func|class|mod|meth|attr|data):(`[^`]+`)", r"\1", text)
