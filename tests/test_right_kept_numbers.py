"""What a custom Function keeps on ``ctx``: compared, but for what names things of this run."""

import time

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx


def function(remember):
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            out = x * w
            ctx.save_for_backward(x, w)
            remember(ctx, x, out)
            return out

        @staticmethod
        def backward(ctx, cotangent):
            x, w = ctx.saved_tensors
            return cotangent * w, (cotangent * x).sum()

    return Times


def an_address(ctx, x, out):
    ctx.where = x.data_ptr()


def the_result_s_address(ctx, x, out):
    ctx.where = out.data_ptr()


def an_id(ctx, x, out):
    ctx.key = id(x)


def a_description(ctx, x, out):
    ctx.about = f"<object at {hex(id(ctx))}>"


def a_counter_of_its_own(ctx, x, out):
    ctx._n = time.perf_counter_ns()


def program(remember, remat):
    f = function(remember)
    x, w = numbers(4, 3).requires_grad_(), torch.tensor(0.7, dtype=torch.float64)
    w.requires_grad_()
    remat(lambda x: f.apply(x.sin(), w).cos())(x).sum().backward()
    return x.grad, w.grad


@pytest.mark.parametrize(
    "remember", [an_address, the_result_s_address, an_id, a_description, a_counter_of_its_own]
)
def test_names_of_this_run_are_not_compared(remember):
    assert_same(program(remember, functx.remat), program(remember, identity))


def test_the_attribute_is_named():
    def remember(ctx, x, out):
        ctx.factor, ctx.turn = 2.0, time.perf_counter_ns()

    with pytest.raises(functx.ReplayError, match=r"in ctx\.turn \(.*underscore"):
        program(remember, functx.remat)
