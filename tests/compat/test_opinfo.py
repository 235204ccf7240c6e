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
    runnable,
)

SCRIPT = Path(__file__).parent / "opinfo.py"

SELECTION = """
add addmm amax argmax avg_pool2d batch_norm bmm cat clamp conv2d conv_transpose2d cross_entropy
cumsum diagonal embedding exp expand flip gather gelu group_norm index_add index_put index_select
instance_norm layer_norm linalg.cholesky linalg.solve log_softmax logsumexp masked_fill max_pool2d
nll_loss norm pad pow prod roll scatter_add scatter_reduce.amax select_scatter sigmoid softmax sort
split std topk tril unfold var where
""".split()  # noqa: SIM905


def verdicts(tmp_path, *options):
    path = tmp_path / "verdicts.json"
    command = [sys.executable, str(SCRIPT), "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def wrong_gradient(v):
    return bool(v["gradient"]) and not v["gradient"].startswith(("match", "torch fails"))


def test_selection(tmp_path):
    names = [p + n for n in SELECTION for p in ("", "nn.functional.")]
    found = verdicts(tmp_path, "--samples", "2", "--exact", *names)
    assert len(found) >= len(SELECTION)
    assert [v for v in found if v["outcome"] != "match" or wrong_gradient(v)] == []


@pytest.mark.sweep
def test_all(tmp_path):
    found = runnable([*verdicts(tmp_path, "--samples", "5")])
    matched = {n for n, v in found.items() if v["outcome"].startswith("match")}
    assert len(matched) >= 615
    assert set(found) - matched == set(EXCEPTIONS)
    assert {n for n, v in found.items() if wrong_gradient(v)} == set(OTHER_GRADIENT)
    assert all(found[n]["outcome"] == "refused" for n in DATA_DEPENDENT)


def test_the_page_names_every_exception():
    text = TABLE.read_text()
    for name, reason in (EXCEPTIONS | OTHER_GRADIENT).items():
        assert f"`{name}`" in text
        assert reason in text
    rows = text.partition("## All entries")[2].count("\n| `")
    assert f"| runnable | {rows + len(EXCEPTIONS)} |" in text
    assert rows >= 615
