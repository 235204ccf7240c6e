"""Tensors that a region reaches otherwise than through its arguments, at every level.

Left alone, such a tensor gives silently wrong gradients: each test compares with the same program
without remat, and asserts that the gradient at stake is not zero.
"""

import functools

import pytest
import torch
from cases import numbers
from programs import check_program, identity
from references import assert_same, total
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("hooks")

X, Y = numbers(3), numbers(3, start=1.0)


class TestLevels:
    """``w`` is closed over; its derivative is what the test asks for."""

    def test_a_parameter_by_backward(self):
        def program(remat):
            w = Y.clone().requires_grad_()
            remat(lambda x: (x * w).sin())(X).sum().backward()
            return w.grad

        check_program(program)

    def test_a_parameter_and_an_argument(self):
        def program(remat):
            w, x = Y.clone().requires_grad_(), X.clone().requires_grad_()
            remat(lambda x: (x * w).sin())(x).sum().backward()
            return w.grad, x.grad

        check_program(program)

    def test_a_parameter_below_grad(self):
        def program(remat):
            w = Y.clone().requires_grad_()
            gradient = functx.grad(lambda x: remat(lambda x: (x * w).sin())(x).sum())(X)
            return gradient, torch.autograd.grad(gradient.sum(), w)

        check_program(program, eps=4)

    def test_a_parameter_below_vmap_and_grad(self):
        def program(remat):
            w = Y.clone().requires_grad_()
            per_example = functx.vmap(
                functx.grad(lambda x: remat(lambda x: (x * w).sin())(x).sum())
            )(numbers(4, 3))
            return per_example, torch.autograd.grad(per_example.sum(), w)

        check_program(program, eps=8)

    @pytest.mark.parametrize("region_argument", ["none", "constant"])
    def test_a_tensor_of_a_grad_level(self, region_argument):
        def program(remat):
            def loss(w):
                if region_argument == "none":
                    return remat(lambda: (w * X).sin())().sum()
                return remat(lambda x: (w * x).sin())(X).sum()

            return functx.grad(loss)(Y)

        check_program(program)

    def test_a_tensor_of_a_vjp_level(self):
        def program(remat):
            out, pullback = functx.vjp(lambda w: remat(lambda x: (w * x).sin())(X), Y)
            return out, pullback(X), pullback(Y)

        check_program(program)

    def test_a_tensor_of_a_jvp_level(self):
        check_program(
            lambda remat: functx.jvp(lambda w: remat(lambda x: (w * x).sin())(X), (Y,), (X,))
        )

    def test_a_tensor_of_a_vmap_level(self):
        check_program(
            lambda remat: functx.vmap(lambda w: remat(lambda x: (w * x).sin())(X))(numbers(4, 3))
        )

    def test_a_tensor_of_a_jvp_level_below_a_vmap_level(self):
        def program(remat):
            def f(w, x):
                return functx.jvp(lambda w: remat(lambda: (w * x).sin())(), (w,), (x,))[1]

            return functx.vmap(f, (None, 0))(Y, numbers(4, 3))

        check_program(program)

    def test_tensors_of_four_levels_at_once(self):
        def program(remat):
            base = Y.clone().requires_grad_()

            def with_vmap(batched):
                def with_jvp(dual):
                    def with_grad(tracked):
                        region = remat(lambda x: torch.sin(x * base * batched * dual * tracked))
                        return region(X).sum()

                    return functx.grad(with_grad)(X * 0.5)

                return functx.jvp(with_jvp, (Y,), (X,))

            out = functx.vmap(with_vmap)(numbers(4, 3, start=2.0))
            return out, torch.autograd.grad(total(out), base)

        check_program(program, eps=16)

    @pytest.mark.parametrize("first", ["grad", "jvp", "vmap"])
    @pytest.mark.parametrize("second", ["grad", "jvp", "vmap"])
    def test_captured_at_two_levels(self, first, second):
        def up(name, f, x):
            if name == "grad":
                return functx.grad(lambda w: f(w).sum())(x)
            if name == "jvp":
                return functx.jvp(f, (x,), (Y,))[1]
            return functx.vmap(f)(torch.stack([x, 2 * x])).sum(0)

        def program(remat):
            def outer(a):
                def inner(b):
                    return remat(lambda x: torch.exp(x * a.sin() * b))(X)

                return up(second, inner, Y)

            return up(first, outer, X)

        check_program(program, eps=8)


