"""`functx memory`, `functx plan`, `functx doctor`: figures, files and exit statuses."""

import json
import sys

import pytest
import torch

import functx
from functx.__main__ import main

NET = """
import torch

blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
                               for _ in range(8)))
inputs = lambda: torch.ones(256, 64)
three = lambda x: x.sin().sin().sin()
whole = lambda x: x.long()
wide = torch.nn.Linear(1000, 1000)
loss = lambda x: wide(x).square().mean()
embedding = torch.nn.Embedding(10, 4)
of_words = lambda words: embedding(words).sum()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "net_to_measure.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("net_to_measure", None)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"functx {functx.__version__}\n"


def test_memory_tells_the_peak_of_a_forward_and_a_backward_pass(capsys, tmp_path):
    assert main(["memory", "net_to_measure.py:three", "--args", "float32[1000]", "--forward"]) == 0
    assert "12,000 bytes" in capsys.readouterr().out  # two tapes' sines, and the result
    pytest.importorskip("matplotlib")
    written = ["--json", "m.json", "--plot", "m.png"]
    assert main(["memory", "net_to_measure.py:three", "--args", "float32[1000]", *written]) == 0
    assert "backward of net_to_measure.py" in capsys.readouterr().out
    figures = json.loads((tmp_path / "m.json").read_text())
    assert figures["operations"]["sin"] == figures["operations"]["cos"] == 3
    assert figures["peak"] >= sum(held["nbytes"] for held in figures["at_peak"]) > 12_000
    assert (tmp_path / "m.png").stat().st_size > 1000


def test_memory_counts_gradients_of_what_a_function_closes_over(capsys):
    assert main(["memory", "net_to_measure.py:loss", "--args", "float32[2,1000]"]) == 0
    returned = 4 * (1000 * 1000 + 1000 + 2 * 1000)
    assert f"returned {returned:,} bytes" in " ".join(capsys.readouterr().out.split())
    assert main(["memory", "net_to_measure.py:of_words", "--args", "int64[3]"]) == 0
    assert "returned 160 bytes" in " ".join(capsys.readouterr().out.split())


def test_a_plan_keeps_to_its_budget_and_can_be_loaded(capsys, tmp_path):
    assert main(["plan", "net_to_measure:blocks", "--budget", "0.8", "--json", "p.json"]) == 0
    assert "written: p.json" in capsys.readouterr().out
    plan = functx.Plan.load(tmp_path / "p.json")
    assert plan.recomputed
    assert plan.peak <= plan.budget <= 0.8 * plan.peak_without
    assert main(["plan", "net_to_measure:blocks", "--budget", "10KiB"]) == 1
    assert "no plan fits in 10,240 bytes" in capsys.readouterr().err


def test_the_doctor_tries_what_is_installed(capsys, tmp_path, monkeypatch):
    from functx._cli import doctor

    monkeypatch.delitem(doctor._CHECKS, "functx.jit")  # compiles, for half a minute
    assert main(["doctor", "--json", "d.json"]) == 0
    found = json.loads((tmp_path / "d.json").read_text())
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert found["checks"]["vmap(grad(remat))"] == "works"
    assert "torch" in capsys.readouterr().out
    monkeypatch.setitem(doctor._CHECKS, "broken", lambda: 1 / 0)
    assert main(["doctor"]) == 1
    assert "FAILS: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory", "net_to_measure.py:gone"], "it has blocks, embedding, inputs"),
        (["memory", "net_to_measure.py:whole"], "has no gradient; use --forward"),
        (["memory", "net_to_measure.py:three", "--args", "3"], "no argument can be differentiated"),
        (["memory", "net_to_measure.py:three", "--json", "no/m.json"], "can't write no/m.json"),
        (["plan", "net_to_measure:blocks", "--budget", "much"], "such as '2GiB'"),
    ],
)
def test_what_can_not_be_measured_is_status_2(arguments, says, capsys):
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
