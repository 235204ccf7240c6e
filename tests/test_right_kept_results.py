"""A policy keeps what is a result, too, and no tape reads: the caller may write to it."""

import itertools

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx import checkpoint_policies as cp

KEEP = cp.save_at_least(20)  # of vectors, not of their sums
X = numbers(3, start=0.5)


def result(p):
    v = p * 2
    return v, (v.sum() * 0.1).exp()


def view(p):
    v = p * 2
    return v[1:], (v.sum() * 0.1).exp()


def in_place(p):
    v = p * 2
    v += 1
    return v, (v.sum() * 0.1).exp()


def part_in_place(p):
    v = p.cos()
    v[1:] += 1
    return v, (v.sum() * 0.1).exp()


def twice_in_place(p):
    v = p.cos()
    v *= 2
    v[1:] += 1
    return v, (v.sum() * 0.1).exp()


def name_in_place(p):
    v = functx.checkpoint_name((p * 2).add_(1), "a")
    return v, (v.sum() * 0.1).exp()


RESULTS = [result, view, in_place, part_in_place, twice_in_place, name_in_place]


def writing(region):
    def f(x):
        v, s = region(x)
        v.mul_(s.detach() + 0.3)
        return (v.sin().sum() * s).exp()

    return f


def scalar(f):
    return lambda x: f(x).sum()


STACKS = {
    "base": lambda f: lambda x: torch.autograd.grad(f(x := x.clone().requires_grad_()), x),
    "grad": functx.grad,
    "vmap of grad": lambda f: lambda x: functx.vmap(functx.grad(f))(torch.stack([x, x.sin()])),
    "grad of vmap": lambda f: (
        lambda x: functx.grad(lambda y: functx.vmap(f)(y).sum())(torch.stack([x, x.sin()]))
    ),
    "jvp of grad": lambda f: lambda x: functx.jvp(functx.grad(f), (x,), (x.cos(),)),
    "grad of jvp": lambda f: lambda x: functx.grad(lambda y: functx.jvp(f, (y,), (x.cos(),))[1])(x),
    "grad of grad": lambda f: functx.grad(scalar(functx.grad(f))),
}


PAIRS = [*itertools.product(RESULTS, STACKS)]


@pytest.mark.parametrize("policy", [KEEP, cp.everything_saveable, cp.save_only_these_names("a")])
@pytest.mark.parametrize(("body", "stack"), PAIRS)
def test_the_caller_writes_to_it(body, stack, policy):
    region = functx.remat(body, policy=policy)
    ours, expected = (STACKS[stack](writing(f))(X) for f in (region, body))
    assert_same(ours, expected, eps=8)


@pytest.mark.parametrize(("body", "stack"), PAIRS)
@pytest.mark.parametrize("around", [None, KEEP])
def test_a_region_around_it_writes_to_it(body, stack, around):
    region = writing(functx.remat(body, policy=KEEP))
    ours, expected = (
        STACKS[stack](f)(X) for f in (functx.remat(region, policy=around), writing(body))
    )
    assert_same(ours, expected, eps=8)


def test_what_left_otherwise_than_by_return():
    def program(remat):
        box = []

        def f(x):
            v = x * 2
            box.append(v)
            return (v.sum() * 0.1).exp()

        x = X.clone().requires_grad_()
        s = remat(f)(x)
        box[0].mul_(3)
        return torch.autograd.grad(s + box[0].sum(), x)

    ours = program(lambda f: functx.remat(f, policy=KEEP))
    assert_same(ours, program(lambda f: f))


def test_what_was_not_written_to_is_handed_out():
    """It is not computed anew; and when it was written to, it is."""
    ran = []

    class Ran(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    def cosine(p):
        v = p.cos()
        return v, (v.sum() * 0.1).exp()

    for write in (False, True):
        x = X.clone().requires_grad_()
        v, s = functx.remat(cosine, policy=KEEP)(x)
        if write:
            v.mul_(3)
        ran.clear()
        with Ran():
            torch.autograd.grad(s, x)
        assert (torch.ops.aten.cos in ran) == write


def test_a_state_that_is_written_to_later():
    """No derivative flows to it, so that it may be left behind."""

    def program(remat, by_view):
        state = []

        def f(x):
            v = x.detach().cos()
            state.append(v[1:].detach() if by_view else v)
            return (v.sum() * x).exp()

        x = X.clone().requires_grad_()
        y = remat(f)(x)
        state[0].mul_(3)
        return torch.autograd.grad(y.sum(), x)

    for by_view in (False, True):
        ours = program(lambda f: functx.remat(f, policy=KEEP), by_view)
        assert_same(ours, program(lambda f: f, by_view))


def test_a_tangent_that_is_written_to_later():
    def body(x):
        _, dy = functx.jvp(lambda x: (x * x, (x * x).sum().exp()), (x,), (x.cos(),))
        return dy

    def program(region):
        x = X.clone().requires_grad_()
        v, s = region(x)
        v.mul_(3)
        return torch.autograd.grad((v.sin() * s).sum(), x)

    assert_same(program(functx.remat(body, policy=KEEP)), program(body), eps=8)
    assert_same(
        program(lambda x: functx.jvp(functx.remat(result, policy=KEEP), (x,), (x.cos(),))[1]),
        program(lambda x: functx.jvp(result, (x,), (x.cos(),))[1]),
        eps=8,
    )
