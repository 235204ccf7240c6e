"""torch's own operator database: a selection always, all of it in ``make sweep``.

It runs in a process of its own, because importing torch's test utilities changes global settings.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .opinfo_exceptions import (
    DATA_DEPENDENT,
    EXCEPTIONS,
    OTHER_GRADIENT,
    TABLE,
    page,
    runnable,
)

TESTS = Path(__file__).parents[2]
# Where the parts of the whole sweep are kept, until the last has been run.
KEPT = TESTS.parent / ".sweep"
PARTS = 8

SELECTION = """
add addmm amax argmax avg_pool2d batch_norm bmm cat clamp conv2d conv_transpose2d cross_entropy
cumsum diagonal embedding exp expand flip gather gelu group_norm index_add index_put index_select
instance_norm layer_norm linalg.cholesky linalg.solve log_softmax logsumexp masked_fill max_pool2d
nll_loss norm pad pow prod roll scatter_add scatter_reduce.amax select_scatter sigmoid softmax sort
split std topk tril unfold var where
""".split()  # noqa: SIM905


def verdicts(path, *options):
    command = [sys.executable, "-m", "compat.to_jax.opinfo", "--out", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS)
    assert done.returncode == 0, done.stderr
    head, *lines = path.read_text().splitlines()
    return head, [json.loads(line) for line in lines]


def wrong_gradient(v):
    return bool(v["gradient"]) and not v["gradient"].startswith(("match", "torch fails"))


# Slow: a process of its own, which imports torch's test utilities and compiles 70 programs.
def test_a_selection_matches(tmp_path):
    names = [p + n for n in SELECTION for p in ("", "nn.functional.")]
    _, found = verdicts(tmp_path / "verdicts", "--samples", "1", "--exact", *names)
    assert len(found) >= len(SELECTION)
    assert [v for v in found if v["outcome"] != "match" or wrong_gradient(v)] == []


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_all_but_the_exceptions_match(part):
    KEPT.mkdir(exist_ok=True)
    paths = [KEPT / f"opinfo-{i}" for i in range(PARTS)]
    options = ("--samples", "5", "--part", f"{part}/{PARTS}")
    found = runnable(verdicts(paths[part], *options)[1])
    matched = {n for n, v in found.items() if v["outcome"].startswith("match")}
    assert found.keys() - matched == found.keys() & EXCEPTIONS.keys()
    wrong = {n for n, v in found.items() if wrong_gradient(v)}
    assert wrong == found.keys() & OTHER_GRADIENT.keys()
    assert all(found[n]["outcome"] == "refused" for n in found.keys() & DATA_DEPENDENT.keys())
    write_the_page(paths)


def write_the_page(paths):
    """When all parts are there, of the same versions."""
    of = [path.read_text().splitlines() for path in paths if path.exists()]
    everything = [json.loads(line) for _, *lines in of for line in lines]
    sizes, versions = zip(*(head.split(" entries, ") for head, *_ in of), strict=True)
    if len(of) < len(paths) or len(set(versions)) > 1 or len(everything) < sum(map(int, sizes)):
        return
    assert sum(v["outcome"].startswith("match") for v in everything) >= 615
    TABLE.write_text(page(everything, versions[0]))


def test_the_page_names_every_exception():
    text = TABLE.read_text()
    for name, reason in (EXCEPTIONS | OTHER_GRADIENT).items():
        assert f"`{name}`" in text
        assert reason in text
    rows = text.partition("## All entries")[2].count("\n| `")
    assert f"| runnable | {rows + len(EXCEPTIONS)} |" in text
    assert rows >= 615
