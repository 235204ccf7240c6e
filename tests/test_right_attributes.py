"""What a tensor is beside its values: its class, what that makes of functions, its attributes."""

import pytest
import torch
from programs import identity
from references import assert_same
from right import X, weighted
from torch._subclasses import FakeTensor, FakeTensorMode

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

RUNS = 6  # the last ones are of code that is known


class Doubled(torch.Tensor):
    """A subclass for which sine is that of twice the argument."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.sin:
            with torch._C.DisableTorchFunctionSubclass():
                return (args[0] * 2).sin().as_subclass(cls)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("given", ["argument", "closure"])
@pytest.mark.parametrize("pulled", ["method", "function", "off"])
def test_a_subclass_that_overrides_a_function(given, pulled):
    """Not in a backward pass that one of them starts; in a replay it does all the same."""

    def body(x):
        return x.sin().exp() * x

    def program(remat):
        x = X.clone().as_subclass(Doubled).requires_grad_()
        out = remat(body)(x) if given == "argument" else remat(lambda: body(x))()
        if pulled == "method":
            out.sum().backward()
        elif pulled == "function":
            (x.grad,) = torch.autograd.grad(out.sum(), x)
        else:
            with torch._C.DisableTorchFunction():
                out.sum().backward()
        return out.as_subclass(torch.Tensor), x.grad.as_subclass(torch.Tensor)

    for _ in range(RUNS):
        assert_same(program(functx.remat), program(identity))


@pytest.mark.parametrize("read", [True, False])
def test_the_class_of_an_argument_and_its_attributes(read):
    def body(w):
        kind = 2.0 if isinstance(w, torch.nn.Parameter) else 3.0
        w.calls = getattr(w, "calls", 0) + 1
        w.seen = w.detach().cos()
        scaled = w.sin() if read else w * 2
        return scaled * kind * w.scale

    def program(remat):
        w = torch.nn.Parameter(X.clone())
        w.scale = torch.ones(4, dtype=X.dtype, requires_grad=True)
        out = remat(body)(w)
        gradients = torch.autograd.grad(weighted(out), (w, w.scale), create_graph=True)
        second = torch.autograd.grad(weighted(gradients[1]), w)
        assert w.calls == 1
        return out, gradients, second, w.seen

    for _ in range(RUNS):
        assert_same(program(functx.remat), program(identity))


@pytest.mark.parametrize("size", [4, 40000])
@pytest.mark.parametrize("linear", [True, False])
def test_arguments_that_a_replay_has_no_memory_for(size, linear):
    """Nothing reads them, or nothing reads them any more."""

    def body(w, x):
        kind = 2.0 if isinstance(w, torch.nn.Parameter) else 3.0
        return (w if linear else w.sin()) * kind * w.scale + (x if linear else x.exp()) * x.scale

    def program(remat):
        w = torch.nn.Parameter(X.repeat(size // 4))
        x = w * 1
        w.scale, x.scale = 5.0, 7.0
        region = remat(body)
        return torch.autograd.grad(region(w, x).sum(), w)

    for _ in range(RUNS):
        assert_same(program(functx.remat), program(identity))


def test_an_attribute_that_an_argument_gets():
    def body(x):
        x.root = x.exp()
        return x.sin()

    def program(remat):
        x = X.clone().requires_grad_()
        out = remat(body)(x)
        return out, torch.autograd.grad(weighted(out + x.root), x)

    assert_same(program(functx.remat), program(identity))


class AddsToMain(torch.autograd.Function):
    """Adds the gradient of a weight to an attribute of it, and says so."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w * w.scale

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        w.main = w.main + x * g
        w.added = True
        return g * w * w.scale, None


@pytest.mark.parametrize("given", ["argument", "closure"])
def test_attributes_that_a_custom_function_reads_and_sets(given):
    def body(x, w):
        return AddsToMain.apply(x.exp(), w).sin()

    def program(remat):
        w = torch.nn.Parameter(X.cos())
        w.main, w.added, w.scale = torch.zeros_like(X), False, 3.0
        x = X.clone().requires_grad_()
        out = remat(body)(x, w) if given == "argument" else remat(lambda x: body(x, w))(x)
        (gradient,) = torch.autograd.grad(weighted(out), x)
        assert w.added
        return out, gradient, w.main

    for _ in range(RUNS):
        assert_same(program(functx.remat), program(identity))


def test_fake_tensors_stay_what_they_are():
    """They know what they are by attributes of their own."""
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(w)
        y = functx.remat(lambda w, x: (w * x).sin())(fake, torch.ones(3).requires_grad_())
        (g,) = torch.autograd.grad(y.sum(), fake)
    assert (type(g), type(fake), g.shape) == (FakeTensor, FakeTensor, (3,))
