"""Lean reverse mode drops no outer derivative, and sees what torch.func sees."""

import itertools

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import func as torch_func
from torch.utils.checkpoint import checkpoint

import functx
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
        return 6 * Squared.apply(ctx.saved_tensors[0]) * cotangent


class Squared(Cubed):
    """Its backward hands a saved tensor on as it is: that of half a square."""

    @staticmethod
    def forward(x):
        return x * x / 2

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


Y = numbers(3, start=1.0)
WAYS = {
    "grad": lambda f, x: transforms.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: transforms.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: transforms.vmap(f)(torch.stack([x, x + 1])).diff(dim=0)[0],
    "backward": lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x)[0],
}


@pytest.mark.parametrize("inner", [hook_with_outer_variable, function_with_outer_variable])
@pytest.mark.parametrize("way", WAYS)
def test_a_backward_may_read_a_variable_that_the_forward_did_not_see(way, inner):
    found = WAYS[way](lambda x: inner(transforms, x, Y), numbers(3))
    assert_same(found, torch.full((3,), 2.0, dtype=DTYPE), eps=2)


@pytest.mark.parametrize("inner", [hook_with_outer_variable, function_with_outer_variable])
def test_also_three_levels_up(inner):
    def outer(x):
        return transforms.grad(lambda z: (inner(transforms, z**3, Y) * z).sum())(x).sum()

    x = numbers(3)
    assert_same(transforms.grad(outer)(x), 24 * x**2, eps=8)


def smooth(x):
    return torch.tanh(x @ numbers(3, 3)).prod() + torch.sin(x * x).sum()


NAMES = ["grad", "jacrev", "vjp", "value_and_grad", "hessian"]
PAIRS = itertools.product(range(5), repeat=2)
# Any two of them at any two depths, but for Hessians of Hessians, which take long.
STACKS = [(NAMES[a], NAMES[b], NAMES[(a + b) % 5]) for a, b in PAIRS]
STACKS = [stack for stack in STACKS if stack.count("hessian") < 2]


@pytest.mark.parametrize("stack", [*STACKS, ("grad",) * 3], ids="-".join)
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
def test_a_saved_tensor_that_becomes_the_gradient_is_no_dead_wrapper(function, depth):
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


class TestClosures:
    def test_a_parameter_that_is_closed_over_gets_its_gradient_by_backward(self):
        w = numbers(3).requires_grad_()
        transforms.grad(lambda x: (x * w).sin().sum())(x := numbers(3, start=1.0)).sum().backward()
        expected = torch.autograd.functional.vjp(
            lambda w: (w * torch.cos(x * w)).sum(), w.detach()
        )[1]
        assert_same(w.grad, expected, eps=4)

    @pytest.mark.parametrize("outer", ["grad", "jacrev", "jvp", "vmap", "vjp"])
    def test_a_tensor_of_a_level_around_keeps_its_derivative(self, outer):
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


class TestSavedTensorHooks:
    """torch.func forbids them; so do we, but say what to use."""

    @pytest.mark.parametrize("name", ["grad", "value_and_grad", "jacrev", "hessian"])
    def test_an_error_names_what_to_use_in_place_of_torchs_checkpoint(self, name):
        def f(x):
            return checkpoint(torch.sin, x, use_reentrant=False).sum()

        with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
            getattr(transforms, name)(f)(numbers(3))
        (note,) = caught.value.__notes__
        assert "functx.remat" in note
        assert "functx.checkpoint" in note

    def test_hooks_work_again_afterwards(self):
        with pytest.raises(ZeroDivisionError):
            transforms.grad(lambda x: x / (1 // 0))(torch.tensor(1.0))
        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            assert_same(torch.autograd.grad(x.sin().sum(), x)[0], x.cos())


def newton(t):
    """The minimum of a function, by its Hessian: forward over reverse, differentiated again."""

    def f(x, t):
        return ((x - t).pow(2) + x.cos()).sum()

    x = torch.zeros_like(t)
    for _ in range(3):
        x = x - torch.linalg.solve(functx.hessian(f)(x, t), functx.grad(f)(x, t))
    return x


@pytest.mark.parametrize("jacobian", [functx.jacrev, functx.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_newton_steps_in_a_region(jacobian, requires_grad):
    """Forward mode has zeros without memory, which are on the tape when it has ended."""
    t = numbers(4).requires_grad_(requires_grad)
    found = jacobian(functx.remat(newton))(t)
    torch.testing.assert_close(found, jacobian(newton)(t), rtol=1e-10, atol=1e-12)
