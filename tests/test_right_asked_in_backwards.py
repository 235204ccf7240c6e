"""What hooks and custom Functions ask of tensors about their tapes, in the pullback of a replay."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch.autograd import Function

import functx
from functx._errors import RematError

X = numbers(3)

ASKED = {
    "is_leaf": lambda t: 2 if t.is_leaf else 3,
    "grad_fn": lambda t: 2.0 + len(type(t.grad_fn).__name__),
    "_base": lambda t: 2 if t._base is None else 3,
    "output_nr": lambda t: 2.0 + t.output_nr,
    "_version": lambda t: 2.0 + t._version,
    "_is_view": lambda t: 2.0 + t._is_view(),
    "requires_grad": lambda t: 2.0 + t.requires_grad,
}
GIVEN = {
    "leaf": lambda x: x,
    "computed": lambda x: x * 1,
    "written": lambda x: (x * 1).add_(1),
    "view": lambda x: (x * 1)[1:],
    "second": lambda x: x.sort()[0].chunk(3)[1],
}


class Scaled(Function):
    @staticmethod
    def forward(x, ask):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.ask = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.ask(*ctx.saved_tensors), None


def hook(x, ask):
    h = x.sin()
    h.register_hook(lambda g: g * ask(x))
    return h * h


def function(x, ask):
    return Scaled.apply(x, ask).sin()


def on_a_result(x, ask):
    return Scaled.apply(x.sin(), ask).sin()


BODIES = (hook, function, on_a_result)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("body", BODIES)
def test_as_without_remat(body, asked, given, nested):
    def gradient(remat):
        x = X.clone().requires_grad_()
        region = remat(lambda x: body(x, ASKED[asked]))
        y = remat(lambda x: region(x))(GIVEN[given](x)) if nested else region(GIVEN[given](x))
        return torch.autograd.grad(y.sum(), x)

    assert_same(gradient(functx.remat), gradient(identity))


@pytest.mark.parametrize("asked", ["is_leaf", "grad_fn", "_base", "output_nr", "_is_view"])
@pytest.mark.parametrize("body", [hook, function])
@pytest.mark.parametrize("around", [functx.grad, torch.func.grad])
def test_under_a_transform_it_is_an_error(around, body, asked):
    region = functx.remat(lambda x: body(x, ASKED[asked]))
    with pytest.raises(RematError, match=rf"under a transform, for \.{asked}"):
        around(lambda x: region(x * 1).sum())(X)


@pytest.mark.parametrize("asked", ["is_leaf", "grad_fn", "_base", "output_nr"])
def test_under_a_transform_results_answer(asked):
    def gradient(remat):
        region = remat(lambda x: on_a_result(x, ASKED[asked]))
        return functx.grad(lambda x: region(x * 1).sum())(X)

    assert_same(gradient(functx.remat), gradient(identity))
