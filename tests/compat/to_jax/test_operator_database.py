"""torch's own operator database in JAX: a selection here, all of it in sweeps."""

import json

import jax
import pytest
import torch

import functx
from tools.opinfo.database import entries, name_of
from tools.opinfo.to_jax import (
    DATA_DEPENDENT,
    EXCEPTIONS,
    KEPT,
    OTHER_GRADIENT,
    PARTS,
    TABLE,
    has_wrong_gradient,
    runnable,
    verdicts,
    write_the_page,
)

SELECTION = """
add addmm argmax batch_norm cat clamp conv2d cross_entropy cumsum diagonal embedding flip gather
gelu index_add index_put layer_norm linalg.solve logsumexp masked_fill max_pool2d norm pad pow prod
scatter_reduce.amax select_scatter softmax sort split topk unfold var where
""".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def _values_are_compared():
    """In 64 bits, and not optimized: half of the time would be XLA's."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


# Slow: it compiles 50 programs.
@pytest.mark.filterwarnings("ignore")
def test_a_selection_matches():
    names = [p + n for n in SELECTION for p in ("", "nn.functional.")]
    found = verdicts([op for op in entries(torch.float32) if name_of(op) in names], 1)
    assert len(found) >= len(SELECTION)
    assert [v for v in found if v["outcome"] != "match" or has_wrong_gradient(v)] == []


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_all_but_the_exceptions_match(part):
    KEPT.mkdir(exist_ok=True)
    paths = [KEPT / f"opinfo-{i}" for i in range(PARTS)]
    chosen = sorted(entries(torch.float32), key=name_of)[part::PARTS]
    lines = verdicts(chosen, 5)
    versions = f"torch {torch.__version__.split('+')[0]}, JAX {jax.__version__}"
    head = f"{len(chosen)} entries, {versions}, functx {functx.__version__}"
    paths[part].write_text("\n".join([head, *map(json.dumps, lines)]) + "\n")
    found = runnable(lines)
    matched = {n for n, v in found.items() if v["outcome"].startswith("match")}
    assert found.keys() - matched == found.keys() & EXCEPTIONS.keys()
    wrong = {n for n, v in found.items() if has_wrong_gradient(v)}
    assert wrong == found.keys() & OTHER_GRADIENT.keys()
    assert all(found[n]["outcome"] == "refused" for n in found.keys() & DATA_DEPENDENT.keys())
    write_the_page(paths)


def test_the_page_names_every_exception():
    text = TABLE.read_text()
    for name, reason in (EXCEPTIONS | OTHER_GRADIENT).items():
        assert f"`{name}`" in text
        assert reason in text
    rows = text.partition("## All entries")[2].count("\n| `")
    assert f"| runnable | {rows + len(EXCEPTIONS)} |" in text
    assert rows >= 615
