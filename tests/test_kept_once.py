"""What a region closes over is its node's to keep: a closure that outlives it keeps nothing."""

import functools

import pytest
import torch
from cases import numbers
from programs import check_program
from references import Operations, no_garbage_collection

import functx

pytestmark = pytest.mark.usefixtures("hooks")

LARGE = numbers(8, 8)
WAYS = {
    "cell": lambda f, x: lambda: f(x),
    "default": lambda f, x: lambda x=x: f(x),
    "partial": lambda f, x: functools.partial(f, x),
    "keyword": lambda f, x: functools.partial(lambda *, x: f(x), x=x),
    "cell of a function inside": lambda f, x: (lambda g: lambda: g())(lambda: f(x)),
}


def by_backward(f):
    x = LARGE.clone().requires_grad_()
    f(x).backward()
    return x.grad


DERIVED = {
    "backward": by_backward,
    "grad": lambda f: functx.grad(f)(LARGE),
    "vmap(grad)": lambda f: functx.vmap(functx.grad(f))(torch.stack([LARGE, LARGE + 1])),
    "grad(grad)": lambda f: functx.grad(lambda x: functx.grad(f)(x).square().sum())(LARGE),
    "jvp": lambda f: functx.jvp(functx.grad(f), (LARGE,), (LARGE,)),
}


def chain(way, f, x):
    for _ in range(4):
        x = functx.remat(WAYS[way](f, x))()
    return x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", [True, False])
def test_bytes(way, read):
    """Inputs that are read until they have been, and no other ones."""
    x = LARGE.clone().requires_grad_()
    with no_garbage_collection(), Operations() as operations:
        out = chain(way, lambda x: torch.sin(x) if read else 2 * x, x)
        assert operations.live == x.nbytes * (4 if read else 1)
        out.backward(torch.ones_like(x))
        x.grad = None
        assert operations.live == x.nbytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stack", ["backward", "grad", "vmap(grad)", "grad(grad)"])
def test_values(way, stack):
    def program(remat):
        def f(x):
            for _ in range(3):
                x = remat(WAYS[way](remat(torch.sin), x))() * x.shape[0]
            return x.square().sum()

        return DERIVED[stack](f)

    check_program(program, eps=8)


def test_who_looks_at_memory_finds_it():
    """A record of operations does not show it."""

    def program(remat):
        x = LARGE.clone().requires_grad_()
        h = x.sin()
        out = remat(lambda x: x.cos() * sum(h.untyped_storage()[:8].tolist()) + h)(x)
        return torch.autograd.grad(out.sum(), x)

    check_program(program)


