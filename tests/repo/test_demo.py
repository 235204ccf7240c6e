"""The command line; the demo's claims, in bytes and operations, and all of it at toy size."""

import json
import subprocess
import sys

import pytest

from functx.__main__ import main
from functx._cli.demo import measurement, training


def batch_of(examples, **size):
    images, labels = training.load(limit=examples)
    return training.init(**size), images, labels


@pytest.fixture(scope="module")
def rows():
    """The demo's own model and batch, at full size, without the training."""
    rows = measurement.torch_rows(batch_of(48), repeats=1)
    return {(row["library"], row["remat"]): row for row in rows}


def test_peak_is_at_most_a_third_of_torch_func(rows):
    plain = rows["torch.func", "no"]["peak_bytes"]
    assert rows["functx", "functx.remat"]["peak_bytes"] * 3 <= plain
    assert rows["functx", "no"]["peak_bytes"] * 2 <= plain


def demo(tmp_path):
    """Run the toy demo in a process of its own; returns its output and figures."""
    command = [sys.executable, "-W", "error", "-m", "functx", "demo", "--quick", "--out"]
    run = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads((tmp_path / "figures.json").read_text())


# The only run of the whole program: it trains, and compiles with JAX.
def test_it_runs_from_start_to_end_and_writes_its_figures(tmp_path):
    pytest.importorskip("jax")
    text, figures = demo(tmp_path)
    assert "held out:" in text
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "printout.txt").read_text().rstrip() in text
    assert figures["training"]["steps"] == 8
    ways = ["no", "torch.utils.checkpoint", "no", "functx.remat", "no", "jax.checkpoint"]
    assert [row["remat"] for row in figures["rows"]] == ways
    libraries = [row["library"] for row in figures["rows"]]
    assert libraries == ["torch.func"] * 2 + ["functx"] * 2 + ["JAX (jit)"] * 2
    kept = [row["kept_bytes"] for row in figures["rows"]]
    assert kept[5] < kept[4]
    check = figures["crosscheck"]
    assert check["kept_equal"]
    assert check["kept_torch"]["regions"] == 2
    assert set(check["differences"]) == {"value", "grad", "vmap(grad)"}
    for difference in check["differences"].values():
        assert difference["relative"] < 1e-5


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_each_command_has_a_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "usage: functx" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["meta", "abacus", "cuda:99"])
def test_a_device_that_is_not_there_is_an_error(device, tmp_path, capsys):
    assert main(["demo", "--quick", "--device", device, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"functx demo: --device {device}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["sklearn", "rich", "matplotlib"])
def test_a_missing_package_is_named(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo", "--quick"]) == 2
    err = capsys.readouterr().err
    assert {"sklearn": "scikit-learn"}.get(module, module) in err
    assert "pip install 'functx[demo]'" in err


def test_an_out_that_is_a_file_is_left_alone(tmp_path, capsys):
    path = tmp_path / "taken"
    path.write_text("mine")
    assert main(["demo", "--quick", "--out", str(path)]) == 2
    assert "--out" in capsys.readouterr().err
    assert path.read_text() == "mine"
