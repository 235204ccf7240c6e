"""The snippets of docs/tutorials.md run, section by section."""

import re

import matplotlib
import pages
import pytest

TEXT = (pages.DOCS / "tutorials.md").read_text()
SECTIONS = dict(re.findall(r"\n## ([^\n]*)\n(.*?)(?=\n## |\Z)", TEXT, re.DOTALL))


def test_there_is_one_for_each_usual_tutorial():
    wanted = ("vmap", "tenth", "Sequential", "encoder", "Selective", "Nested", "ResNet", "U-Net")
    for word in (*wanted, "memory and time", "measured memory"):
        assert sum(word in title for title in SECTIONS) == 1


@pytest.mark.parametrize("title", SECTIONS)
def test_section(title, tmp_path):
    if "transformers" in SECTIONS[title]:
        pytest.importorskip("transformers")
    matplotlib.use("agg")
    assert pages.blocks(SECTIONS[title])
    pages.run(SECTIONS[title], "tutorial", tmp_path)
    if "savefig" in SECTIONS[title]:
        assert (tmp_path / "sweep.png").stat().st_size > 0
