"""The benches of `make gpu`, at toy sizes on the CPU: what is run there can't rot here."""

import importlib
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from bench import __main__ as bench
from bench import _readme
from bench._blocks import Stack, loss, transformer_block
from bench._common import Result
from bench.gpu import _variants
from bench.transformer import by_hand

from . import house

PAGE = (house.ROOT / "docs" / "gpu.md").read_text()
OURS = [name for name, module in bench.BENCHES["cuda"].items() if ".gpu." in module]


def run(name, *more, out):
    """The rows of a toy run, by way."""
    found = importlib.import_module(f"bench.gpu.{name}")
    argv = ["--device", "cpu", "--toy", "--here", "--out", str(out), *more]
    parsed = _variants.arguments(name, found.CLAIM, found.SECONDS, argv)
    result = found.run(parsed)
    written = Result.read(out / f"{name}.json")
    assert written.rows == json.loads(json.dumps(result.rows))
    assert written.environment["torch"]
    assert result.markdown().count("\n| ") == len(result.rows) + 1
    return {row["way"]: row for row in result.rows}, result


@pytest.mark.sweep  # compiles with JAX
def test_rows_of_training_say_that_regions_take_less(tmp_path):
    pytest.importorskip("jax")
    rows, _ = run("gpt", out=tmp_path)
    assert {way for way, row in rows.items() if "error" in row} <= {"functx, budget 25 %"}
    plain = rows["plain"]["peak"]
    for way in ("torch.utils.checkpoint", "functx.remat", "functx, budget 50 %"):
        assert rows[way]["peak"] < 0.6 * plain
    assert rows["functx.remat"]["peak"] < 1.001 * rows["torch.utils.checkpoint"]["peak"]
    assert rows["JAX (jit), jax.checkpoint"]["peak"] < 0.5 * rows["JAX (jit)"]["peak"]


@pytest.mark.sweep  # the process imports torch
def test_a_variant_runs_in_a_process_of_its_own():
    setting = _variants.Setting("cpu", True, {"batch": 2})
    found = _variants.run_apart("bench.gpu.gpt", "functx.remat", setting, 120)
    assert found["batch"] == 2
    assert found["peak"] > 0
    assert found["seconds"] > 0
    late = _variants.run_apart("bench.gpu.gpt", "functx.remat", setting, 0.05)
    assert late == {"error": "ended after 0 s"}


class TestWithoutADevice:
    @pytest.fixture(autouse=True)
    def _none(self, monkeypatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def test_all_benches_say_that_there_is_none(self, capsys):
        assert bench.main(["--device", "cuda"]) == 0
        assert "no CUDA device" in capsys.readouterr().out

    def test_make_says_that_there_is_none(self):
        command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"]
        found = subprocess.run(command, cwd=house.ROOT, capture_output=True, text=True, timeout=120)
        assert found.returncode == 0, found.stderr
        assert found.stdout == "no CUDA device: nothing to test or measure\n"


def test_the_page_shows_every_bench():
    assert _readme.filled(PAGE) == PAGE
    for name in bench.BENCHES["cuda"]:
        assert f"<!-- bench:cuda/{name} -->" in PAGE


def test_every_bench_is_run():
    files = {p.stem for p in (house.ROOT / "bench" / "gpu").glob("*.py") if p.stem[0] != "_"}
    assert set(OURS) == files


def test_gradients_written_out_by_hand_are_the_same_bits():
    torch.manual_seed(0)
    stack = Stack("", nn.ModuleList(transformer_block() for _ in range(2)), torch.randn(2, 8, 256))
    expected = torch.autograd.grad(loss(stack.blocks, stack.x), stack.parameters)
    assert all(map(torch.equal, by_hand(stack), expected))
