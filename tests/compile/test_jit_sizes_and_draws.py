"""Sizes, draws, buffers and results that come twice, in what `functx.jit` compiles."""

import json

import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn

import functx
from functx._core import compiler_warnings

from .jitted import WEIGHTS, as_traced, backward


def counting(traced):
    return lambda module, _: traced.append(module) or module


@pytest.mark.filterwarnings("ignore:.*traced for the third time, because the sizes")
@pytest.mark.parametrize("dynamic", [False, True])
def test_each_shape_is_a_graph_or_one_graph_is_all_shapes(dynamic):
    def f(w, x):
        inner = functx.remat(lambda w: torch.sin(torch.tanh(x @ w) @ WEIGHTS[1]).sum() / x.shape[0])
        return functx.grad(inner)(w)

    stacks = {"grad": f, "vmap": functx.vmap(f, (None, 0)), "mapped": lambda w, x: f(w, x[0])}
    for name, stack in stacks.items():
        traced = []
        jitted = functx.jit(stack, backend=counting(traced), dynamic=dynamic)
        for shape in [(2, 3, 4), (5, 2, 4), (7, 8, 4), (5, 2, 4)]:
            x = numbers(*(shape[1:] if name == "grad" else shape))
            assert_same(jitted(WEIGHTS[0], x), stack(WEIGHTS[0], x), eps=16)
        assert len(traced) == (1 if dynamic else 3), name


def test_dynamic_gradients_from_outside_know_the_sizes_of_each_call():
    traced = []
    f = functx.remat(lambda x: torch.cat([torch.sin(x @ WEIGHTS[0]), x]).tanh().square())
    jitted = functx.jit(f, backend=counting(traced), dynamic=True)
    for n in (3, 5, 2):
        assert_same(backward(lambda x: jitted(x).sum())(numbers(n, 4)),
                    backward(lambda x: f(x).sum())(numbers(n, 4)), eps=16)  # fmt: skip
    assert len(traced) == 2, "a forward and a backward"


def test_a_dynamic_graph_serves_what_it_holds_for_alone():
    def f(x):
        return (x.sin() if x.shape[0] > 4 else x.cos()), x.shape[0]

    traced = []
    jitted = functx.jit(f, backend=counting(traced), dynamic=True)
    for n in (3, 6, 1, 3):
        assert_same(jitted(numbers(n))[0], f(numbers(n))[0])
        assert jitted(numbers(n))[1] == n
    assert len(traced) == 3


@pytest.mark.parametrize(
    "text",
    [
        lambda n: f"{n}",
        str,
        repr,
        lambda n: "%s" % n,  # noqa: UP031
        lambda n: f"{(n, 2)}",
        lambda n: f"{n / 2}",
        lambda n: json.dumps([str(n)]),
    ],
)
def test_a_symbolic_size_in_a_text_is_its_number_and_guarded(text):
    traced = []
    f = lambda x: (x * len(text(x.shape[0])), text(x.shape[0]), x.sum() / x.shape[0])
    jitted = functx.jit(f, backend=counting(traced), dynamic=True)
    for n in (9, 100, 1000, 9):
        x = numbers(n)
        assert_same(jitted(x)[0], f(x)[0], eps=4)
        assert jitted(x)[1] == f(x)[1]
    assert len(traced) == 3


def test_symbols_have_their_names_again_after_the_trace():
    before = torch.SymInt.__repr__
    functx.jit(lambda x: x * len(f"{x.shape[0]}"), backend=as_traced, dynamic=True)(numbers(9))
    assert torch.SymInt.__repr__ is before


def test_sizes_that_a_function_returns_are_those_of_the_call():
    jitted = functx.jit(lambda x: (x.sum(), len(x)), backend=as_traced)
    for n in (3, 5, 3):
        assert jitted(numbers(n))[1] == n


