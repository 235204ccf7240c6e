"""One tensor by several names, in regions inside others: what a replay hands out is another one.

``NOTE [aliases]`` in `_aliases`; and what is inside of two wrappers is one tensor, too.
"""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx
from functx import checkpoint_policies

X, C, W = numbers(3), numbers(3, start=0.3), numbers(3, start=0.6)
BOTH = torch.stack([C, C / 2])


def dropped(remat, x, c):
    """The innermost region is given both names, and what it makes of them is dropped."""

    def region(p):
        return x.exp() * remat(lambda a, b: (x.sin(), a * b))(p, c)[0]

    return remat(remat(region))(c)


def three_deep(remat, x, c):
    def region(p):
        def inner(q):
            def innermost(r):
                return x.exp() * remat(lambda *names: (x.sin(), sum(names)))(c, p, q, r)[0]

            return remat(remat(innermost))(q)

        return remat(remat(inner))(p)

    return remat(remat(region))(c)


def closed_over(remat, x, c):
    def region(p):
        def inner():
            p.sin(), c.sin()
            return x.exp() * remat(lambda a, b: (x.sin(), a * b))(c, p)[0]

        return remat(remat(inner))()

    return remat(remat(region))(c)


def around_a_transform(remat, x, c):
    def region(p):
        def inner(x):
            return (x.exp() * remat(lambda a, b: (x.sin(), a * b))(p, c)[0]).sum()

        return remat(functx.grad(remat(inner)))(x)

    return remat(remat(region))(c)


def with_policies(remat, x, c):
    def region(p):
        r = remat(lambda a, b: (x.sin(), a * b), policy=checkpoint_policies.dots_saveable)
        return x.exp() * r(p, c)[0]

    return remat(remat(region), policy=checkpoint_policies.everything_saveable)(c)


def compared_by_values(remat, x, c):
    def region(p):
        return x.exp() * remat(lambda a, b: (x.sin(), a * b))(p, c)[0]

    return remat(remat(region, determinism_check="values"))(c)


def a_view_that_is_written_to(remat, x, c):
    c = torch.stack([c, c])[0]

    def region(p):
        y = x.exp() * remat(lambda a, b: (x.sin(), a * b))(p, c)[0]
        z = p.clone()
        z[1:].mul_(c[1:])
        return y * z

    return remat(remat(region))(c)


def a_buffer_and_a_tied_weight(remat, x, c):
    module = torch.nn.Module()
    module.register_buffer("c", c)
    module.w = module.tied = torch.nn.Parameter(W.clone())
    tied = module.w

    def region(p):
        def inner(a, b):
            return x.sin() * module.w, a * b * module.c * module.tied

        return x.exp() * remat(inner)(p, module.c)[0] * tied

    return remat(remat(region))(c)


def mapped_and_dropped(remat, x, c):
    """A transform inside wraps what nothing reads: another tensor, in a replay."""

    def region(p):
        def inner(y):
            functx.vmap(torch.tanh)(c)
            torch.func.vmap(torch.tanh)(p)
            return y.sin()

        return remat(inner)(x.exp()) * x.cos()

    return remat(remat(region))(c)


PROGRAMS = [
    *(dropped, three_deep, closed_over, around_a_transform, with_policies, compared_by_values),
    *(a_view_that_is_written_to, a_buffer_and_a_tied_weight, mapped_and_dropped),
]


def backward(f):
    x = X.clone().requires_grad_()
    f(x).sum().backward()
    return x.grad


def twice(f):
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.sin().sum(), x)


def loss(f):
    return lambda x: f(x).sum()


WAYS = {
    "backward": backward,
    "twice": twice,
    "grad": lambda f: functx.grad(loss(f))(X),
    "grad of grad": lambda f: functx.grad(lambda x: functx.grad(loss(f))(x).sin().sum())(X),
    "vmap of grad": lambda f: functx.vmap(functx.grad(loss(f)))(torch.stack([X, X / 2])),
    "jvp": lambda f: functx.jvp(f, (X,), (W,)),
    "hessian": lambda f: functx.hessian(loss(f))(X),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_constant(program, way):
    expected = WAYS[way](lambda x: program(identity, x, C))
    assert_same(WAYS[way](lambda x: program(functx.remat, x, C)), expected, eps=8)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_what_a_transform_wraps(program, transform):
    def run(remat):
        x = X.clone().requires_grad_()

        def f(c):
            return program(remat, x, c).sum()

        if transform == "vmap":
            out = functx.vmap(f)(torch.stack([C, C / 2]))
        elif transform == "grad":
            out = functx.grad(lambda c: f(c) + c.sin().sum())(C), f(C)
        else:
            out = functx.jvp(f, (C,), (W,))
        leaves = torch.utils._pytree.tree_leaves(out)
        return out, torch.autograd.grad(sum(t.sum() for t in leaves), x)

    assert_same(run(functx.remat), run(identity), eps=8)


def dropped_from_the_tape(remat, x, c, d):
    def region(c):
        z = x * c
        y = x.sin() * d
        del z
        return y

    return remat(region)(c)


def a_region_that_drops_it(remat, x, c, d):
    return remat(lambda c: remat(lambda q: (x * q, x * d)[1])(c).sin())(c)


def a_region_that_is_given_it(remat, x, c, d):
    return remat(remat(lambda: remat(lambda q: x * d)(c)))()


def a_constant_beside(remat, x, c, d):
    def region(c):
        z = x * c
        y = (x.sin() * BOTH).sum()
        del z
        return y

    return remat(region)(c)


def a_constant_before(remat, x, c, d):
    def region():
        z = (x * BOTH).sum()
        y = x.sin() * c
        del z
        return y

    return remat(region)()


def a_closure_beside(remat, x, c, d):
    def region(p):
        return remat(remat(lambda: remat(lambda q: x * c)(p)))()

    return remat(region)(c)


@pytest.mark.parametrize(
    "program",
    [
        *(dropped_from_the_tape, a_region_that_drops_it, a_region_that_is_given_it),
        *(a_closure_beside, a_constant_beside, a_constant_before),
    ],
)
def test_two_wrappers_of_a_tensor(program):
    # The tape has come to hold what is inside by one of them, when it let go of it by the other.
    def run(remat):
        x = X.clone().requires_grad_()
        y = functx.vmap(lambda c, d: program(remat, x, c, d).exp().sum())(BOTH, BOTH)
        return y, torch.autograd.grad(y.sum(), x)

    assert_same(run(functx.remat), run(identity), eps=8)
