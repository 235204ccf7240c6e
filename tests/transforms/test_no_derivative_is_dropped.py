"""Lean reverse mode drops no outer derivative, and takes no more memory than plain autograd."""

import itertools

import pytest
import torch
from cases import DTYPE, custom_function, deep_mlp, identity, numbers, saves_inputs
from references import Operations, assert_same, count, no_garbage_collection, peak
from torch import func as torch_func
from torch.autograd.functional import hessian, jacobian
from torch.nn.functional import dropout
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import functx
import functx as transforms


def keeps_the_box(ctx, inputs, output):
    ctx.box = inputs[1]


def hands_on(ctx, cotangent):
    (saved,) = ctx.saved_tensors
    return saved if cotangent is None else saved * cotangent


# Multiplies by 2; its backward multiplies by a variable the forward never saw.
doubled = custom_function(
    lambda x, box: x * 2, lambda ctx, g: (g * 2 * ctx.box[0], None), keeps_the_box
)
# Its backward hands a saved tensor on as it is: that of half a square.
squared = custom_function(lambda x: x * x / 2, hands_on, saves_inputs)
# Its backward calls another Function on a saved tensor.
cubed = custom_function(
    lambda x: x**3, lambda ctx, g: 6 * squared(ctx.saved_tensors[0]) * g, saves_inputs
)


def hook_with_outer_variable(library, x, y):
    def inner(y):
        h = y * 2
        h.register_hook(lambda gradient: gradient * x)
        return h.sum()

    return library.grad(inner)(y)


def function_with_outer_variable(library, x, y):
    return library.grad(lambda y: doubled(y, [x]).sum())(y)


def tensor_of_a_level_around(library, x, y):
    return library.grad(lambda y: (y * y * x).sum())(y) / y


Y = numbers(3, start=1.0)
WAYS = {
    "grad": lambda f, x: transforms.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: transforms.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: transforms.vmap(f)(torch.stack([x, x + 1])).diff(dim=0)[0],
    "jacrev": lambda f, x: transforms.jacrev(f)(x).sum(0),
    "vjp": lambda f, x: transforms.vjp(f, x)[1](torch.ones_like(x))[0],
    "backward": lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x)[0],
}


@pytest.mark.parametrize(
    "inner", [hook_with_outer_variable, function_with_outer_variable, tensor_of_a_level_around]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_variable_of_a_level_around_keeps_its_derivative(way, inner):
    found = WAYS[way](lambda x: inner(transforms, x, Y), numbers(3))
    assert_same(found, torch.full((3,), 2.0, dtype=DTYPE), eps=2)


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


@pytest.mark.parametrize("function", [cubed, squared])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_saved_tensor_that_becomes_the_gradient_is_no_dead_wrapper(function, depth):
    def nest(library):
        f = function
        for _ in range(depth):
            f = library.grad(f)
        return f

    x = numbers(4)
    assert_same(
        transforms.vmap(nest(transforms))(x), torch.stack([nest(torch_func)(v) for v in x]), eps=2
    )
    assert not torch._C._functorch.is_functorch_wrapped_tensor(nest(transforms)(x[0]))


class TestGradMode:
    def test_no_grad_around_is_not_seen_by_the_transform(self):
        with torch.no_grad():
            assert_same(transforms.grad(torch.sin)(torch.tensor(0.0)), torch.tensor(1.0))
            assert_same(
                transforms.grad(transforms.grad(torch.sin))(torch.tensor(1.0)),
                -torch.tensor(1.0).sin(),
            )

    @pytest.mark.parametrize("library", [transforms, torch_func])
    def test_no_grad_between_levels_hides_the_inner_from_the_outer(self, library):
        def f(x):
            with torch.no_grad():
                inner = library.grad(lambda y: (y * x) ** 3 / 3)(x)
            return inner * x

        x = torch.tensor(2.0)
        assert_same(library.grad(f)(x), torch.tensor(32.0))


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "jacrev", "hessian"])
def test_an_error_names_what_to_use_in_place_of_torchs_checkpoint(name):
    f = lambda x: checkpoint(torch.sin, x, use_reentrant=False).sum()
    with pytest.raises(RuntimeError, match=r"saved tensor hooks|_NoopSaveInputs") as caught:
        getattr(transforms, name)(f)(numbers(3))
    (note,) = caught.value.__notes__
    assert "functx.remat" in note
    assert "functx.checkpoint" in note


