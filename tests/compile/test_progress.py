"""A terminal shows what `functx.jit` is compiling; a pipe stays silent."""

import io
import re
import sys
import time

import pytest
import torch
from cases import numbers

import functx
from functx._compile import backends


class Terminal(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_compile_shows_itself_on_a_terminal_and_leaves_a_line(is_terminal, monkeypatch):
    monkeypatch.setattr(backends, "_QUICK", 0.01)
    monkeypatch.setattr(sys, "stderr", written := Terminal(is_terminal))

    def slow(module, _):
        time.sleep(0.2)
        return module

    def loss(x):
        return x.sin().sum()

    functx.jit(loss, backend=slow)(numbers(3).requires_grad_())
    if not is_terminal:
        assert not written.getvalue()
        return
    first, second, end = written.getvalue().split("\n")
    assert not end
    for line, name in ((first, "loss, backward"), (second, "loss")):
        *shown, last = line.split("\r")[1:]
        assert shown
        assert all(text.endswith("0 s ...") for text in shown)
        assert re.fullmatch(rf"functx\.jit: \S*{name}, \d+ operations, 0 s +", last)


def test_a_quick_compile_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", written := Terminal(True))
    functx.jit(torch.sin, backend=lambda module, _: module)(numbers(3))
    assert not written.getvalue()
