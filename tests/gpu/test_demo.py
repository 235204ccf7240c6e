"""The demo on a device."""

import json

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")


@pytest.mark.gpu
def test_the_demo_runs_on_a_device(tmp_path):
    from functx.__main__ import main

    assert main(["demo", "--quick", "--device", "cuda", "--out", str(tmp_path)]) == 0
    assert "cuda" in json.loads((tmp_path / "figures.json").read_text())["environment"]["device"]
