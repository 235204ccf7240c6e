"""The code in the pages on loops, budgets and insight runs, as one program a page."""

import re

import house
import pages
import pytest
import torch


@pytest.mark.parametrize("page", ["loops", "budget"])
def test_page(page, tmp_path, monkeypatch):
    if page == "loops":
        pytest.importorskip("sklearn")
    text = (house.ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), f"{page}.md", "exec"), {"__name__": page})
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (house.ROOT / "docs" / link).exists()


def test_insight(tmp_path):
    page = house.ROOT / "docs" / "insight.md"
    texts = pages.printouts(page, tmp_path)
    quoted = [path.read_text() for path in pages.quoted(page)]
    assert len(texts) == len(quoted) == 3
    assert (tmp_path / "profile.png").exists()
    for picture in pages.pictures(page):
        assert (page.parent / picture).exists()
    if torch.__version__.startswith("2.13."):  # another one may run other operations
        assert [text.split() for text in texts] == [text.split() for text in quoted]
