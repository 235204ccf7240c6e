"""The first call of a jitted function compiles it as any other, whatever mode is around."""

import re

import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import functx
from functx import _torch
from functx._core import compiler_warnings
from functx._torch import compiler

X = numbers(3)


def two_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    return functx.apply_remat(model, nn.Tanh)


def test_residuals_of_a_jitted_function_are_what_its_pullback_keeps():
    model = two_layers()
    jitted = functx.jit(model, backend="aot_eager")
    first = functx.saved_residuals(jitted, X)
    assert_same(jitted(X), model(X), eps=8)
    without_lines = lambda rs: [(r[0], re.sub(r":\d+", "", r[1]), r[2]) for r in rs]
    assert without_lines(functx.saved_residuals(jitted, X)) == without_lines(first)
    made = sorted(r.shape for r in first if r.made)  # the compiler may reorder them
    assert made == sorted(r.shape for r in functx.saved_residuals(model, X) if r.made)


def test_residuals_of_what_inductor_compiles_are_an_error_that_says_what_to_ask(monkeypatch):
    monkeypatch.setattr(compiler, "inductor", lambda module, *_: lambda args: module(*args))
    model = two_layers()
    jitted = functx.jit(model)
    with pytest.raises(TypeError, match=r'saved_residuals use backend="aot_eager"'):
        functx.saved_residuals(jitted, X)
    assert_same(jitted(X), model(X), eps=8)


def test_a_mode_around_a_call_sees_it_in_eager_and_a_warning_says_so(monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    model = two_layers()
    jitted = functx.jit(model, backend="aot_eager")

    def flops():
        with FlopCounterMode(display=False) as counter:
            assert_same(jitted(X), model(X), eps=8)
        return counter.get_total_flops()

    with pytest.warns(RuntimeWarning, match="runs in eager, inside of a dispatch mode") as seen:
        counts = [flops(), flops()]
    assert len([w for w in seen if w.category is RuntimeWarning]) == 1
    assert counts[0] == counts[1] == 2 * 2 * (3 * 4 + 4 * 4)
    assert _torch.dispatch_depth() == 0
    assert_same(jitted(X), model(X), eps=8)
