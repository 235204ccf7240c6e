"""A disagreement is seen, named by operation and line, printed, saved and raised."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import jax
import pytest
import torch

import functx
from functx.compat import crosscheck
from functx.compat._lowering import _table
from functx.compat._report import _plain


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
        rule = _table.registered(f"aten::{name}")
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


def test_a_wrong_value_is_named_with_its_line(change):
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


def test_a_wrong_derivative_is_named_with_its_line(change):
    change("gelu", doubles_tangents)
    report = crosscheck(net, *arguments(), peak=False)
    assert report.differences["value"].agrees
    assert (report.first.name, report.first.what) == ("aten.gelu.default", "derivative")
    assert report.first.source.function == "block"


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


class _Text(HTMLParser):
    """Checks that elements close in order, and collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & {name for name, _ in attrs}  # nothing from elsewhere
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_a_report_goes_to_json_html_and_tables(tmp_path, change):
    change("gelu", lambda y: y * 1.001)
    report = crosscheck(net, *arguments(), repeats=1, name="a <b> & c")
    read = json.loads(report.to_json(tmp_path / "report.json").read_text())
    assert read["kept_equal"] is True
    assert read["agrees"] is False
    assert read["differences"]["value"]["absolute"] == report.differences["value"].absolute
    assert read["kept_torch"]["by_region"][0]["arguments"] == 112
    assert read["first"]["source"]["function"] == "block"
    page = _Text()
    page.feed(report.to_html(tmp_path / "report.html").read_text())
    assert page.open == []
    text = " ".join(page.text)
    for said in ("a <b> & c", "disagree", "Where it starts", "the line to name", "112", "vmap"):
        assert (said in text) == (said != "vmap")
    for table in (str(report), _plain("title", [("", "torch", "JAX", ""), *report.rows()])):
        assert "grad: matrix products" in table
        assert "DIFFERENT" in table
        assert "first value that differs" in table
        assert "seconds" in table
    assert "a <b> & c" in str(report)


def test_nan_in_one_framework_only_is_said(change):
    change("gelu", lambda y: y * float("nan"))
    message = " ".join(crosscheck(net, *arguments()).problems())
    assert "the value differs at result (float32): NaN or infinity in one framework" in message
    assert "nan relative" not in message


def test_no_operation_to_blame_says_what_else_there_is():
    calls = []

    def stateful(x):
        calls.append(None)
        return x * len(calls)

    report = crosscheck(stateful, torch.randn(3), peak=False)
    assert report.first is None
    message = " ".join(report.problems())
    assert "state that is not the same at every call" in message
    assert not crosscheck(stateful, torch.randn(3), peak=False, locate=False).searched
