"""Every example runs: doctests of the public modules, and the code in README.md.

And what README.md quotes is what the benches and the demo wrote.
"""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import sys

import house
import pytest

sys.path.insert(0, str(house.ROOT))

from bench import _readme
from bench._common import RESULTS, Column, Result

README = (house.ROOT / "README.md").read_text()
MODULES = [name for name, path in house.sources().items() if ">>> " in path.read_text()]


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module):
    if module.startswith("functx.compat"):
        pytest.importorskip("jax")
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted
    assert not failed


def test_readme_examples_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("jax")
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), "README.md", "exec"), {"__name__": "readme"})
    assert os.path.getsize("live.png") > 0
    assert "bytes" in capsys.readouterr().out


@pytest.mark.parametrize("page", _readme.PAGES, ids=lambda page: page.name)
def test_pages_quote_what_was_measured(page):
    assert _readme.filled(page.read_text()) == page.read_text()


def test_every_bench_is_quoted():
    pages = "".join(page.read_text() for page in _readme.PAGES)
    for path in RESULTS.glob("*.json"):
        assert f"<!-- bench:{path.stem} -->" in pages


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_readme_links_exist(link):
    assert (house.ROOT / link).exists()


def test_a_stale_number_is_seen():
    stale, count = re.subn(r"\d+\.\d", "0.0", README)
    assert count
    assert _readme.filled(stale) != stale


def test_the_demo_that_the_readme_shows_kept_its_promises():
    figures = json.loads((house.ROOT / "docs" / "demo" / "figures.json").read_text())
    assert figures["training"]["accuracy"] > 0.9
    assert figures["peak_ratio"] >= 3
    assert figures["crosscheck"]["kept_equal"]
    assert max(d["relative"] for d in figures["crosscheck"]["differences"].values()) < 1e-4


def test_results_print_as_they_are(tmp_path):
    columns = [Column("who", "who"), Column("bytes", "peak, KiB", ".1f", 1024)]
    rows = [{"who": "a", "bytes": 1536}, {"who": "b", "bytes": None, "error": "no"}, {"who": "c"}]
    result = Result("x", "A claim.", columns, rows, ["A note."], {"torch": "2"})
    assert Result.read(result.write(tmp_path)) == result
    assert result.markdown().splitlines() == [
        "A claim.",
        "",
        "| who | peak, KiB |",
        "|---|---:|",
        "| a | 1.5 |",
        "| b | error |",
        "| c | - |",
        "",
        "A note. (torch 2)",
    ]
