"""Where some results of a region are pulled back, what only the others' tapes read is left out.

The counts are those of ``jax.checkpoint``.
"""

import pytest
import torch
from cases import numbers
from programs import check_program, identity
from references import count
from torch.utils.checkpoint import checkpoint

import functx
from functx import _torch_nodes

X = numbers(3, 3)


def chain(*functions):
    """Each function of what the one before gave; all values are results."""

    def f(x):
        results = []
        for function in functions:
            x = function(x)
            results.append(x)
        return results

    return f


def square(x):
    return x @ x


def twice(f):
    return functx.remat(lambda x: f(f(x)))


FUNCTIONS = {
    "sin": (chain(torch.sin, torch.sin), "sin", [0, 1]),
    "three": (chain(torch.sin, torch.sin, torch.sin), "sin", [0, 1, 2]),
    "saved results": (chain(torch.tanh, torch.tanh), "tanh", [1, 2]),
    "products": (chain(square, square), "mm", [0, 1]),
    "apart": (lambda x: (x.sin().sin(), x.cos().sin().sin()), "sin", [1, 1]),
    "branches": (lambda x: (lambda a: (a.sin(), a.exp()))(x.sin()), "sin", [1, 1]),
    "with it": (lambda x: (lambda a: (a, a * a.sin()))(x.sin()), "sin", [0, 2]),
    "regions inside": (chain(twice(torch.sin), twice(torch.sin)), "sin", [0, 2]),
    "views": (lambda x: (lambda a: (a.T, a.T.sin()))(x.sin()), "sin", [0, 1]),
}
"""A function, an operation, and how often it runs again when only one result is pulled back."""


def backward(f):
    def gradient(x):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf)[0]

    return gradient


WAYS = {
    "autograd": backward,
    "grad": functx.grad,
    "vmap(grad)": lambda f: lambda x: functx.vmap(functx.grad(f))(torch.stack([x, x])),
    "grad(vmap)": lambda f: functx.grad(lambda x: functx.vmap(f)(torch.stack([x, x])).sum()),
}


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_counts(name, way):
    f, operation, again = FUNCTIONS[name]
    operation = "bmm" if operation == "mm" and "vmap" in way else operation
    for place, expected in enumerate(again):
        ours, plain = (
            count(WAYS[way](lambda x, r=r, i=place: r(f)(x)[i].sum()), X)
            for r in (functx.remat, identity)
        )
        assert ours[operation] - plain[operation] == expected, place


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name, way):
    f, _, again = FUNCTIONS[name]

    def program(remat):
        return [WAYS[way](lambda x, i=i: remat(f)(x)[i].sum())(X) for i in range(len(again))]

    check_program(program, eps=16)


def again(f, place, operation):
    ours, plain = (
        count(functx.grad(lambda x, r=r: r(f)(x)[place].sum()), X) for r in (functx.remat, identity)
    )
    return ours[operation] - plain[operation]


def test_counts_of_known_runs():
    """Where no mode sees the forward, it is known from those before: the same is left out."""
    region, x = functx.remat(FUNCTIONS["sin"][0]), X.clone().requires_grad_()
    for _ in range(5):
        calls = [region(x) for _ in range(2)]
    for i, results in enumerate(calls):
        ran = count(lambda out=results[i]: torch.autograd.grad(out.sum(), x))
        assert (ran["sin"], ran["cos"]) == (i, 1 + i)


def test_of_nodes_that_do_not_tell_all_is_kept(monkeypatch):
    """What comes before a result may be read by what made it."""
    f = FUNCTIONS["sin"][0]
    assert again(f, 0, "sin") == 0
    monkeypatch.setattr(_torch_nodes, "saved_by", lambda node: None)
    assert again(f, 0, "sin") == 1


def test_what_a_tape_of_another_level_saved():
    """The outer tape begins at what the inner one saved, too."""

    def program(remat):
        def f(x):
            return remat(lambda x: (lambda a: (a.exp(), a.exp().sin()))(x.sin()))(x)[0].sum()

        return functx.grad(lambda x: functx.grad(f)(x).square().sum())(X)

    check_program(program, eps=64)


def test_hooks_that_torch_hangs_on_saved_tensors_are_not_asked():
    """They would run what is checkpointed inside of the region again, for nothing."""

    def f(x):
        a = checkpoint(lambda x: x.sin().sin(), x, use_reentrant=False)
        return a, a.sin()

    x = X.clone().requires_grad_()
    assert count(functx.remat(f), x)["sin"] == 3


def test_what_was_written_to_since_is_not_asked():
    """Neither raises, nor is anything left out that is read."""

    def program(remat):
        def f(x):
            a = x.exp()
            b = a.sin()
            a.mul_(2)  # sin has saved it: what saved it can't be pulled back, the other result can
            return b, x.cos()

        x = X.clone().requires_grad_()
        return torch.autograd.grad(remat(f)(x)[1].sum(), x)

    check_program(program)


def test_a_constant_of_a_region_inside_is_read_by_its_results():
    """No tape shows it, but the region that read it keeps it."""

    def program(remat):
        def f(x):
            with torch.no_grad():
                a = x.sin() + 1
            b = remat(lambda x: x * a * a)(x)
            return b, (x * a).sin()

        x = X.clone().requires_grad_()
        return [torch.autograd.grad(remat(f)(x)[i].sum(), x) for i in range(2)]

    check_program(program)


@pytest.mark.parametrize("order", ["jvp(grad)", "grad(jvp)"])
def test_tangents(order):
    """What is read of a dual is read of its tangent."""

    def program(remat):
        def f(i):
            return lambda x: remat(FUNCTIONS["branches"][0])(x)[i].sin().sum()

        if order == "jvp(grad)":
            return [functx.jvp(functx.grad(f(i)), (X,), (X.cos(),)) for i in range(2)]
        return [functx.grad(lambda x, i=i: functx.jvp(f(i), (x,), (X,))[1])(X) for i in range(2)]

    check_program(program, eps=64)
