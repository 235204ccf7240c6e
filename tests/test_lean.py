"""Lean reverse mode drops no outer derivative, and sees what torch.func sees."""

import itertools

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same, total
from torch import func as torch_func
from torch.utils.checkpoint import checkpoint

import functx._transforms as transforms


class Hooked(torch.autograd.Function):
    """Multiplies by 2; its backward multiplies by a variable the forward never saw."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, box):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.box = inputs[1]

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 2 * ctx.box[0], None


class Cubed(torch.autograd.Function):
    """Its backward calls another Function on a saved tensor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 3 * Squared.apply(x) * cotangent


class Squared(torch.autograd.Function):
    """Its backward hands a saved tensor on as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(2 * inputs[0])

    @staticmethod
    def backward(ctx, cotangent):
        return ctx.saved_tensors[0] if cotangent is None else ctx.saved_tensors[0] * cotangent


def hook_with_outer_variable(library, x, y):
    def inner(y):
        h = y * 2
        h.register_hook(lambda gradient: gradient * x)
        return h.sum()

    return library.grad(inner)(y)


def function_with_outer_variable(library, x, y):
    return library.grad(lambda y: Hooked.apply(y, [x]).sum())(y)


@pytest.mark.parametrize("inner", [hook_with_outer_variable, function_with_outer_variable])
class TestBackwardReadsAnOuterVariable:
    """The output of the forward pass knows nothing of ``x``; the gradient depends on it."""

    def test_grad(self, inner):
        x, y = numbers(3), numbers(3, start=1.0)
        gradient = transforms.grad(lambda x: inner(transforms, x, y).sum())(x)
        assert_same(gradient, torch.full((3,), 2.0, dtype=DTYPE))

    def test_jvp(self, inner):
        x, y = numbers(3), numbers(3, start=1.0)
        _, tangent = transforms.jvp(lambda x: inner(transforms, x, y), (x,), (torch.ones_like(x),))
        assert_same(tangent, torch.full((3,), 2.0, dtype=DTYPE))

    def test_vmap(self, inner):
        x, y = numbers(4, 3), numbers(3, start=1.0)
        assert_same(transforms.vmap(lambda x: inner(transforms, x, y))(x), 2 * x)

    def test_backward(self, inner):
        x, y = numbers(3).requires_grad_(), numbers(3, start=1.0)
        inner(transforms, x, y).sum().backward()
        assert_same(x.grad, torch.full((3,), 2.0, dtype=DTYPE))

    def test_depth_three(self, inner):
        x, y = numbers(3), numbers(3, start=1.0)

        def outer(library, x):
            return library.grad(lambda z: (inner(library, z**3, y) * z).sum())(x).sum()

        ours, theirs = (
            library.grad(lambda x, lib=library: outer(lib, x))(x)
            for library in (transforms, torch_func)
        )
        assert_same(ours, theirs, eps=4)
        assert_same(ours, 24 * x**2, eps=8)


def smooth(x):
    return torch.tanh(x @ numbers(3, 3)).prod() + torch.sin(x * x).sum()


STACKS = list(itertools.product(["grad", "jacrev", "vjp", "value_and_grad", "hessian"], repeat=3))


@pytest.mark.parametrize("stack", [*STACKS[::3], ("grad",) * 3, ("jacrev",) * 3], ids="-".join)
def test_no_derivative_is_dropped_at_depth_three(stack):
    def build(library):
        def up(name, f):
            if name == "vjp":
                return lambda x: library.vjp(f, x)[1](torch.ones((), dtype=DTYPE))[0].sum()
            if name == "value_and_grad":
                return lambda x: library.grad_and_value(f)(x)[0].sum() + f(x)
            return lambda x: getattr(library, name)(f)(x).sum()

        f = smooth
        for name in stack:
            f = up(name, f)
        return f

    x = numbers(3)
    outer = numbers(3).requires_grad_()
    ours, theirs = build(transforms)(x), build(torch_func)(x)
    assert ours.abs() > 1e-3
    assert_same(ours, theirs, eps=64)
    batch = numbers(2, 3)
    assert_same(
        transforms.vmap(build(transforms))(batch),
        torch.stack([build(torch_func)(b) for b in batch]),
        eps=64,
    )
    gradients = [
        torch.autograd.grad(build(library)(outer), outer) for library in (transforms, torch_func)
    ]
    assert_same(*gradients, eps=256)


@pytest.mark.parametrize("function", [Cubed, Squared])
@pytest.mark.parametrize("depth", [1, 2])
def test_functions_with_their_own_backward(function, depth):
    def nest(library):
        f = function.apply
        for _ in range(depth):
            f = library.grad(f)
        return f

    x = numbers(4)
    assert_same(
        transforms.vmap(nest(transforms))(x), torch.stack([nest(torch_func)(v) for v in x]), eps=2
    )
    assert not torch._C._functorch.is_functorch_wrapped_tensor(nest(transforms)(x[0]))


class PassesOn(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x / 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        return ctx.saved_tensors[0]


def test_a_saved_tensor_that_becomes_the_gradient_is_no_dead_wrapper():
    x = torch.tensor(3.0)
    gradient = transforms.grad(PassesOn.apply)(x)
    assert gradient.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert not torch._C._functorch.is_functorch_wrapped_tensor(gradient)
    assert gradient.numpy() == 3


class TestClosures:
    def test_a_parameter_gets_its_gradient_by_backward(self):
        w = numbers(3).requires_grad_()
        transforms.grad(lambda x: (x * w).sin().sum())(x := numbers(3, start=1.0)).sum().backward()
        expected = torch.autograd.functional.vjp(
            lambda w: (w * torch.cos(x * w)).sum(), w.detach()
        )[1]
        assert_same(w.grad, expected, eps=4)

    def test_a_tensor_with_history(self):
        w = numbers(3).requires_grad_()
        scale = w.exp()
        gradient = transforms.grad(lambda x: (x * scale).sin().sum())(numbers(3))
        assert torch.autograd.grad(gradient.sum(), w)[0].abs().sum() > 0

    @pytest.mark.parametrize("outer", ["grad", "jacrev", "jvp", "vmap", "vjp"])
    def test_a_tensor_of_a_level_around(self, outer):
        def run(library):
            def f(x):
                inner = library.grad(lambda y: torch.sin(y * x).sum())
                return inner(torch.ones(3, dtype=DTYPE)) * 2

            if outer == "grad":
                return library.grad(lambda x: f(x).sum())(x)
            if outer == "jvp":
                return library.jvp(f, (x,), (numbers(3, start=2.0),))
            if outer == "vjp":
                return library.vjp(f, x)[1](numbers(3, start=2.0))
            return getattr(library, outer)(f)(numbers(2, 3) if outer == "vmap" else x)

        x = numbers(3)
        assert_same(run(transforms), run(torch_func), eps=2)


class TestGradMode:
    def test_no_grad_around_is_not_seen_by_the_transform(self):
        with torch.no_grad():
            assert_same(transforms.grad(torch.sin)(torch.tensor(0.0)), torch.tensor(1.0))
            assert_same(
                transforms.grad(transforms.grad(torch.sin))(torch.tensor(1.0)),
                -torch.tensor(1.0).sin(),
            )

    def test_no_grad_inside_is_respected(self):
        def f(x):
            with torch.no_grad():
                c = x**2
            return (x * c).sum()

        x = numbers(3)
        assert_same(transforms.grad(f)(x), x**2)

    @pytest.mark.parametrize("library", [transforms, torch_func])
    def test_no_grad_between_levels_hides_the_inner_from_the_outer(self, library):
        def f(x):
            with torch.no_grad():
                inner = library.grad(lambda y: (y * x) ** 3 / 3)(x)
            return inner * x

        x = torch.tensor(2.0)
        assert_same(library.grad(f)(x), torch.tensor(32.0))

    def test_parameters_are_not_recorded_under_no_grad(self):
        w = numbers(3).requires_grad_()
        with torch.no_grad():
            gradient = transforms.grad(lambda x: (x * w).sum())(numbers(3))
        assert not gradient.requires_grad

    @pytest.mark.parametrize("inside", [True, False])
    @pytest.mark.parametrize("name", ["grad", "jacrev", "hessian", "vjp"])
    def test_inference_mode(self, name, inside):
        def run(library, x):
            if name == "vjp":
                value, pullback = library.vjp(smooth, x)
                return pullback(torch.ones_like(value))
            return getattr(library, name)(smooth)(x)

        x = numbers(3)
        with torch.inference_mode():
            y = numbers(3) if inside else x
            assert_same(run(transforms, y), run(torch_func, y), eps=2)


class TestSavedTensorHooks:
    """torch.func forbids them; so do we, but say what to use."""

    @pytest.mark.parametrize("name", ["grad", "value_and_grad", "jacrev", "hessian"])
    def test_torch_checkpoint_inside(self, name):
        def f(x):
            return checkpoint(torch.sin, x, use_reentrant=False).sum()

        with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
            getattr(transforms, name)(f)(numbers(3))
        (note,) = caught.value.__notes__
        assert "functx.remat" in note
        assert "functx.checkpoint" in note

    def test_nested_transforms_say_it_once(self):
        def f(x):
            with torch.autograd.graph.save_on_cpu():
                return x.sin()

        nested = transforms.grad(lambda x: transforms.vjp(f, x)[0])
        with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
            nested(torch.tensor(1.0))
        assert len(caught.value.__notes__) == 1

    def test_other_errors_have_no_note(self):
        def f(x):
            raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine") as caught:
            transforms.grad(f)(torch.tensor(1.0))
        assert not hasattr(caught.value, "__notes__")

    def test_hooks_work_again_afterwards(self):
        with pytest.raises(ZeroDivisionError):
            transforms.grad(lambda x: x / (1 // 0))(torch.tensor(1.0))
        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            assert_same(torch.autograd.grad(x.sin().sum(), x)[0], x.cos())


def test_a_graph_kept_by_another_output_is_not_freed():
    """A pullback frees the residuals of its own level only."""
    w = numbers(3).requires_grad_()
    h = w.exp()
    assert_same(
        transforms.grad(lambda x: (x * h).sin().sum())(numbers(3)), h * (numbers(3) * h).cos()
    )
    assert_same(torch.autograd.grad(total(h), w)[0], h)