@pytest.mark.parametrize(
    ("f", "way_out"),
    [
        (lambda x: x.sin().requires_grad_().sum(), "disable_input_require_grads()"),
        (lambda x: checkpoint(torch.sin, x, use_reentrant=True).sum(), "functx.patch_checkpoint()"),
    ],
)
def test_an_error_of_torchs_about_checkpointing_names_the_way_out(f, way_out):
    with pytest.raises(RuntimeError) as caught:
        functx.grad(f)(numbers(3))
    (note,) = caught.value.__notes__
    assert way_out in note


VECTOR = numbers(4)
EYE = torch.eye(4, dtype=DTYPE)


def rows(f, x):
    return torch.autograd.grad(f(x) * x, x, EYE, is_grads_batched=True, create_graph=True)[0]


def second(f, x, w):
    return torch.autograd.grad(rows(f, x).square().sum(), (x, w))


def batched_second(f, x, w):
    (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient, (x, w), EYE, is_grads_batched=True)


def batched_twice(f, x, w):
    first = rows(f, x)
    return torch.autograd.grad(first, (x, w), EYE[:, None] * EYE, is_grads_batched=True)


def of_jacobian(f, x, w):
    j = jacobian(f, x, vectorize=True, create_graph=True)
    return j, torch.autograd.grad(j.square().sum(), (x, w))


def hessians(f, x, w):
    return hessian(lambda x: f(x).sin().sum(), x, vectorize=True)


BATCHED = [second, batched_second, batched_twice, of_jacobian, hessians]


@pytest.mark.usefixtures("no_hooks")
@pytest.mark.parametrize("way", BATCHED, ids=lambda w: w.__name__)
@pytest.mark.parametrize("body", ["plain", "random", "nested"])
def test_it_runs_regions_as_it_runs_functions(way, body):
    def program(remat):
        x, w = VECTOR.clone().requires_grad_(), numbers(4, start=1.0).requires_grad_()

        def f(x):
            y = (x * w).sin().exp()
            return dropout(y, 0.5) if body == "random" else y

        region = remat(f)
        if body == "nested":
            region = remat(lambda x, inner=region: inner(x.cos()) * x)
        torch.manual_seed(4)
        return way(region, x, w)

    assert_same(program(functx.remat), program(identity), eps=128)


WEIGHTS, ROWS, LOSS = deep_mlp()


def network(x):
    for w in WEIGHTS:
        x = torch.tanh(x @ w)
    return x


def autograd(weights, x, **options):
    weights = [w.detach().requires_grad_() for w in weights]
    return torch.autograd.grad(LOSS(weights, x), weights, **options)


