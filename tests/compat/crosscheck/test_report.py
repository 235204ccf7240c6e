"""A disagreement is seen, named by line, printed, saved and raised; by the command too."""

import dataclasses
import json
import re
import sys
from xml.etree import ElementTree

import jax
import pytest
import torch

import functx
from functx.__main__ import main
from functx.compat import crosscheck, testing
from functx.compat._to_jax.rules import table as _table
from functx.compat.testing import assert_agrees


def block(x, w):
    y = x @ w
    return torch.nn.functional.gelu(y)  # the line to name


def net(w, x):
    return torch.tanh(functx.remat(block)(x, w)).square().sum()


def arguments():
    return torch.randn(4, 4), torch.randn(3, 4)


@pytest.fixture
def change(monkeypatch):
    """Replace the JAX rule of an operation by a function of its result."""

    def changed(name, how):
        rule = _table._rules[f"aten::{name}"]
        wrong = dataclasses.replace(rule, fn=lambda *a, **k: how(rule.fn(*a, **k)))
        monkeypatch.setitem(_table._rules, f"aten::{name}", wrong)

    _table.load()
    return changed


@jax.custom_jvp
def doubles_tangents(y):
    return y


@doubles_tangents.defjvp
def _(primals, tangents):
    return primals[0], 2 * tangents[0]


def test_a_wrong_derivative_or_value_is_named_with_its_line(change, monkeypatch):
    change("gelu", doubles_tangents)
    report = crosscheck(net, *arguments(), peak=False)
    assert report.differences["value"].agrees
    assert (report.first.name, report.first.what) == ("aten.gelu.default", "derivative")
    assert report.first.source.function == "block"
    monkeypatch.undo()
    change("gelu", lambda y: y * 1.001)
    report = crosscheck(net, *arguments(), peak=False)
    assert not report.agrees
    assert (report.first.name, report.first.what) == ("aten.gelu.default", "value")
    assert report.first.source.text == "return torch.nn.functional.gelu(y)  # the line to name"
    assert report.first.source.function == "block"
    assert report.first.region[-1].endswith("block")
    assert report.first.number == 2
    with pytest.raises(AssertionError) as caught:
        report.assert_agrees()
    message = str(caught.value)
    assert "torch and JAX disagree about net:" in message
    assert re.search(r"the value differs at result \(float32\) by \S+ relative", message)
    assert re.search(r"test_report.py:\d+ in block: `return torch.nn", message)
    assert "aten.gelu.default(float32[3, 4])" in message
    monkeypatch.undo()
    change("gelu", lambda y: y * float("nan"))
    message = " ".join(crosscheck(net, *arguments(), peak=False).problems())
    assert "the value differs at result (float32): NaN or infinity in one framework" in message
    assert "nan relative" not in message


def test_a_write_in_place_and_a_batch_keep_the_line(change):
    def f(x):
        y = x.clone()
        y.mul_(2)
        return y.exp().sum()  # here

    change("exp", lambda y: y * 1.001)
    report = crosscheck(f, torch.randn(2, 3), in_dims=(0,), peak=False)
    assert report.first.source.text.endswith("# here")
    assert report.first.operands == "float32[3]"  # of the first example


def test_rounding_that_adds_up_is_named_as_such():
    def f(x):
        for _ in range(60):
            x = torch.sin(3 * x) * 3  # chaos
        return x

    report = crosscheck(f, torch.randn(50), transforms="value", peak=False, rtol=1e-4)
    assert not report.agrees
    assert report.first.what == "rounding"
    assert report.first.source.text.endswith("# chaos")
    assert "rounding differences have added up" in "".join(report.problems())


def test_a_report_goes_to_json_html_and_tables(tmp_path, change):
    change("gelu", lambda y: y * 1.001)
    report = crosscheck(net, *arguments(), repeats=1, name="a <b> & c")
    read = json.loads(report.to_json(tmp_path / "report.json").read_text())
    assert read["kept_equal"] is True
    assert read["agrees"] is False
    assert read["differences"]["value"]["absolute"] == report.differences["value"].absolute
    assert read["kept_torch"]["by_region"][0]["arguments"] == 112
    assert read["first"]["source"]["function"] == "block"
    page = report.to_html(tmp_path / "report.html").read_text()
    root = ElementTree.fromstring(re.sub("<!doctype html>|<meta[^>]*>", "", page))
    assert not {"src", "href"} & {name for tag in root.iter() for name in tag.attrib}
    text = " ".join(root.itertext())
    for said in ("a <b> & c", "disagree", "Where it starts", "the line to name", "112", "vmap"):
        assert (said in text) == (said != "vmap")
    table = str(report)
    assert "grad: matrix products" in table
    assert table.endswith("\ntorch and JAX disagree")
    assert "DIFFERENT" in table
    assert "first value that differs" in table
    assert "seconds" in table
    assert "a <b> & c" in table


