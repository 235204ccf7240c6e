"""Lean reverse mode drops no outer derivative, and takes no more memory than plain autograd."""

import functools
import itertools
import re

import pytest
import torch
from cases import (
    DTYPE,
    custom_function,
    deep_mlp,
    dense,
    judged_by,
    numbers,
    saves_inputs,
    unchanged,
)
from references import Operations, assert_same, count, no_garbage_collection, peak
from torch import func as torch_func
from torch.autograd.functional import hessian, jacobian
from torch.nn.functional import dropout
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import functx


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
    "grad": lambda f, x: functx.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: functx.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: functx.vmap(f)(torch.stack([x, x + 1])).diff(dim=0)[0],
    "jacrev": lambda f, x: functx.jacrev(f)(x).sum(0),
    "vjp": lambda f, x: functx.vjp(f, x)[1](torch.ones_like(x))[0],
    "backward": lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x)[0],
}


@pytest.mark.parametrize(
    "inner", [hook_with_outer_variable, function_with_outer_variable, tensor_of_a_level_around]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_variable_of_a_level_around_keeps_its_derivative(way, inner):
    found = WAYS[way](lambda x: inner(functx, x, Y), numbers(3))
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
    ours, theirs = build(functx)(x), build(torch_func)(x)
    assert ours.abs() > 1e-3
    assert_same(ours, theirs, eps=64)
    batch = numbers(2, 3)
    assert_same(
        functx.vmap(build(functx))(batch),
        torch.stack([build(torch_func)(b) for b in batch]),
        eps=64,
    )
    gradients = [
        torch.autograd.grad(build(library)(outer), outer) for library in (functx, torch_func)
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
    assert_same(functx.vmap(nest(functx))(x), torch.stack([nest(torch_func)(v) for v in x]), eps=2)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(nest(functx)(x[0]))


def test_no_grad_around_is_not_seen_by_the_transform():
    with torch.no_grad():
        assert_same(functx.grad(torch.sin)(torch.tensor(0.0)), torch.tensor(1.0))
        second = functx.grad(functx.grad(torch.sin))(torch.tensor(1.0))
        assert_same(second, -torch.tensor(1.0).sin())


BETWEEN = [(functx, torch.no_grad), (torch_func, torch.no_grad)]
if torch.__version__ >= "2.13":  # (before, functx refuses it)
    BETWEEN.append((functx, torch.inference_mode))


@pytest.mark.parametrize(("library", "mode"), BETWEEN)
def test_no_grad_between_levels_hides_the_inner_from_the_outer(library, mode):
    def f(x):
        with mode():
            inner = library.grad(lambda y: (y * x) ** 3 / 3)(x)
        return inner * x

    assert_same(library.grad(f)(torch.tensor(2.0)), torch.tensor(32.0))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has no derivatives in inference mode")
@pytest.mark.parametrize("library", [functx, torch_func])
@pytest.mark.parametrize("made_inside", [False, True])
def test_a_region_is_differentiated_in_inference_mode(library, made_inside):
    region = functx.remat(lambda x, y: (x.sin() * y).sum())
    x = torch.ones(3)
    with torch.inference_mode():
        x = x + 0 if made_inside else x
        assert x.is_inference() == made_inside
        assert_same(library.grad(region)(x, x), x.cos())
        assert_same(library.vmap(library.grad(region))(x, x), x.cos())
        assert_same(library.hessian(region)(x, x), -x.sin().diag())


CHECKPOINTS = {
    r"functx.remat\(.*functx.checkpoint\(": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    r"functx.patch_checkpoint\(\)": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
}
"""What torch refuses of code that checkpoints itself, by the way out."""


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "jacrev", "hessian"])
@pytest.mark.parametrize("way_out", CHECKPOINTS)
def test_an_error_of_torchs_about_checkpointing_names_the_way_out(way_out, name):
    with pytest.raises(RuntimeError) as caught:
        getattr(functx, name)(lambda x: CHECKPOINTS[way_out](x).sum())(numbers(3))
    assert re.search(way_out, "".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))


def test_an_error_of_fused_attention_names_the_way_out():
    x = numbers(1, 2, 4, 4)
    f = lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x).sin().sum()
    for derivative in (
        functx.hessian(f),
        functx.linearize(f, x)[1],
        lambda x: functx.jvp(f, (x,), (x,)),
    ):
        with pytest.raises(RuntimeError, match="scaled_dot_product") as caught:
            derivative(x)
        assert "SDPBackend.MATH" in caught.value.__notes__[0]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            functx.hessian(f)(x)