def test_where_torch_needs_numbers_for_sizes_a_warning_says_so_once(monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    f = functx.grad(functx.remat(lambda x: nn.functional.dropout(x.tanh(), 0.5).sum()))
    jitted = functx.jit(f, backend=as_traced, dynamic=True)
    with pytest.warns(RuntimeWarning, match="one graph can't serve all sizes here") as seen:
        jitted(numbers(3))
    assert seen[0].filename == __file__
    for n in (3, 4, 3):  # and warns no more
        torch.manual_seed(n)
        found = jitted(numbers(n))
        torch.manual_seed(n)
        assert_same(found, f(numbers(n)))


@pytest.mark.filterwarnings("ignore:functx. a jitted function. it runs in eager")
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of attention
def test_random_numbers_are_not_drawn_again_for_a_derivative_of_the_pullback():
    x = numbers(3).requires_grad_()
    dropped = functx.jit(lambda x: nn.functional.dropout(x.sin(), 0.5), backend=as_traced)
    attention = lambda x: nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3).sum()
    jitted = functx.jit(attention, backend=as_traced)
    gradients = [functx.jacrev(f)(numbers(3, 4)) for f in (jitted, attention)]
    assert_same(*gradients, eps=64)
    with pytest.raises(functx.TracingError, match=r"draws random numbers.*from keys"):
        torch.autograd.grad(dropped(x).sum(), x, create_graph=True)


def test_a_batch_norm_advances_though_nobody_reads_its_result():
    layers = [nn.BatchNorm1d(4).double() for _ in range(2)]
    for layer, wrap in zip(layers, (lambda f: f, lambda f: functx.jit(f, backend=as_traced))):
        region = functx.remat(lambda x, layer=layer: (layer(x), x.sin()))
        f = lambda x, layer=layer, region=region: (layer(x), region(x)[1])[1]
        wrap(f)(numbers(3, 4).requires_grad_())
    assert_same(layers[1].running_mean, layers[0].running_mean)


def test_numbers_that_nothing_reads_advance_the_generator_in_compiled_graphs_too():
    def f(x):
        nn.functional.dropout(x, 0.5)
        return x.sin()

    jitted, x, found = functx.jit(f, backend="aot_eager"), numbers(5), []
    for g in (f, jitted, jitted):
        torch.manual_seed(0)
        assert_same(g(x), x.sin())
        found.append(torch.rand(1).item())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("backend", [as_traced, "aot_eager"])
def test_two_forwards_of_a_batch_norm_may_come_before_one_backward(backend):
    layer = nn.BatchNorm1d(4).double()
    jitted = functx.jit(layer, backend=backend)

    def gradients(f):
        out = f(numbers(3, 4)).sin().sum() + f(numbers(3, 4, start=2.0)).cos().sum()
        return torch.autograd.grad(out, [*layer.parameters()])

    assert_same(gradients(jitted), gradients(layer), eps=64)


@pytest.mark.parametrize("backend", [as_traced, "aot_eager"])
def test_a_write_by_a_graph_counts_for_who_has_saved_the_tensor(backend):
    total, w = torch.zeros(3).double(), numbers(3).requires_grad_()
    jitted = functx.jit(lambda x: (total.add_(x), x.sin())[1], backend=backend)
    product = w * total
    jitted(numbers(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_what_has_no_rule_around_a_jitted_function_says_so():
    x = numbers(3).requires_grad_()
    out = functx.jit(torch.sin, backend=as_traced)(x)
    with pytest.raises(
        functx.TracingError, match=r"is_grads_batched=True has no rule.*functx\.vmap"
    ):
        torch.autograd.grad(out, x, torch.eye(3, dtype=out.dtype), is_grads_batched=True)


def test_an_expanded_tangent_that_is_written_has_memory_of_its_own():
    f = functx.grad(lambda x: (x.sum(0) * WEIGHTS[0]).sin().sum())
    stack = lambda x: functx.jvp(functx.jacfwd(f), (x,), (x,))[1]
    x = numbers(4, 4)
    assert_same(functx.jit(stack, backend=as_traced)(x), stack(x), eps=16)


@pytest.mark.parametrize(
    "f",
    [
        torch.exp,  # whose result is saved
        torch.linalg.inv,
        lambda x: (x.tanh(), x.sin()),
        lambda x: [y := x.sin(), y.detach(), y],
        lambda x: functx.remat(torch.exp)(x).sigmoid(),
    ],
)
def test_a_result_that_is_saved_or_returned_twice_has_its_gradient(f):
    def gradients(f, x):
        leaves = torch.utils._pytree.tree_leaves(f(x))
        parts = [(i + 1) * t.sin().sum() for i, t in enumerate(leaves)]
        return [t.requires_grad for t in leaves], *torch.autograd.grad(sum(parts), x)

    x = (numbers(3, 3) + 2 * torch.eye(3)).requires_grad_()
    (ours, actual), (eager, expected) = (
        gradients(functx.jit(f, backend=as_traced), x),
        gradients(f, x),
    )
    assert ours == eager
    assert_same(actual, expected, eps=16)
