"""The command line: help on every command, errors that name the cause."""

from __future__ import annotations

import sys

import pytest

from functx.__main__ import main


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_each_command_has_a_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "usage: functx" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["paint"], "invalid choice: 'paint'"),
        (["demo", "--epochs", "0"], "0 is not a positive number"),
        (["demo", "--epochs", "many"], "invalid"),
        (["demo", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_usage_names_the_cause(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("device", ["meta", "abacus", "cuda:99"])
def test_a_device_that_is_not_there_is_an_error(device, tmp_path, capsys):
    assert main(["demo", "--quick", "--device", device, "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"functx demo: --device {device}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["sklearn", "rich", "matplotlib"])
def test_a_missing_package_is_named(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo", "--quick"]) == 1
    err = capsys.readouterr().err
    assert {"sklearn": "scikit-learn"}.get(module, module) in err
    assert "pip install 'functx[demo]'" in err


def test_an_out_that_is_a_file_is_left_alone(tmp_path, capsys):
    path = tmp_path / "taken"
    path.write_text("mine")
    assert main(["demo", "--quick", "--out", str(path)]) == 1
    assert "--out" in capsys.readouterr().err
    assert path.read_text() == "mine"
