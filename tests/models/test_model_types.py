"""Every model type of transformers with checkpointing, against itself without."""

from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import functx

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.sweep
def test_every_type():
    from tools.models import __main__ as models

    records = list(models.sweep(jobs=2))
    models.write(Path(__file__).parents[2] / "docs" / "models.md", records)
    assert not [case for case in models.wrong(records) if not case[-1]]
    assert sum(not record["not built"] for record in records) > 500


def test_the_sweep_can_fail(monkeypatch, request):
    from tools.models import __main__ as models

    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)
    raises = Mock(side_effect=functx.RematError("on purpose"))
    for broken, outcome in ((lambda model, **options: model, "no region"), (raises, "raises")):
        monkeypatch.setattr(functx, "remat", broken)
        cls, *verdicts, _ = models.judge("bert")  # and how the regions ran
        assert [verdict[2] for verdict in verdicts] == ["same", "same", outcome] * 3
        record = {"type": "bert", "model": cls, "not built": "", "verdicts": verdicts}
        assert f"- `bert`, whole: {outcome}" in models.report([record])
