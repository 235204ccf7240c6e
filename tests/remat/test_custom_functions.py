"""Custom Functions: in regions, with a backward that differentiates, what they hide (rule 4)."""

import pytest
import torch
from cases import numbers
from references import assert_same, count
from torch import nn
from torch.autograd import Function

import functx

from .refusals import right_or_refused, same

X, W, BATCH = numbers(4), numbers(4, start=1.0), numbers(3, 4)


class Scale(Function):
    """``sin(x) * w``, by hand; the old form, with a context in forward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.sin() * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * x.cos() * w, g * x.sin()


class Mapped(Function):
    """The same, as functorch wants it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x.sin() * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    backward = Scale.backward

    @staticmethod
    def jvp(ctx, dx, dw):
        x, w = ctx.saved_tensors
        return dx * x.cos() * w + dw * x.sin()


def leaf(t):
    return t.clone().requires_grad_()


class TestInARegion:
    def test_under_transforms(self):
        def program(remat):
            def f(x):
                return remat(lambda x: Mapped.apply(x * 2, W).exp())(x).sum()

            return (
                functx.vmap(functx.grad(f))(BATCH),
                functx.jacrev(functx.grad(f))(X),
                functx.jvp(f, (X,), (W,)),
            )

        same(program)

    def test_its_forward_runs_again_and_its_backward_once(self):
        x, w = leaf(X), leaf(W)
        counts = count(lambda: functx.remat(Scale.apply)(x, w).sum().backward())
        assert counts["cos"] == 1
        assert 2 <= counts["sin"] <= 3  # forward, backward, and replay, if anything reads it


class TestWhatTheyHide:
    """``apply`` is not shown to function modes."""

    def test_captured_leaves_of_a_fused_layer_get_their_gradients_at_every_order(self):
        class Fused(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(W.clone())

            def forward(self, x):
                return Scale.apply(x.cos(), self.weight).exp()

        def program(remat):
            layer, x = Fused(), leaf(X)
            out = remat(remat(layer))(x).sum()
            first = torch.autograd.grad(out, (x, layer.weight), create_graph=True)
            return first, torch.autograd.grad(sum(g.sum() for g in first), (x, layer.weight))

        same(program)

    @pytest.mark.parametrize("function", [Scale, Mapped])
    def test_a_captured_non_leaf_is_right_or_an_error(self, function):
        def program(remat):
            x, w = leaf(X), leaf(W)
            h = w * 2
            out = remat(lambda x: function.apply(x, h).exp())(x).sum()
            return torch.autograd.grad(out, (x, w))

        right_or_refused(program, way_out="argument")

    @pytest.mark.parametrize("way", ["grad", "vmap(grad)"])
    def test_under_transforms_a_capture_is_right_or_an_error(self, way):
        def program(remat):
            def f(x, h):
                return (remat(lambda x: Mapped.apply(x, h * 1))(h) * x).sum() + remat(
                    lambda x: Mapped.apply(x, h).exp()
                )(x).sum()

            gradient = functx.grad(f, argnums=(0, 1))
            if way == "grad":
                return gradient(X, W)
            return functx.vmap(gradient, in_dims=(0, None))(BATCH, W)

        right_or_refused(program)

    @pytest.mark.parametrize("outer", ["backward", "grad"])
    def test_a_pullback_made_outside_is_right_or_an_error(self, outer):
        def program(remat):
            def loss(x):
                h = x * 2
                y = h.exp()

                def region(v):
                    return torch.autograd.grad(y, h, v, create_graph=True)[0] * v

                return remat(region)(h.sin()).sum()

            if outer == "grad":
                return functx.grad(loss)(X)
            x = leaf(X)
            return torch.autograd.grad(loss(x), x)

        right_or_refused(program, way_out="inside|outside|argument")


def adjoint(transforms):
    """``y = exp(sin(theta) * x)`` with a backward that asks ``grad``, as adjoints are written."""

    class Adjoint(Function):
        @staticmethod
        def forward(x, theta):
            return (theta.sin() * x).exp()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            def weighted(x, t):
                return ((t.sin() * x).exp() * g).sum()

            return transforms.grad(weighted, argnums=(0, 1))(*ctx.saved_tensors)

        generate_vmap_rule = True

    return Adjoint.apply


@pytest.mark.parametrize("inner", [functx, torch.func], ids=["functx", "torch.func"])
class TestBackwardsThatDifferentiate:
    @pytest.mark.parametrize("way", ["vmap(grad)", "vmap(grad) of a parameter"])
    def test_under_transforms(self, inner, way):
        def gradients(transforms, apply):
            argnums = 1 if "parameter" in way else 0
            gradient = transforms.grad(lambda x, w: (apply(x, w) * W).sum(), argnums=argnums)
            return transforms.vmap(gradient, in_dims=(0, None))(BATCH, W)

        expected = gradients(torch.func, adjoint(torch.func))
        assert_same(gradients(functx, adjoint(inner)), expected, eps=8)

    @pytest.mark.parametrize("way", ["backward", "vmap(grad)"])
    def test_in_regions(self, inner, way):
        apply = adjoint(inner)

        def program(remat):
            def loss(x, w):
                return (remat(lambda x, w: apply(x.sin(), w * 2).exp())(x, w) * W).sum()

            if way == "backward":
                x, w = leaf(X), leaf(W)
                return torch.autograd.grad(loss(x, w), (x, w))
            return functx.vmap(functx.grad(loss, argnums=(0, 1)), in_dims=(0, None))(BATCH, W)

        same(program)