class TestKindsOfCapture:
    def test_a_tensor_with_history(self):
        def program(remat):
            w = Y.clone().requires_grad_()
            scale = w.exp()
            out = remat(lambda x: (x * scale).sin())(X)
            return torch.autograd.grad(out.sum(), (w, scale))

        check_program(program)

    def test_a_view_of_a_parameter(self):
        def program(remat):
            w = numbers(2, 3).requires_grad_()
            row = w[1]
            return torch.autograd.grad(remat(lambda x: (x * row + w[0]).sin())(X).sum(), w)

        check_program(program)

    def test_a_tensor_in_a_container(self):
        def program(remat):
            state = {"w": [Y.clone().requires_grad_()]}
            out = remat(lambda x: (x * state["w"][0]).sin())(X)
            return torch.autograd.grad(out.sum(), state["w"])

        check_program(program)

    def test_a_default_argument_and_a_partial(self):
        def program(remat):
            w = Y.clone().requires_grad_()
            first = remat(lambda x, w=w: (x * w).sin())(X)
            second = remat(functools.partial(torch.mul, w))(X)
            third = remat(functools.partial(lambda x, scale: x * scale, scale=w))(X)
            return torch.autograd.grad((first + second * third).sum(), w)

        check_program(program, eps=4)

    def test_an_attribute(self):
        class Holder:
            def __init__(self, w):
                self.w = w

            def __call__(self, x):
                return (x * self.w).sin()

        def program(remat):
            holder = Holder(Y.clone().requires_grad_())
            out = remat(holder)(X) + remat(holder.__call__)(X)
            return torch.autograd.grad(out.sum(), holder.w)

        check_program(program)

    def test_parameters_of_a_module(self):
        def program(remat):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
            out = remat(lambda x: net(x).sin())(numbers(5, 3))
            plain = torch.autograd.grad(out.sum(), list(net.parameters()))
            per_example = functx.vmap(functx.grad(lambda x: remat(lambda x: net(x))(x).sum()))
            gradient = per_example(numbers(5, 3))
            first_weight = next(net.parameters())
            return plain, gradient, torch.autograd.grad(gradient.sum(), first_weight)

        check_program(program, eps=16)

    def test_met_only_inside_a_custom_function(self):
        """Python passes it straight to ``Function.apply``: no torch operation sees it first."""

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(a, b):
                return a * b

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(*inputs)

            @staticmethod
            def backward(ctx, cotangent):
                a, b = ctx.saved_tensors
                return cotangent * b * 2, cotangent * a * 3  # not the true ones: its own are used

        def program(remat):
            w = Y.clone().requires_grad_()
            out = remat(lambda x: Product.apply(x, w))(X)
            plain = torch.autograd.grad(out.sum(), w)
            transformed = functx.grad(lambda w: remat(lambda x: Product.apply(x, w))(X).sum())(Y)
            return plain, transformed

        check_program(program)

    def test_met_late(self):
        def program(remat):
            w = Y.clone().requires_grad_()

            def f(x):
                for _ in range(5):
                    x = x.sin()
                return x * w if x.sum() != 0 else x

            return torch.autograd.grad(remat(f)(X).sum(), w)

        check_program(program)

    def test_returned_as_it_is(self):
        def program(remat):
            w = Y.clone().requires_grad_()
            out, captured = remat(lambda x: (x.sin(), w))(X.clone().requires_grad_())
            plain = torch.autograd.grad((out * captured).sum(), w)
            return plain, functx.grad(lambda w: remat(lambda x: w)(X).sin().sum())(Y)

        check_program(program)

    def test_used_through_numpy_like_constants(self):
        """A tensor that needs no gradient at any level is just read."""
        check_program(
            lambda remat: functx.grad(lambda x: remat(lambda x: (x * Y).sin())(x).sum())(X)
        )

    def test_an_integer_index(self):
        index = torch.tensor([2, 0])

        def program(remat):
            w = Y.clone().requires_grad_()
            return torch.autograd.grad(remat(lambda x: w[index] * x[index])(X).sum(), w)

        check_program(program)

    def test_the_argument_itself_is_also_captured(self):
        def program(remat):
            x = X.clone().requires_grad_()
            plain = torch.autograd.grad(remat(lambda y: y.sin() * x)(x).sum(), x)
            return plain, functx.grad(lambda x: remat(lambda y: y.sin() * x)(x).sum())(X)

        check_program(program)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("stack", ["grad", "vmap(grad)", "grad(grad)"])