VECTOR = numbers(4)
EYE = torch.eye(4, dtype=DTYPE)


def batched_twice(f, x, w):
    first = torch.autograd.grad(f(x) * x, x, EYE, is_grads_batched=True, create_graph=True)[0]
    return torch.autograd.grad(first, (x, w), EYE[:, None] * EYE, is_grads_batched=True)


def of_jacobian(f, x, w):
    j = jacobian(f, x, vectorize=True, create_graph=True)
    return j, torch.autograd.grad(j.square().sum(), (x, w))


def hessians(f, x, w):
    return hessian(lambda x: f(x).sin().sum(), x, vectorize=True)


@pytest.mark.usefixtures("no_hooks")
@pytest.mark.parametrize("way", [batched_twice, of_jacobian, hessians])
@pytest.mark.parametrize("body", ["plain", "random", "nested"])
@judged_by(unchanged, eps=128)
def test_batched_cotangents_of_autograd_run_regions_as_functions(remat, way, body):
    x, w = VECTOR.clone().requires_grad_(), numbers(4, start=1.0).requires_grad_()
    chance = 0.5 if body == "random" else 0.0
    region = remat(lambda x: dropout((x * w).sin().exp(), chance))
    if body == "nested":
        region = remat(lambda x, inner=region: inner(x.cos()) * x)
    torch.manual_seed(4)
    return way(region, x, w)


WEIGHTS, ROWS, LOSS = deep_mlp()


network = functools.partial(dense, WEIGHTS)


def energy(x):
    return LOSS(WEIGHTS, x)


def autograd(weights, x, **options):
    weights = [w.detach().requires_grad_() for w in weights]
    return torch.autograd.grad(LOSS(weights, x), weights, **options)


def autograd_twice(x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(x), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x)


def batched_autograd(x):
    x = x.detach().requires_grad_()
    out = network(x)
    basis = torch.eye(out.numel(), dtype=DTYPE).view(-1, *out.shape)
    return torch.autograd.grad(out, x, basis, is_grads_batched=True)


def of_rows(library):
    return functx.vmap(library.grad(LOSS), (None, 0))


def nested(library):
    return library.grad(lambda x: library.grad(energy)(x).sum())


BOTH, FEW, EXAMPLES = (WEIGHTS, ROWS), (ROWS[:2],), (WEIGHTS, ROWS[:16, None])
CEILINGS = [
    *((f(LOSS), autograd, 1, BOTH) for f in (functx.grad, functx.grad_and_value)),
    (functx.value_and_grad(LOSS), autograd, 1, BOTH),
    (functx.grad(LOSS), torch_func.grad(LOSS), 2.8, BOTH),  # the measure can fail
    (torch.no_grad()(functx.grad(LOSS)), functx.grad(LOSS), 1, BOTH),
    (of_rows(functx), of_rows(torch_func), 1.1, EXAMPLES),
    (functx.jacrev(network), batched_autograd, 1, (ROWS[:4],)),
    (functx.hessian(energy), functx.jacfwd(functx.grad(energy)), 1, FEW),
    (functx.hessian(energy), torch_func.hessian(energy), 1, FEW),
    (nested(functx), autograd_twice, 1, (ROWS,)),
    (nested(functx), nested(torch_func), 2.5, (ROWS,)),
]
"""Functions, and what takes at least so many times as much memory, of which arguments."""


@pytest.mark.parametrize(("f", "ceiling", "times", "args"), CEILINGS)
def test_the_peak_is_no_more_than(f, ceiling, times, args):
    assert times * peak(f, *args) <= peak(ceiling, *args)


def test_vjp_keeps_what_retain_graph_keeps():
    def lean(weights, x, **options):
        value, pullback = functx.vjp(lambda w: LOSS(w, x), weights)
        return pullback(torch.ones_like(value), **options)

    assert peak(lean, *BOTH) <= peak(autograd, *BOTH, retain_graph=True)
    assert peak(lean, *BOTH, retain_graph=False) <= peak(autograd, *BOTH) < peak(lean, *BOTH)


@pytest.mark.parametrize("name", ["grad", "jacrev", "hessian"])
def test_no_operation_runs_twice(name):
    f = lambda x: LOSS(WEIGHTS[:3], x)
    ours, theirs = (count(getattr(library, name)(f), *FEW) for library in (functx, torch_func))
    assert all(ours[op] == theirs[op] for op in ("mm", "bmm", "tanh"))


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