CONSTANTS = {
    "added": (lambda x, c: x.sin() + c, False),
    "added to a linear one": (lambda x, c: 2 * x + c * c, False),
    "a part of it added": (lambda x, c: x.sin() + c[0], False),
    "compared": (lambda x, c: x.sin() + (c > 0), False),
    "written to a copy": (lambda x, c: x.sin() + c.clone().mul_(2), False),
    "multiplied": (lambda x, c: x.sin() * c, True),
    "a part of it multiplied": (lambda x, c: x * c[0], True),
    "computed with": (lambda x, c: (x + c).sin(), True),
    "looked at": (lambda x, c: x * float(c[0, 0]), True),
    "looked at in memory": (lambda x, c: x + sum(c.untyped_storage()[:8].tolist()), True),
    "on a tape by Python": (lambda x, c: Doubled.apply(x) + c, True),
}


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def jvp(ctx, t):
        return 2 * t

    @staticmethod
    def backward(ctx, g):
        return 2 * g


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("way", WAYS)
def test_constants_that_no_pullback_reads_are_not_kept(way, name):
    """Of what no derivative flows to, as of inputs; also when runs are known."""
    f, read = CONSTANTS[name]
    x = LARGE.clone().requires_grad_()
    for _ in range(6):
        with no_garbage_collection(), Operations() as operations:
            c = LARGE + 1
            out = functx.remat(WAYS[way](lambda c: f(x, c), c))()
            del c
            assert operations.live == x.nbytes * (2 if read else 1)
            (gradient,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(
            gradient, torch.autograd.grad(f(x, LARGE + 1).sum(), x)[0], rtol=0, atol=0
        )


STACKS = [  # torch shows no memory below transforms
    (name, stack)
    for name in CONSTANTS
    for stack in DERIVED
    if stack == "backward" or name != "looked at in memory"
]


@pytest.mark.parametrize(("name", "stack"), STACKS)
def test_values_with_constants(name, stack):
    """Also of a region inside another one, and where a replay departs from the forward."""
    f, _ = CONSTANTS[name]

    def program(remat):
        def h(x):
            c = LARGE + 1

            def inner(x):
                x = f(x.square(), c)
                y = x.cos()
                return y.mul_(x) + c

            for _ in range(2):
                x = remat(lambda x=x: remat(inner)(x) * x + c)()
            return x.square().sum()

        return DERIVED[stack](h)

    check_program(program, eps=64)


def test_a_constant_that_an_outer_pullback_reads_is_the_outer_ones_to_keep():
    """The region inside does not."""
    x = LARGE.clone().requires_grad_()
    with no_garbage_collection(), Operations() as operations:
        c = LARGE + 1
        out = functx.remat(lambda c=c: functx.remat(lambda: x.sin() + c)() * c)()
        del c
        assert operations.live == 2 * x.nbytes
        (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, x.cos() * (LARGE + 1))


def test_who_reads_a_constant_that_is_written_to_later():
    """The one that does not need it does not mind; the one that does has what it found."""
    x, c = LARGE.clone().requires_grad_(), LARGE + 1
    a = functx.remat(lambda: x.sin() + c)()
    b = functx.remat(lambda: x.sin() * c)()
    functx.remat(lambda: c.zero_())()
    (gradient,) = torch.autograd.grad((a + b).sum(), x)
    torch.testing.assert_close(gradient, x.cos() * (LARGE + 2))


def test_a_constant_by_two_names_in_a_region_inside():
    """It is given, and closed over: one input, in the forward and in the replay."""
    c = LARGE + 1

    def program(remat):
        def region(p):
            v = remat(lambda: c.sin())()
            return remat(lambda a: a.sigmoid())(p) * 2 + v

        x = LARGE.clone().requires_grad_()
        out = remat(lambda: remat(region)(c) + x.sin() * 2)()
        return torch.autograd.grad((out * x).sum(), x)

    check_program(program)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_only_handed_back_is_not_kept(way):
    """Beside other results: it goes when the caller lets it go; also when runs are known."""
    x = LARGE.clone().requires_grad_()
    for _ in range(6):
        with no_garbage_collection(), Operations() as operations:
            c = LARGE + 1
            out, back = functx.remat(WAYS[way](lambda c: (x.sin(), c), c))()
            assert torch.equal(back, LARGE + 1)
            del c, back
            assert operations.live == x.nbytes
            (gradient,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(gradient, x.cos(), rtol=0, atol=0)


@pytest.mark.parametrize("stack", DERIVED)
def test_values_of_what_is_only_handed_back(stack):
    """Also by a region in another one, and at levels of transforms."""

    def program(remat):
        def h(x):
            c = x.detach() + 1

            def outer(x):
                a, back = remat(lambda x: (x.sin(), c))(x)
                return a * x, back, c

            out, first, second = remat(lambda: outer(x))()
            return (out * first * second).square().sum()

        return DERIVED[stack](h)

    check_program(program, eps=64)


def test_a_constant_that_a_region_inside_is_given_and_does_not_read():
    """The one around does not keep it either."""
    x = LARGE.clone().requires_grad_()
    with no_garbage_collection(), Operations() as operations:
        c = LARGE + 1
        out = functx.remat(lambda c=c: functx.remat(lambda c: x.sin() + 1)(c))()
        del c
        assert operations.live == x.nbytes
        (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, x.cos(), rtol=0, atol=0)


@pytest.mark.parametrize("deeper", [False, True])
def test_a_constant_that_no_pullback_reads_by_two_names_in_a_region_inside(deeper):
    """What is closed over in its place is a name of it, too."""

    def program(remat):
        c = LARGE + 1
        x = LARGE.clone().requires_grad_()

        def inner(a, b):
            return a.shape[0] * x.sin() + (b + (c - a))

        def outer(x):
            around = remat(lambda a: remat(inner)(a, c)) if deeper else lambda a: remat(inner)(a, c)
            return around(c).sin()

        return torch.autograd.grad(remat(outer)(x).sum(), x)

    check_program(program)


@pytest.mark.parametrize("taped", [True, False])
def test_a_region_inside_that_looks_how_a_closed_over_tensor_lies(taped):
    """The region around does not put a tensor without memory there: it lies otherwise."""

    def program(remat):
        x = LARGE.clone().requires_grad_()
        h = x.sin() if taped else x.detach() + 1

        def inner(p):
            return p.sin() * (2.0 if h.is_contiguous() else 3.0) + h

        return torch.autograd.grad(remat(lambda p: remat(inner)(p).sin())(x).sum(), x)

    check_program(program)
