"""The benches of `make gpu`, at toy sizes on the CPU: what is run there can't rot here."""

import importlib
import json
import subprocess
import sys

import house
import pytest
import torch

sys.path.insert(0, str(house.ROOT))

from bench import __main__ as bench
from bench import _readme
from bench._common import Result, device_seconds, short_of_memory
from bench.gpu import _variants, gpt_batch, gpt_trace

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


def test_training(tmp_path):
    pytest.importorskip("jax")
    rows, _ = run("gpt", out=tmp_path)
    assert {way for way, row in rows.items() if "error" in row} <= {"functx, budget 25 %"}
    plain = rows["plain"]["peak"]
    for way in ("torch.utils.checkpoint", "functx.remat", "functx, budget 50 %"):
        assert rows[way]["peak"] < 0.6 * plain
    assert rows["functx.remat"]["peak"] < 1.001 * rows["torch.utils.checkpoint"]["peak"]
    assert rows["JAX (jit), jax.checkpoint"]["peak"] < 0.5 * rows["JAX (jit)"]["peak"]


def test_agreement(tmp_path):
    pytest.importorskip("jax")
    rows, _ = run("gpt_agreement", out=tmp_path)
    assert rows["functx.remat"]["same"] == "yes"
    for row in rows.values():
        assert row["to_float64"] < 1e-6
        assert row["to_jax"] is None or row["to_jax"] < 1e-6
    assert rows["functx.remat"]["kept"] <= rows["JAX, jax.checkpoint"]["kept"]
    assert rows["functx.remat"]["kept"] < 0.2 * rows["plain"]["kept"]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_per_example(tmp_path, monkeypatch):
    pytest.importorskip("jax")
    # Torch's database of operators, which other tests import, forbids to set what Opacus sets.
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    _, result = run("gpt_per_sample", out=tmp_path)
    ours = [row for row in result.rows if "functx" in row["way"]]
    assert len(ours) == 5
    for row in result.rows:
        if "error" in row:
            assert row["error"] == "opacus is not installed"
        else:
            assert row["distance"] < 1e-5
    assert all("error" not in row for row in ours)


@pytest.mark.parametrize(
    "more", [[], pytest.param(["JAX (jit)", "JAX (jit), jax.checkpoint"], marks=pytest.mark.sweep)]
)
def test_batches(more, tmp_path, monkeypatch):
    if more:
        pytest.importorskip("jax")
    variants = {way: gpt_batch.VARIANTS[way] for way in ("plain", "functx.remat", *more)}
    monkeypatch.setattr(gpt_batch, "VARIANTS", variants)
    rows, _ = run("gpt_batch", out=tmp_path)
    assert rows["functx.remat"]["batch"] > 1.5 * rows["plain"]["batch"]
    if more:
        assert rows[more[1]]["batch"] > rows[more[0]]["batch"] > 0




def test_a_variant_in_a_process_of_its_own():
    setting = _variants.Setting("cpu", True, {"batch": 2})
    found = _variants.run_apart("bench.gpu.gpt", "functx.remat", setting, 120)
    assert found["batch"] == 2
    assert found["peak"] > 0
    assert found["seconds"] > 0
    late = _variants.run_apart("bench.gpu.gpt", "functx.remat", setting, 0.05)
    assert late == {"error": "ended after 0 s"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying"), "out of memory"),
        (ImportError("No module named 'opacus'", name="opacus"), "opacus is not installed"),
        (ValueError("no such\nthing"), "ValueError: no such"),
    ],
)
def test_what_fails_is_a_row(error, said):
    def variant(setting):
        raise error

    assert _variants.run_here(variant, _variants.Setting()) == {"error": said}


def test_nothing_begins_when_time_is_over(tmp_path):
    rows, result = run("gpt_trace", "--seconds", "0.5", out=tmp_path)
    assert all(row["error"] == "no time left" for row in rows.values())
    assert "plain: no time left." in result.notes


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5, 17, 100, 1000])
def test_the_largest_is_found(limit):
    tried, noted = [], []

    def fits(number):
        tried.append(number)
        return number <= limit

    found = gpt_batch.largest(fits, 4, noted.append)
    assert found <= limit < found + max(1, found // 16) + 1
    assert len(tried) < 16
    assert found == max(noted, default=0)


def test_spans():
    spans = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)]
    assert gpt_trace.union(spans) == [(0.0, 4.0), (5.0, 6.0)]
    assert gpt_trace.total(spans) == 5.0


def test_seconds():
    calls = []
    assert device_seconds(lambda: calls.append(1), 3, "cpu") < 1
    assert len(calls) == 5
    assert not short_of_memory(ValueError("no"))


class TestWithoutADevice:
    @pytest.fixture(autouse=True)
    def _none(self, monkeypatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def test_all_of_them(self, capsys):
        assert bench.main(["--device", "cuda"]) == 0
        assert "no CUDA device" in capsys.readouterr().out

    @pytest.mark.parametrize("argv", [[], ["--device", "cpu"]])
    def test_one(self, argv, capsys):
        with pytest.raises(SystemExit):
            _variants.arguments("gpt", "A claim", 1.0, argv)
        assert "--toy" in capsys.readouterr().err

    def test_make(self):
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
