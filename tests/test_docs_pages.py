"""The code in the pages on loops, budgets and insight runs, as one program a page."""

import pages
import pytest
import torch


@pytest.mark.parametrize("name", ["loops", "budget"])
def test_page(name, tmp_path):
    if name == "loops":
        pytest.importorskip("sklearn")
    text = (pages.DOCS / f"{name}.md").read_text()
    assert len(pages.blocks(text)) >= 2
    pages.run(text, name, tmp_path)


def test_insight(tmp_path):
    page = pages.DOCS / "insight.md"
    printed = pages.run(page.read_text(), "insight", tmp_path)
    quoted = [path.read_text() for path in pages.quoted(page)]
    assert len(printed) == len(quoted) == 3
    assert (tmp_path / "profile.png").exists()
    if torch.__version__.startswith("2.13."):  # another one may run other operations
        assert [text.split() for text in printed] == [text.split() for text in quoted]