def test_no_operation_to_blame_says_what_else_there_is():
    calls = []

    def stateful(x):
        calls.append(None)
        return x * len(calls)

    report = crosscheck(stateful, torch.randn(3), peak=False)
    assert report.first is None
    message = " ".join(report.problems())
    assert "state that changes from call to call" in message
    assert not crosscheck(stateful, torch.randn(3), peak=False, locate=False).searched


NET = """
from __future__ import annotations
import dataclasses, pickle, typing
import torch, functx

def loss(w, x, scale=1.0):
    return functx.remat(lambda w, x: torch.tanh(x @ w))(w, x).square().sum() * scale

def inputs():
    return pair

def keywords():
    return {"w": torch.randn(3, 3), "x": torch.randn(4, 3)}

@dataclasses.dataclass
class Size:
    n: typing.ClassVar[Number] = 3

class Number: ...

def missing(x):
    import no_such_module

assert typing.get_type_hints(Size) and pickle.loads(pickle.dumps(Size())) == Size()
pair = torch.randn(3, 3), torch.randn(4, 3)

net = torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 2)})
norm = torch.nn.BatchNorm1d(3)
drops, reads = torch.nn.functional.dropout, torch.nonzero

def broken():
    raise ValueError("no data")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net_to_check.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("net_to_check", None)


run = lambda *arguments: main(["crosscheck", *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["net_to_check:loss", "--inputs", "pair", "--transforms", "value,", "jvp"],
        ["net_to_check:loss", "--inputs", "net_to_check:keywords"],
        ["net_to_check:loss", "--inputs", "pair", "--in-dims", "None,0"],
        ["net_to_check:loss", "--args", "float32[3,3]", "float32[4,3]", "0.5"],
        ["net_to_check:net.layer", "--args", "float32[4,3]", "--argnums", "(0, 1)"],
    ],
)
def test_agreement_is_status_0(arguments, folder, capsys):
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    assert "grad" in captured.out or "jvp" in captured.out
    assert captured.out.endswith("torch and JAX agree\n")
    assert captured.err == ""


def test_disagreement_is_status_1_and_says_where(folder, capsys):
    assert run("net_to_check.py:loss", "--rtol", "-1") == 1
    captured = capsys.readouterr()
    assert "DIFFERENT" in captured.out
    assert "functx crosscheck: the grad differs at [0]" in captured.err
    assert "net_to_check.py:7 in <lambda>" in captured.err


def test_a_file_is_found_by_its_path_whatever_its_name(folder):
    (folder / "random.py").write_text(NET)
    assert run("random.py:loss", "--inputs", "random.py:inputs") == 0
    assert sys.modules.pop("random_").__file__ == str((folder / "random.py").resolve())


def test_files_are_written(folder, capsys):
    written = ["--json", "r.json", "--html", "r.html"]
    assert run("net_to_check.py:loss", *written, "--repeats", "1") == 0
    assert json.loads((folder / "r.json").read_text())["agrees"] is True
    assert "torch and JAX agree" in (folder / "r.html").read_text()
    assert "written: r.json" in capsys.readouterr().out
    assert run("net_to_check.py:loss", "--json", "nowhere/r.json") == 2
    assert "can't write nowhere/r.json: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss"], "write module:function or file.py:function"),
        (["nowhere.py:loss"], "there is no file nowhere.py"),
        (["no_such_module:loss"], "a file (file.py:name)?"),
        (["net_to_check.py:lost"], "has no 'lost'; it has Number, Size, annotations, broken"),
        (["net_to_check.py:loss", "--inputs", "broken"], "broken() raised ValueError: no data"),
        (["net_to_check.py:loss", "--inputs", "pair", "--args", "1"], "not both"),
        (["net_to_check.py:loss", "--args", "float32[3"], "neither a tensor such as"),
        (["net_to_check.py:loss", "--args", "real[3]"], "torch has no dtype 'real'"),
        (["net_to_check.py:drops", "--args", "float32[3]"], "functx.compat.random"),
        (["net_to_check.py:drops", "--args", "float32[3]"], "model.eval()"),
        (["net_to_check.py:reads", "--args", "float32[3]"], "aten.nonzero.default has a result"),
        (["net_to_check:loss", "--args", "float32[3,3]", "float64[4,3]"], "RuntimeError"),
        (["net_to_check.py:missing", "--args", "float32[3]"], "ModuleNotFoundError: No module"),
        (["functx.compat.random:key"], "define `inputs` in the same module"),
        (["torch.nn:Linear", "--args", "float32[3]"], "can't be constructed without arguments"),
        (["net_to_check.py:missing", "--args", "float32[3]"], "net_to_check.py:22 in missing"),
        (["net_to_check:norm", "--args", "float32[4,3]"], "model.eval()"),
        (["net_to_check:loss", "--transforms", "vmap(grad)"], "needs in_dims (--in-dims)"),
        (["hf:lama"], "no model type or class of models 'lama'; similar names are llama"),
        (["hf:BertForMaskedLMs"], "similar names are BertForMaskedLM"),
        (["hf:BertTokenizer"], "no model type or class of models 'BertTokenizer'"),
    ],
)
def test_what_can_not_be_compared_is_status_2(arguments, message, folder, capsys):
    if arguments[0].startswith("hf:"):
        pytest.importorskip("transformers")
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("functx crosscheck: ")
    assert message in captured.err
    assert "TRACEBACK" not in captured.err
    assert captured.out == ""


def test_a_model_type_is_compared_by_example(capsys):
    pytest.importorskip("transformers")
    assert run("hf:bert", "--transforms", "vmap(grad)", "--in-dims", "None,0") == 0
    assert "vmap(grad): distance from float64" in capsys.readouterr().out


def test_a_model_type_that_can_not_be_made_small_says_so(capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(
        "functx.compat.testing.small_models.make", lambda *_: torch.ones(2) @ torch.ones(3)
    )
    assert run("hf:llama") == 2
    said = capsys.readouterr().err
    assert re.search(r"hf:llama: found no small model .*RuntimeError: .*in a file", said)


@pytest.mark.parametrize("name", ["layoutlmv3", "nemotron", "patchtst", "timesfm"])
def test_sizes_that_depend_on_each_other_or_that_are_left_open_are_found(name):
    pytest.importorskip("transformers")
    from functx.compat.testing import small_models

    cls, config, _ = small_models.find(name)
    assert config.model_type == name
    parameters = small_models.make(cls, config).parameters()
    assert sum(p.numel() for p in parameters) < 50_000


def test_the_traceback_is_shown_where_it_is_asked_for(folder, capsys):
    assert run("net_to_check.py:missing", "--args", "float32[3]", "--traceback") == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_without_jax_it_says_what_to_install(folder, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    monkeypatch.delitem(functx.compat.__dict__, "crosscheck", raising=False)
    assert run("net_to_check.py:loss") == 2
    assert "pip install 'functx[jax]'" in capsys.readouterr().err


def test_assert_agrees_raises_with_a_message_and_sees_kept_bytes(monkeypatch):
    loss = lambda w, x: torch.tanh(functx.remat(torch.matmul)(x, w)).square().sum()
    args = torch.randn(3, 3), torch.randn(5, 3)
    report = assert_agrees(loss, *args, in_dims=(None, 0), transforms=("value", "vmap(grad)"))
    assert set(report.differences) == {"value", "vmap(grad)"}
    with pytest.raises(AssertionError, match="the batch\ntorch and JAX disagree about <lambda>:"):
        assert_agrees(loss, *args, rtol=-1.0, msg="the batch")
    assert_agrees(loss, *args, rtol=0.0, atol=1e-3)
    monkeypatch.setattr("functx.compat._crosscheck.report.Crosscheck.kept_equal", False)
    with pytest.raises(AssertionError, match="bytes kept at region boundaries differ"):
        assert_agrees(loss, *args)
    assert_agrees(loss, *args, kept=False)
    assert testing.__all__ == ["assert_agrees", "assert_model_agrees"]


def test_a_model_type_is_checked_at_a_small_size_in_a_test_as_by_the_command(capsys):
    pytest.importorskip("transformers")
    where = "encoder.layer.*"
    report = testing.assert_model_agrees("BertModel", remat=where, transforms=["grad"], peak=True)
    assert (report.kept_jax.regions, report.runs["grad"].products.torch_recomputed) == (2, 16)
    assert run("hf:bert", "--remat", where, "--transforms", "grad") == 0
    assert capsys.readouterr().out == f"{report}\n"
    with pytest.raises(AssertionError, match="disagree about BertModel"):
        testing.assert_model_agrees("bert", transforms=["value"], rtol=-1.0)
