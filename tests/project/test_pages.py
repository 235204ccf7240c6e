"""The code of the pages in docs/ runs, as one program a page; of the tutorials, one a section."""

import re

import pytest
import torch

from . import pages

# They train a model, or want a package that `make test` does without.
LONG = ["loops", "dp_sgd", "flow_matching", "influence", "laplace", "ntk"]
TUTORIALS = (pages.DOCS / "tutorials.md").read_text()
SECTIONS = dict(re.findall(r"\n## ([^\n]*)\n(.*?)(?=\n## |\Z)", TUTORIALS, re.DOTALL))
USUAL = ("vmap", "tenth", "Sequential", "encoder", "Selective", "Nested", "ResNet", "U-Net")


@pytest.mark.parametrize(
    "name", ["budget", "models", *(pytest.param(n, marks=pytest.mark.sweep) for n in LONG)]
)
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of matplotlib, about numpy
def test_a_page_runs_and_makes_its_pictures(name, tmp_path):
    for package in {"dp_sgd": ["opacus"], "models": ["transformers"]}.get(name, ["sklearn"]):
        pytest.importorskip(package)
    page = pages.DOCS / f"{name}.md"
    assert pages.blocks(page.read_text())
    pages.run(page.read_text(), name, tmp_path)  # with the page's own assertions
    for picture in pages.pictures(page) if name in LONG[1:] else ():
        assert (tmp_path / picture).stat().st_size > 0


@pytest.mark.parametrize("name", LONG[1:])
def test_a_page_compiles_and_has_its_pictures(name):
    page = pages.DOCS / f"{name}.md"
    compile("\n".join(pages.blocks(page.read_text())), str(page), "exec")
    assert pages.pictures(page)
    for picture in pages.pictures(page):
        assert (pages.DOCS / picture).stat().st_size > 0


def test_the_page_on_insight_quotes_what_it_prints(tmp_path):
    def words(text):  # without how many operations ran: tests add some
        return re.sub(r"^\d+ operations", "", text).split()

    page = pages.DOCS / "insight.md"
    printed = pages.run(page.read_text(), "insight", tmp_path)
    quoted = [path.read_text() for path in pages.quoted(page)]
    assert len(printed) == len(quoted) == 3
    assert (tmp_path / "profile.png").exists()
    if torch.__version__.startswith("2.13."):  # another one may run other operations
        assert [*map(words, printed)] == [*map(words, quoted)]


def test_there_is_a_tutorial_for_each_usual_one():
    for word in (*USUAL, "memory and time", "measured memory"):
        assert sum(word in title for title in SECTIONS) == 1


@pytest.mark.parametrize("title", SECTIONS)
def test_a_tutorial_runs(title, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    if "transformers" in SECTIONS[title]:
        pytest.importorskip("transformers")
    matplotlib.use("agg")
    assert pages.blocks(SECTIONS[title])
    pages.run(SECTIONS[title], "tutorial", tmp_path)
    if "savefig" in SECTIONS[title]:
        assert (tmp_path / "sweep.png").stat().st_size > 0
