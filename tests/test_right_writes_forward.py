"""Regions that write to what they did not make, in forward mode and on a tape at once.

A write changes the value, its history and its tangent, which has a history too.
"""

import pytest
import torch
from cases import numbers
from programs import check_program
from references import total
from torch.autograd import forward_ad

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X, TANGENT = numbers(3), numbers(3, start=2.0)


def _views(h, x):
    h[1:].add_(x[:2])
    h.view(3, 1).t().mul_(x)
    h[0] = x[1] * x[2]
    h[:1].fill_(0.3)


def _unrecorded(h, _x):
    h.detach().mul_(2.0)
    with torch.no_grad():
        h.mul_(1.5)


WRITES = {"all of it": lambda h, x: h.mul_(x.cos()), "views": _views, "unrecorded": _unrecorded}
MAKES = {
    "computed": lambda x: x.sin() * 1.0,
    "without a tangent": lambda x: x.detach() * 1.0,
    "of nothing": lambda x: torch.ones(3, dtype=x.dtype) * 0.5,
}


def _dual_level(f, x, tangent):
    with forward_ad.dual_level():
        primal, out = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent)))
        return primal * 1.0, out * 1.0


def _twice(f, x, tangent):
    inner = functx.jvp(lambda x: functx.jvp(f, (x,), (tangent,))[1], (x,), (tangent,))
    return total(inner)


STACKS = {
    "jvp": lambda f, x, tangent: functx.jvp(f, (x,), (tangent,)),
    "jvp(jvp)": _twice,
    "jacfwd": lambda f, x, _: functx.jacfwd(f)(x),
    "grad(jvp)": lambda f, x, tangent: functx.grad(
        lambda x: functx.jvp(f, (x,), (tangent,))[1].sum()
    )(x),
    "vmap(jvp)": lambda f, x, tangent: functx.vmap(lambda x: functx.jvp(f, (x,), (tangent,)))(
        torch.stack([x, x.exp()])
    ),
    "dual level": _dual_level,
}


# Torch refuses to write what is batched into what is not; functx, to give a tangent in the user's
# own dual level to what has none.
CASES = [
    (make, stack)
    for make in MAKES
    for stack in STACKS
    if (make == "computed" or stack != "dual level")
    and (make != "of nothing" or stack != "vmap(jvp)")
]


@pytest.mark.parametrize(("make", "stack"), CASES)
@pytest.mark.parametrize("how", WRITES)
def test_on_a_tape_and_with_tangents(stack, how, make):
    """Values, tangents, and two derivatives in plain autograd of both."""

    def program(remat):
        def f(x):
            a, b = MAKES[make](x), MAKES[make](x)

            def given(t):
                WRITES[how](t, x)
                return torch.tanh(t * t)

            def closing():
                WRITES[how](b, x)
                return torch.tanh(b * x)

            return remat(given)(a) + remat(closing)() + a * x + b.sin()

        x = X.clone().requires_grad_()
        values = STACKS[stack](f, x, TANGENT)
        (first,) = torch.autograd.grad(total(values), x, create_graph=True)
        return values, first, torch.autograd.grad(first.square().sum(), x)

    check_program(program, eps=64)


def test_inside_a_region():
    """What was made in one region is written to in another, below a transform."""

    def program(remat):
        def f(x):
            h = torch.ones(3, dtype=x.dtype) * 0.5

            def closing():
                h.mul_(x)
                return torch.tanh(h)

            return remat(closing)() + h * x

        x = X.clone().requires_grad_()
        values = remat(lambda x: functx.jvp(f, (x,), (TANGENT,)))(x)
        (first,) = torch.autograd.grad(total(values), x, create_graph=True)
        return values, first, torch.autograd.grad(first.square().sum(), x)

    check_program(program, eps=64)


def test_a_write_where_forward_mode_is_off_is_refused():
    """A copy has no tangent there, and what is written to has one."""

    def body(h):
        h.mul_(2)
        return h.sin()

    def f(x):
        h = x * 1
        with forward_ad._set_fwd_grad_enabled(False):
            y = functx.remat(body)(h)
        return h.sum() + y.sum()

    with pytest.raises(functx.RematError, match="a copy of it has another layout"):
        STACKS["grad(jvp)"](f, X, TANGENT)
