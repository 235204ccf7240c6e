"""Operators of torch's own database behind remat: a sample here, all of them in sweeps."""

from collections import Counter
from pathlib import Path

import pytest
import torch

import functx
from tools import share
from tools.opinfo.database import name_of
from tools.opinfo.remat import EXCEPTIONS, ROUNDINGS, Verdict, entries, judge, table

SAMPLE = """
add sin nn.functional.conv2d nn.functional.batch_norm nn.functional.dropout softmax cumsum sort
index_put masked_fill cat split view einsum linalg.inv linalg.svd fft.fft var_mean nonzero
bernoulli normal nn.functional.scaled_dot_product_attention nn.functional.embedding
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
    runs = Counter()
    verdicts = [verdict for op in entries() for verdict in judge(op, runs=runs)]
    print(share.report(runs))
    report = Path(__file__).parents[2] / "docs" / "opinfo_remat.md"
    report.write_text(table(verdicts, EXCEPTIONS))
    wrong = {(v.name, v.transform): v for v in verdicts if v.counts and not v.passes}
    assert wrong.keys() == EXCEPTIONS.keys(), "\n".join(
        str(v) for k, v in wrong.items() if k not in EXCEPTIONS
    )
    assert sum(v.counts for v in verdicts) > 2000
    assert share.share(runs) > 0.95


@pytest.mark.filterwarnings("ignore")
def test_the_sweep_can_fail(monkeypatch):
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
    assert torch.finfo(torch.float64).eps * ROUNDINGS < 1e-14
