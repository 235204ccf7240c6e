"""Every example runs: doctests, README.md and the pages, which quote what was measured."""

import doctest
import importlib
import json
import re

import pytest
import torch

import functx
from bench import _readme
from bench._common import RESULTS, Column, Result

from . import house, pages

README = house.ROOT / "README.md"
MODULES = [name for name, path in house.sources().items() if ">>> " in path.read_text()]


@pytest.mark.parametrize("module", MODULES)
def test_doctests_pass(module):
    if module.startswith("functx.compat"):
        pytest.importorskip("jax")
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted
    assert not failed


def test_the_examples_of_the_readme_run(tmp_path):
    assert len(pages.blocks(README.read_text())) >= 3
    pytest.importorskip("jax")
    printed = pages.run(README.read_text(), "readme", tmp_path)
    assert [text.split()[-1] for text in printed[:1]] == ["bytes"]
    assert "agree" in printed[1]


@pytest.mark.parametrize("page", _readme.PAGES, ids=lambda page: page.name)
def test_pages_quote_what_was_measured(page):
    assert _readme.filled(page.read_text()) == page.read_text()


def test_every_bench_is_quoted():
    text = "".join(page.read_text() for page in _readme.PAGES)
    for path in RESULTS.glob("*.json"):
        assert f"<!-- bench:{path.stem} -->" in text


@pytest.mark.parametrize("page", _readme.PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert [link for link in pages.links(page) if not link.exists()] == []


def test_the_engine_page_has_each_file_of_the_engine():
    text = (house.ROOT / "docs" / "engine.md").read_text()
    for path in (house.ROOT / "functx" / "_remat").glob("[a-z]*.py"):
        assert f"`{path.stem}`" in text


def test_the_demo_that_the_pages_show_kept_its_promises():
    figures = json.loads((house.ROOT / "docs" / "demo" / "figures.json").read_text())
    assert figures["training"]["accuracy"] > 0.9
    assert figures["peak_ratio"] >= 3
    assert figures["crosscheck"]["kept_equal"]
    assert max(d["relative"] for d in figures["crosscheck"]["differences"].values()) < 1e-4


def test_a_result_is_a_table(tmp_path):
    columns = [Column("who", "who"), Column("bytes", "peak, KiB", ".1f", 1024)]
    rows = [{"who": "a", "bytes": 1536}, {"who": "b", "bytes": None, "error": "no"}, {"who": "c"}]
    result = Result("x", "A claim.", columns, rows, ["A note."], {"torch": "2"})
    assert Result.read(result.write(tmp_path)) == result
    table = ["| who | peak, KiB |", "|---|---:|", "| a | 1.5 |", "| b | error |", "| c | - |"]
    assert result.markdown().splitlines() == ["A claim.", "", *table, "", "A note. (torch 2)"]


# They train a model, or want a package that `make test` does without.
QUICK = ["budget", "models", "from_jax", "compiled", "models_in_jax", "per_sample"]
SHOWING = ["tutorial", "concepts", "when_not", "replay_errors", "torch_bugs", "migration"]
SHOWING += ["to_jax"]
LONG = ["loops", "dp_sgd", "flow_matching", "influence", "laplace", "ntk"]
RECIPES = (pages.DOCS / "recipes.md").read_text()
SECTIONS = dict(re.findall(r"\n## ([^\n]*)\n(.*?)(?=\n## |\Z)", RECIPES, re.DOTALL))


@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.sweep) for n in LONG)],
)
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of matplotlib, about numpy
def test_a_page_runs_and_makes_its_pictures(name, tmp_path):
    needs = {"dp_sgd": ["opacus"], "models": ["transformers"], "from_jax": ["flax", "equinox"]}
    needs["models_in_jax"] = ["jax", "transformers"]
    for package in needs.get(name, ["sklearn"]):
        pytest.importorskip(package)
    page = pages.DOCS / f"{name}.md"
    assert pages.blocks(page.read_text())
    pages.run(page.read_text(), name, tmp_path)  # with the page's own assertions
    for picture in pages.pictures(page) if name in LONG[1:] else ():
        assert (tmp_path / picture).stat().st_size > 0


@pytest.mark.parametrize("name", SHOWING)
@pytest.mark.filterwarnings("default:Converting a tensor with requires_grad:UserWarning")
def test_a_page_shows_what_it_prints(name, tmp_path):
    if name in ("migration", "to_jax"):
        pytest.importorskip("jax")
    text = (pages.DOCS / f"{name}.md").read_text()
    printed = pages.run(text, name, tmp_path)
    if torch.__version__.startswith("2.13."):  # another one may keep other bytes
        assert [*map(str.split, printed)] == [*map(str.split, pages.shown(text))]


@pytest.mark.parametrize("path", [*(house.ROOT / "examples").glob("*.ipynb")], ids=lambda p: p.stem)
def test_a_notebook_is_its_page(path):
    assert path.read_text() == pages.notebook((pages.DOCS / f"{path.stem}.md").read_text())


def test_counts_of_models_in_jax_are_those_of_the_sweep():
    page = (pages.DOCS / "models_in_jax.md").read_text()
    built, same = re.search(r"of (\d+) types, (\d+) have the same", page).groups()
    assert f"[{same} of {built} model types](docs/models_in_jax.md)" in README.read_text()
    lines = (house.ROOT / "bench" / "results" / "models_in_jax.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "library" not in record]
    outcomes = [record["outcome"] for record in records]
    assert outcomes.count("same") == int(same)
    assert len(outcomes) - outcomes.count("not built") == int(built)


def test_every_page_runs():
    runs = {*QUICK, *LONG, *SHOWING, "insight", "recipes"}
    runs |= {"distributed"}  # on several processes and devices, in tests/devices
    has_code = {path.stem for path in pages.DOCS.rglob("*.md") if pages.blocks(path.read_text())}
    assert has_code - runs == {"architecture"}  # whose block is the head of a rule


def test_every_page_is_in_the_navigation_and_in_the_index():
    found = {str(path.relative_to(pages.DOCS)) for path in pages.DOCS.rglob("*.md")}
    navigation = {*re.findall(r"[\w/]+\.md", (house.ROOT / ".mkdocs.yml").read_text())}
    index = {str(link.relative_to(pages.DOCS)) for link in pages.links(pages.DOCS / "index.md")}
    assert found == navigation == {*index, "index.md"}


def test_the_reference_has_every_public_name():
    text = "".join(path.read_text() for path in (pages.DOCS / "api").glob("*.md"))
    missing = [
        name for name in functx.__all__ if not re.search(rf"functx\.{name}\b|`{name}\(", text)
    ]
    assert not missing


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


@pytest.mark.parametrize("title", SECTIONS)
@pytest.mark.filterwarnings("default::FutureWarning")  # of lightning, about torch
def test_a_recipe_runs(title, tmp_path):
    needs = {
        "transformers.": ["transformers"],
        "Trainer(": ["accelerate"],
        "lightning.": ["lightning"],
    }
    for package in (
        p for word, packages in needs.items() for p in packages if word in SECTIONS[title]
    ):
        pytest.importorskip(package)
    assert pages.blocks(SECTIONS[title])
    pages.run(SECTIONS[title], "recipe", tmp_path)
