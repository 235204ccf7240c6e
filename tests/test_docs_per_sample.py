"""The pages of ``docs/`` that show whole workloads: their code runs, and makes their pictures."""

import pages
import pytest

PAGES = ["dp_sgd", "flow_matching", "influence", "laplace", "ntk"]


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_whole(name):
    page = pages.DOCS / f"{name}.md"
    compile("\n".join(pages.blocks(page.read_text())), str(page), "exec")
    assert pages.pictures(page)
    for picture in pages.pictures(page):
        assert (pages.DOCS / picture).stat().st_size > 0


@pytest.mark.sweep
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of matplotlib, about numpy
@pytest.mark.parametrize("name", PAGES)
def test_pages_run(name, tmp_path):
    if name == "dp_sgd":
        pytest.importorskip("opacus", reason="the page is about Opacus's accountant")
    page = pages.DOCS / f"{name}.md"
    pages.run(page.read_text(), name, tmp_path)  # with the page's own assertions
    for picture in pages.pictures(page):
        assert (tmp_path / picture).stat().st_size > 0
