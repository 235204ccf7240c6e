"""The code in the pages on loops and budgets runs, as one program a page."""

import re

import house
import pytest


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
