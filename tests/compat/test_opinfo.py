"""torch's own operator database: a selection always, all of it in ``make sweep``.

It runs in a process of its own, because importing torch's test utilities changes global settings.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "opinfo.py"

SELECTION = """
add addmm amax argmax avg_pool2d batch_norm bmm cat clamp conv2d conv_transpose2d cross_entropy
cumsum diagonal embedding exp expand flip gather gelu group_norm index_add index_put index_select
instance_norm layer_norm linalg.cholesky linalg.solve log_softmax logsumexp masked_fill max_pool2d
nll_loss norm pad pow prod roll scatter_add scatter_reduce.amax select_scatter sigmoid softmax sort
split std topk tril unfold var where
""".split()  # noqa: SIM905

# What JAX can't say, what torch can't run here, and what has no rule yet.
DATA_DEPENDENT = {
    "allclose", "argwhere", "combinations", "corrcoef", "cov", "equal", "item", "linalg.lstsq",
    "linalg.lstsq.grad_oriented", "masked_select", "narrow", "nn.functional.ctc_loss",
    "repeat_interleave",
    "nn.functional.gaussian_nll_loss", "nonzero", "tensor_split", "unique", "unique_consecutive",
}  # fmt: skip
OTHER_LAYOUTS = {"chalf", "sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse", "resize_as_"}
NOT_ON_CPU = {"as_strided.partial_views"}
NO_RULE = {
    "geqrf", "hash_tensor", "histogramdd", "linalg.ldl_factor", "linalg.ldl_factor_ex",
    "linalg.ldl_solve", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.linear_cross_entropy.chunked",
    "nn.functional.linear_cross_entropy.chunked_none", "special.airy_ai",
}  # fmt: skip
# The gradient differs: where several elements share a place, where the result is fixed only up to
# a phase, and where JAX has no rule for the derivative.
OTHER_GRADIENT = {
    "as_strided_scatter", "linalg.eigh", "linalg.pinv.hermitian",
    "nextafter", "pca_lowrank", "svd_lowrank",
}  # fmt: skip


def verdicts(tmp_path, *options):
    path = tmp_path / "verdicts.json"
    command = [sys.executable, str(SCRIPT), "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def wrong_gradient(v):
    return v["gradient"] not in ("", "match") and not v["gradient"].startswith("torch fails")


def test_selection(tmp_path):
    names = [p + n for n in SELECTION for p in ("", "nn.functional.")]
    found = verdicts(tmp_path, "--samples", "2", "--exact", *names)
    assert len(found) >= len(SELECTION)
    assert [v for v in found if v["outcome"] != "match" or wrong_gradient(v)] == []


@pytest.mark.sweep
def test_all(tmp_path):
    found = {v["name"]: v for v in verdicts(tmp_path, "--samples", "5")}
    runnable = {n: v for n, v in found.items() if not n.startswith("jiterator")}
    matched = {n for n, v in runnable.items() if v["outcome"].startswith("match")}
    assert len(matched) >= 615
    expected = DATA_DEPENDENT | OTHER_LAYOUTS | NOT_ON_CPU | NO_RULE
    assert set(runnable) - matched == expected
    assert {n for n, v in runnable.items() if wrong_gradient(v)} == OTHER_GRADIENT
    assert all(found[n]["outcome"] == "refused" for n in DATA_DEPENDENT)
