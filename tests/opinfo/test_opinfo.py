"""Every operator of torch's database behind remat; a sample of them in the normal run."""

from pathlib import Path

import pytest
import torch

import functx

from . import sweep
from .database import name_of
from .sweep import Verdict, entries, judge, table

# (entry, transform) -> why remat of it is not what it is without; none may be silently wrong.
EXCEPTIONS: dict[tuple[str, str], str] = {
    (f"nn.functional.{name}", transform): "max_norm writes to weights that require grad: rule 4"
    for name in ("embedding", "embedding_bag")
    for transform in ("value", "backward", "grad", "vmap(grad)", "grad(grad)")
} | {
    ("linspace.tensor_overload", "vmap(grad)"): "of no steps torch refuses it in dispatch modes",
}

SAMPLE = """
add sin mul matmul nn.functional.linear nn.functional.conv2d nn.functional.softplus
nn.functional.layer_norm nn.functional.batch_norm nn.functional.dropout softmax logsumexp
cumsum sort topk gather scatter_add index_add index_put masked_fill where cat stack split
chunk view as_strided expand diagonal flip roll einsum linalg.inv linalg.cholesky linalg.svd
fft.fft prod std norm var_mean max.reduction_with_dim argmax nonzero unique bernoulli normal
nn.functional.scaled_dot_product_attention nn.functional.embedding
nn.functional.multi_head_attention_forward nn.functional.fractional_max_pool2d
linspace.tensor_overload polar complex to_sparse
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLE.split())
def test_a_sample(name):
    found = [op for op in entries() if name_of(op) == name]
    assert found, "torch has renamed it"
    for op in found:
        for verdict in judge(op, samples=3):
            known = (verdict.name, verdict.transform) in EXCEPTIONS
            assert verdict.passes or known or not verdict.counts, verdict


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_every_entry():
    verdicts = [verdict for op in entries() for verdict in judge(op)]
    report = Path(__file__).parents[2] / "docs" / "opinfo_remat.md"
    report.write_text(table(verdicts, EXCEPTIONS))
    wrong = {(v.name, v.transform): v for v in verdicts if v.counts and not v.passes}
    assert wrong.keys() == EXCEPTIONS.keys(), "\n".join(
        str(v) for k, v in wrong.items() if k not in EXCEPTIONS
    )
    assert sum(v.counts for v in verdicts) > 2000


@pytest.mark.filterwarnings("ignore")
def test_the_sweep_can_fail(monkeypatch):
    """A remat that is off, or that raises, shows; and the report says where."""
    (op,) = [op for op in entries() if name_of(op) == "sin"]

    def off(f):
        return lambda *args: f(*args) * (1 + 1e-12)

    def raises(f):
        def fail(*args):
            raise functx.RematError("on purpose")

        return fail

    for broken, outcome in ((off, "differs"), (raises, "raises")):
        monkeypatch.setattr(functx, "remat", broken)
        verdicts = judge(op)
        assert {v.outcome for v in verdicts} == {outcome}
        assert f"Exceptions: {len(verdicts)}" in table(verdicts, {})


def test_operators_that_draw_are_compared_by_seed():
    (op,) = [op for op in entries() if name_of(op) == "bernoulli"]
    assert judge(op)[0] == Verdict("bernoulli", "value", "same")
    assert torch.finfo(torch.float64).eps * sweep.ROUNDINGS < 1e-14
