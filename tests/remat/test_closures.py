"""Rule 1: each replay finds the closure cells as they were at the call."""

import functools

import pytest
import torch
from cases import identity, numbers, unchanged
from references import assert_same

import functx

RUNS = 3  # the later ones may follow what the first one has left
X, Y = numbers(3), numbers(3, start=1.0)


def counts(remat):
    """It counts its calls, and computes with the number."""
    n = 0

    def f(x):
        nonlocal n
        n += 1
        return (x * n).sin() * n

    return remat(f)


def counts_in_a_function_that_it_calls(remat):
    n = 0

    def scale():
        nonlocal n
        n += 1
        return n

    return remat(lambda x: (x * scale()).sin() * scale())


def counts_in_a_partial(remat):
    n = 0

    def f(power, x):
        nonlocal n
        n += 1
        return (x**power * n).sin()

    return remat(functools.partial(f, 2))


def counts_in_a_method(remat):
    n = 0

    class Layer:
        def forward(self, x):
            nonlocal n
            n += 1
            return (x * n).sin()

    return remat(Layer().forward)


def replaces_a_tensor(remat):
    h = Y

    def f(x):
        nonlocal h
        h = (h * x).tanh().detach()
        return (x * h).sin()

    return remat(f)


def binds_a_name_late(remat):
    """The name is not bound at the call, and is in the replay."""

    def build():
        if False:
            scale = None

        def f(x):
            nonlocal scale
            try:
                scale = scale + 1
            except NameError:
                scale = 2
            return (x * scale).sin()

        return f

    return remat(build())


def deletes_a_name(remat):
    def build():
        scale = 3.0

        def f(x):
            nonlocal scale
            try:
                found = scale
                del scale
            except NameError:
                found = 0.5
            return (x * found).sin()

        return f

    return remat(build())


def counts_in_a_region_inside(remat):
    n = 0

    def f(x):
        nonlocal n
        n += 1
        return (x * n).sin()

    inner = remat(f)
    return remat(lambda x: inner(x) * inner(x))


BUILDERS = [
    counts,
    counts_in_a_function_that_it_calls,
    counts_in_a_partial,
    counts_in_a_method,
    replaces_a_tensor,
    binds_a_name_late,
    deletes_a_name,
    counts_in_a_region_inside,
]


def two_backwards(f):
    x = X.clone().requires_grad_()
    out = f(x).sum()
    return [torch.autograd.grad(out, x, retain_graph=True) for _ in range(3)]


def second_order(f):
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return first, [torch.autograd.grad(first.sum(), x, retain_graph=True) for _ in range(2)]


def rows(f):
    x = X.clone().requires_grad_()
    out = f(x)
    return [torch.autograd.grad(out[i], x, retain_graph=True) for i in range(3)]


def a_vjp_twice(f):
    out, pullback = functx.vjp(f, X)
    return out, pullback(Y), pullback(2 * Y)


WAYS = {
    "two backwards": two_backwards,
    "second order": second_order,
    "a Jacobian row by row": rows,
    "a vjp twice": a_vjp_twice,
    "jacrev": lambda f: functx.jacrev(f)(X),
    "jacrev in chunks": lambda f: functx.jacrev(f, chunk_size=1)(X),
    "grad(grad)": lambda f: functx.grad(
        lambda x: functx.grad(lambda x: f(x).sum())(x).square().sum()
    )(X),
}


# (In plain torch, too, a tensor that is kept of a level within a level can't be read after it.)
OUTLIVES_ITS_LEVEL = (replaces_a_tensor, "grad(grad)")
CASES = [(build, way) for build in BUILDERS for way in WAYS if (build, way) != OUTLIVES_ITS_LEVEL]


@pytest.mark.parametrize(("build", "way"), CASES)
def test_a_replay_does_not_find_what_another_one_has_bound(build, way):
    def program(remat):
        f = build(remat)
        return [WAYS[way](f) for _ in range(RUNS)]

    unchanged(program, eps=32)


# -- functions that call themselves


def calls_itself(x, remat, then):
    scale, w, act = 2.0, Y, torch.sin

    def f(x, n=3):
        return act(x * w) * scale if n == 0 else f(act(x) * scale, n - 1) * scale

    out = remat(f)(x)
    if then:
        scale, w, act = 7.0, 5 * Y, torch.cos
    return out


def call_one_another(x, remat, then):
    scale = 2.0

    def even(x, n):
        return x * scale if n == 0 else odd(x.sin(), n - 1)

    def odd(x, n):
        return even(x.cos() * scale, n - 1)

    out = remat(even)(x, 4)
    if then:
        scale = 7.0
    return out


def regions_of_itself(x, remat, then):
    scale = 2.0

    def f(x, n):
        return x * scale if n == 0 else remat(f)(x.sin() * scale, n - 1) * scale

    out = remat(f)(x, 3)
    if then:
        scale = 7.0
    return out


def called_by_the_region(x, remat, then):
    scale = 2.0

    def f(x, n):
        return x * scale if n == 0 else f(x.sin() * scale, n - 1) * scale

    out = remat(lambda x: f(x, 3).cos())(x)
    if then:
        scale = 7.0
    return out


RECURSIVE = [calls_itself, call_one_another, regions_of_itself, called_by_the_region]


@pytest.mark.parametrize("way", ["backward", "vjp"])
@pytest.mark.parametrize("program", RECURSIVE, ids=lambda f: f.__name__)
def test_a_function_that_calls_itself_finds_its_cells_as_they_were(program, way):
    for run in range(RUNS):
        x, found = numbers(3, start=run), []
        for remat in (functx.remat, identity):
            f = lambda x, r=remat: program(x, r, r is functx.remat).sum()
            if way == "backward":
                leaf = x.clone().requires_grad_()
                found.append(torch.autograd.grad(f(leaf), leaf))
            else:
                out, pullback = functx.vjp(f, x)
                found.append(pullback(torch.ones_like(out)))
        assert_same(*found, 16)