def test_an_inner_region_captures_what_only_an_ended_level_knows(stack, depth):
    """`functx.grad` pulls back after its level has ended: replays meet plain values there."""

    def program(remat):
        def f(w):
            def step(x):
                return x - w * functx.grad(lambda x: torch.sin(x * w).sum())(x)

            for _ in range(depth):
                step = remat(lambda x, inner=step: inner(x * w))
            return step(X).sum()

        if stack == "vmap(grad)":
            return functx.vmap(functx.grad(f))(Y)
        first = functx.grad(f)
        return (functx.grad(first) if stack == "grad(grad)" else first)(Y[0])

    check_program(program, eps=8)


@pytest.mark.parametrize("first", ["wrapper", "value"])
@pytest.mark.parametrize("stack", ["grad", "vmap(grad)", "grad(grad)"])
def test_an_inner_region_captures_a_tensor_and_its_value(stack, first):
    """What `functx.grad` differentiates and what it was called with, which is a constant."""

    def program(remat):
        def f(w, value):
            def step(x):
                return torch.sin(x * w * value.exp() if first == "wrapper" else x * value.exp() * w)

            return remat(lambda x: remat(step)(x))(X).sum()

        if stack == "vmap(grad)":
            return functx.vmap(lambda w: functx.grad(f)(w, w))(Y)
        if stack == "grad(grad)":
            return functx.grad(lambda w: functx.grad(f)(w, w))(Y[0])
        return functx.grad(lambda w: f(w, Y))(Y)

    check_program(program, eps=8)


@pytest.mark.parametrize("handed", ["as it is", "as what it is inside"])
@pytest.mark.parametrize("stack", ["", "grad", "vmap(grad)", "grad(grad)", "jvp"])
def test_an_inner_region_is_given_a_constant_and_closes_over_it(stack, handed):
    """As under `functional_call` with a frozen parameter; around it all is a region, too."""
    constant, weight = numbers(3, start=2.0), numbers(3, 3).requires_grad_()

    def program(remat):
        def f(x):
            def outer(given):
                def inner(given):
                    return torch.tanh(given @ weight) * constant.sin() * x.sin()

                return remat(inner)(constant if handed == "as it is" else given) * given

            return remat(outer)(constant).sum()

        if stack == "vmap(grad)":
            y = remat(functx.vmap(remat(functx.grad(f))))(numbers(2, 3))
        elif stack == "grad(grad)":
            y = remat(functx.grad(lambda x: remat(functx.grad(f))(x).sum()))(X)
        elif stack == "jvp":
            y = remat(lambda x: functx.jvp(f, (x,), (Y,)))(X)
        else:
            y = remat(functx.grad(f) if stack else f)(X)
        return y, torch.autograd.grad(total(y), weight, allow_unused=True)

    check_program(program, eps=8)


def test_the_check_can_fail():
    """Replay without captures, the mistake this file is about, is seen."""

    def naive(f):
        class Naive(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return f(x)

            @staticmethod
            def backward(ctx, cotangent):
                with torch.enable_grad():
                    x = ctx.saved_tensors[0].detach().requires_grad_()
                    return torch.autograd.grad(f(x), x, cotangent)

        return Naive.apply

    def gradient(remat):
        w, x = Y.clone().requires_grad_(), X.clone().requires_grad_()
        out = remat(lambda x: (x * w).sin())(x)
        return torch.autograd.grad(out.sum(), (x, w), allow_unused=True, materialize_grads=True)

    with pytest.raises(AssertionError):
        assert_same(gradient(naive), gradient(identity))
