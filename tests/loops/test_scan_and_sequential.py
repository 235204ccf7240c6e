"""`remat_scan` takes pytrees, also of no steps; `remat_sequential` cuts a chain into segments."""

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same, count
from torch import nn
from torch.nn import functional as F

import functx
from functx import _schedules

from . import plain

pytestmark = pytest.mark.usefixtures("no_hooks")

X, WEIGHT = numbers(64, 4), numbers(4, 4) / 2


def test_a_scan_of_pytrees():
    def body(carry, x):
        i, (h, frozen) = carry
        h = torch.tanh(h + x["a"] * x["b"].sum())
        return (i + 1, (h, frozen)), {"h": h, "i": i, "none": None, "flag": h.sum() > 0}

    xs = {"a": numbers(6, 3).requires_grad_(), "b": numbers(6, 2), "c": None}
    carry = (0, (numbers(3), torch.arange(3)))
    (i, (h, frozen)), ys = functx.remat_scan(body, carry, xs, slots=2)
    assert (i, ys["i"].tolist(), ys["none"]) == (6, list(range(6)), None)
    assert ys["flag"].dtype == torch.bool
    assert torch.equal(frozen, torch.arange(3))
    assert torch.equal(ys["h"][-1], h)
    (gradient,) = torch.autograd.grad(ys["h"].sum(), xs["a"])
    h, hs = numbers(3), []
    for a, b in zip(xs["a"], xs["b"]):
        h = torch.tanh(h + a * b.sum())
        hs.append(h)
    assert_same(ys["h"], torch.stack(hs))
    assert_same(gradient, torch.autograd.grad(sum(h.sum() for h in hs), xs["a"])[0], 64)


def test_a_scan_of_a_recurrent_cell():
    def run(scan):
        torch.manual_seed(0)
        cell, xs = nn.LSTMCell(4, 3, dtype=DTYPE), numbers(9, 2, 4).requires_grad_()

        def body(carry, x):
            new = cell(x, carry)
            return new, new[0]

        carry, ys = scan(body, (numbers(2, 3), numbers(2, 3, start=1.0)), xs)
        return torch.autograd.grad(carry[1].sum() + ys.square().sum(), [xs, *cell.parameters()])

    assert_same(run(functx.remat_scan), run(plain.scan), eps=64)


@pytest.mark.parametrize("length", [None, 0])
def test_a_scan_of_no_steps_has_results_of_its_body_s_shapes(length):
    before = torch.get_rng_state()
    xs = None if length == 0 else torch.empty(0, 3)
    carry, ys = functx.remat_scan(
        lambda c, x: (c, (F.dropout(c), None, 1)), torch.ones(2), xs, length
    )
    assert torch.equal(carry, torch.ones(2))
    assert (ys[0].shape, ys[1], ys[2].shape) == ((0, 2), None, (0,))
    assert torch.equal(torch.get_rng_state(), before)
    assert functx.remat_loop(torch.sin, 3, 0) == 3


@pytest.mark.parametrize("segments", [1, 2, 3, 7])
def test_a_chain_runs_all_but_its_last_segment_again(segments):
    layers = [nn.Sequential(nn.Linear(4, 4, dtype=DTYPE), nn.Tanh()) for _ in range(7)]

    def run(f):
        x = X.detach().requires_grad_()
        y = f(x)
        return y, torch.autograd.grad(y.sum(), [x, *nn.Sequential(*layers).parameters()])

    for functions in (layers, nn.Sequential(*layers), iter(layers)):
        ours = run(lambda x, functions=functions: functx.remat_sequential(functions, segments, x))
        assert_same(ours, run(nn.Sequential(*layers)))
    start, end = _schedules.segments(7, segments)[-1]
    counts = count(run, lambda x: functx.remat_sequential(layers, segments, x))
    assert counts["tanh"] == 7 + 7 - (end - start)
