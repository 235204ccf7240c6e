"""The code in the pages on loops, budgets, models and insight runs, as one program a page."""

import re

import pages
import pytest
import torch


@pytest.mark.parametrize("name", ["budget", "loops", "models"])
def test_page(name, tmp_path):
    needs = {"loops": "sklearn", "models": "transformers"}
    if name in needs:
        pytest.importorskip(needs[name])
    text = (pages.DOCS / f"{name}.md").read_text()
    assert pages.blocks(text)
    pages.run(text, name, tmp_path)


def test_insight(tmp_path):
    page = pages.DOCS / "insight.md"
    printed = pages.run(page.read_text(), "insight", tmp_path)
    quoted = [path.read_text() for path in pages.quoted(page)]
    assert len(printed) == len(quoted) == 3
    assert (tmp_path / "profile.png").exists()
    if torch.__version__.startswith("2.13."):  # another one may run other operations
        assert [*map(words, printed)] == [*map(words, quoted)]


def words(text):
    """A printout without its spaces, and without how many operations ran: tests add some."""
    return re.sub(r"^\d+ operations", "", text).split()