class TestPeak:
    @pytest.mark.parametrize("name", ["grad", "grad_and_value", "value_and_grad"])
    def test_of_grad_is_that_of_autograd(self, name):
        gradient = getattr(transforms, name)(LOSS)
        lean, expected = peak(gradient, WEIGHTS, ROWS), peak(autograd, WEIGHTS, ROWS)
        assert peak(torch.no_grad()(gradient), WEIGHTS, ROWS) <= lean <= expected
        assert 2.8 * lean < peak(torch_func.grad(LOSS), WEIGHTS, ROWS)  # the measure can fail

    def test_vjp_keeps_what_retain_graph_keeps(self):
        def lean(weights, x, **options):
            value, pullback = transforms.vjp(lambda w: LOSS(w, x), weights)
            return pullback(torch.ones_like(value), **options)

        retained = peak(autograd, WEIGHTS, ROWS, retain_graph=True)
        freed = peak(autograd, WEIGHTS, ROWS)
        assert peak(lean, WEIGHTS, ROWS) <= retained
        assert peak(lean, WEIGHTS, ROWS, retain_graph=False) <= freed < retained

    def test_of_vmap_of_grad_is_below_torchs(self):
        per_example = lambda library: transforms.vmap(library.grad(LOSS), (None, 0))
        x = ROWS[:16, None]
        assert peak(per_example(transforms), WEIGHTS, x) < 0.9 * peak(
            per_example(torch_func), WEIGHTS, x
        )

    def test_of_jacrev_is_that_of_a_batched_autograd(self):
        def batched(x):
            x = x.detach().requires_grad_()
            out = network(x)
            basis = torch.eye(out.numel(), dtype=DTYPE).view(-1, *out.shape)
            return torch.autograd.grad(out, x, basis, is_grads_batched=True)

        assert peak(transforms.jacrev(network), ROWS[:4]) <= peak(batched, ROWS[:4])

    def test_of_a_hessian_is_no_more_than_torchs(self):
        energy = lambda x: LOSS(WEIGHTS, x)
        lean = peak(transforms.hessian(energy), ROWS[:2])
        assert lean <= peak(transforms.jacfwd(transforms.grad(energy)), ROWS[:2])
        assert lean <= peak(torch_func.hessian(energy), ROWS[:2])

    def test_of_a_nested_grad_is_that_of_a_double_backward(self):
        def nested(library):
            return library.grad(lambda x: library.grad(lambda x: LOSS(WEIGHTS, x))(x).sum())

        def autograd_twice(x):
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(LOSS(WEIGHTS, x), x, create_graph=True)
            return torch.autograd.grad(gradient.sum(), x)

        assert peak(nested(transforms), ROWS) <= peak(autograd_twice, ROWS)
        assert 2.5 * peak(nested(transforms), ROWS) < peak(nested(torch_func), ROWS)

    def test_no_operation_runs_twice(self):
        for name in ("grad", "jacrev", "hessian"):
            ours, theirs = (
                count(getattr(library, name)(lambda x: LOSS(WEIGHTS[:3], x)), ROWS[:2])
                for library in (transforms, torch_func)
            )
            assert {op: ours[op] for op in ("mm", "bmm", "tanh")} == {
                op: theirs[op] for op in ("mm", "bmm", "tanh")
            }


RECORDED = {
    "an output that is not read": (torch.sin, 0),
    "one that is": (torch.tanh, 1),
    "two": (lambda x: (x.sin(), x.exp()), 1),
    "views": (lambda x: torch.cat([x, x]).chunk(2), 0),
    "of a region": (functx.remat(lambda x: torch.tanh(2 * x) * 2), 0),
    "of a region that is given what was computed": (lambda x: functx.remat(torch.sin)(x.sin()), 1),
}
"""Functions, and how many results of operations their pullbacks read."""


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("stack", ["vjp", "vmap", "has_aux", "linearize"])
def test_a_pullback_holds_what_it_reads_and_no_outputs(name, stack):
    """As that of jax.vjp; torch.func.vjp holds its output."""
    f, read = RECORDED[name]
    x = numbers(8, 8)

    def recorded(x):
        if stack == "linearize":
            return functx.linearize(f, x)
        if stack == "has_aux":
            return functx.vjp(lambda x: (f(x), None), x, has_aux=True)[:2]
        return functx.vjp(f, x)

    def measured(x):
        given = x if stack == "linearize" else tree_map(torch.ones_like, f(x))
        with no_garbage_collection(), Operations() as operations:
            out, pullback = recorded(x)
            del out
            held.append(operations.live)
        return pullback(given)

    held = []
    (functx.vmap(measured) if stack == "vmap" else measured)(x)
    assert held == [read * x.nbytes]
