"""Later runs of a region follow the plan of the first one, and are right all the same."""

import pytest
import torch
import torch.nn.functional as F
from cases import custom_function, judged_by, numbers, unchanged
from references import assert_same, count
from torch import nn

import functx
from functx import _torch
from functx._remat import script

from .programs import STACKS, X, Y


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests():
    script._of_code.clear()


def listens():
    """Whether a dispatch mode listens to what runs here."""
    return _torch.dispatch_depth() > 0


SOME = ("backward", "grad", "vmap(grad)", "grad(grad)", "jvp(grad)")


def again_and_again(program, runs=4, new=False, stacks=SOME):
    """Each run of ``program(remat, i)``, a loss, has the gradients that it has without remat."""
    for stack in map(STACKS.get, stacks):
        torch.manual_seed(0)
        expected = [stack(program(lambda f: f, i), X.clone()) for i in range(runs)]
        torch.manual_seed(0)
        region = None

        def one(f):
            nonlocal region
            region = region or functx.remat(f)
            return region

        for i in range(runs):
            region = None if new else region
            assert_same(stack(program(one, i), X.clone()), expected[i])


class Notes:
    """What a region appends to. (A closure over a list can't be told from others.)"""

    def __init__(self):
        self.seen = []
        self.step = 0


def seen_to_listen(f, *args, runs=3):
    """Of each of some runs of a region, whether it was listened to."""
    notes = Notes()

    @functx.remat
    def region(*args):
        notes.seen.append(listens())
        return f(*args)

    for _ in range(runs):
        region(*(a.clone().requires_grad_() for a in args))
    return notes.seen


def test_the_first_run_is_listened_to_and_later_ones_are_not():
    assert seen_to_listen(lambda x: x.sin().exp(), X) == [True, False, False]
    weight, shape = Y.diag(), (1, -1)
    assert seen_to_listen(lambda x: x.view(shape).exp(), X) == [True, False, False]
    assert seen_to_listen(lambda x: F.linear(x, weight, bias=Y), X) == [True, False, False]


@pytest.mark.parametrize("stack", ["backward", "grad", "vmap(grad)"])
def test_what_is_recomputed_stays_the_same(stack):
    region = functx.remat(lambda x: x.sin().cos().exp().sum())
    found = [count(lambda: STACKS[stack](region, X.clone())) for _ in range(3)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("first", ["sin", "exp"])
@pytest.mark.parametrize("later", ["cos", "square"])
def test_a_branch_that_is_taken_later_is_right_and_is_listened_to(first, later):
    notes = Notes()

    def f(x):
        notes.seen.append(listens())
        y = getattr(x * 2, first if notes.step < 2 else later)()
        notes.seen.append(listens())
        return (y * x).sum()

    region, forwards = functx.remat(f), []
    for notes.step in range(4):
        notes.seen.clear()
        x = X.clone().requires_grad_()
        out = region(x)
        forwards.append(tuple(notes.seen))
        (ours,) = torch.autograd.grad(out, x)
        x = X.clone().requires_grad_()
        (expected,) = torch.autograd.grad(f(x), x)
        assert_same(ours, expected)
    assert forwards == [(True, True), (False, False), (False, True), (False, False)]


@pytest.mark.parametrize("later", [torch.cos, torch.square])
def test_a_branch_that_a_custom_function_takes_later_is_right(later):
    """What torch runs after it is no call of the region's."""
    notes = Notes()

    def forward(ctx, x):
        ctx.save_for_backward(y := (torch.sin if notes.step < 2 else later)(x.detach()))
        return y

    f = custom_function(forward, lambda ctx, g: g * ctx.saved_tensors[0])

    def program(remat, step):
        def loss(x):
            notes.step = step
            return remat(f_of)(x).sum()

        f_of = lambda x: f(x * 2)
        return loss

    again_and_again(program, stacks=["backward"])


@pytest.mark.parametrize("inside", [False, True])
def test_dropout_has_one_mask_a_run_also_where_it_begins_later(inside):
    """What draws is watched; a probability that is not that of the plan ends it."""

    def program(remat, i):
        p = 0.0 if i < 2 else 0.5
        f = lambda x: (F.dropout(x.sin(), p, training=i != 3) * torch.rand_like(x)).sum()
        return (lambda x: remat(lambda x: functx.remat(f)(x * 2))(x)) if inside else remat(f)

    again_and_again(program, 5, new=True, stacks=("backward", "grad(grad)"))


@pytest.mark.parametrize("inside", [False, True])
@judged_by(unchanged)
def test_statistics_advance_once_in_each_run(remat, inside):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    block = inner = remat(nn.Sequential(norm, nn.Dropout(0.5)))
    if inside:
        block = remat(lambda x: inner(x.sin()))
    found = []
    for i in range(4):
        norm.train(i != 2)
        x = numbers(4, 3, start=float(i)).requires_grad_()
        found.append(torch.autograd.grad(block(x).square().sum(), [x, *norm.parameters()]))
        found.append([b.clone() for b in norm.buffers()])
    return found


def test_what_is_frozen_or_not_may_change():
    block = functx.remat(nn.Linear(3, 3, dtype=torch.float64))
    for wanted in (True, True, False, True):
        block.weight.requires_grad_(wanted).grad = None
        block(X.clone().requires_grad_()).sum().backward()
        assert (block.weight.grad is not None) == wanted


def test_regions_inside_follow_plans_of_their_own():
    notes = Notes()

    def inner(x):
        notes.seen.append(listens())
        return x.sin() * Y

    again_and_again(lambda remat, i: remat(lambda x: functx.remat(inner)(x.exp()).cos().sum()))
    assert not all(notes.seen)


def test_a_region_inside_that_is_new_ends_the_plan_of_the_region_around():
    blocks = [functx.remat(lambda x: x.sin()), functx.remat(lambda x: F.dropout(x, 0.5).cos())]

    def program(remat, i):
        block = blocks[i > 1]
        return lambda x: remat(lambda x: block(x * 2).sum())(x)

    again_and_again(program, new=True)


@pytest.mark.parametrize("cut", [lambda x, n: x[:n], lambda x, n: x.to(DTYPES[n])])
def test_a_region_inside_may_return_another_shape_or_dtype_in_a_later_run(cut):
    inner = lambda x, n: functx.remat(lambda x: cut(x.sin(), n))(x).exp()
    ours = functx.remat(lambda x, n: functx.remat(inner)(x, n).sum())
    plain = lambda x, n: cut(x.sin(), n).exp().sum()
    for n in (1, 2, 1, 3):
        for stack in map(STACKS.get, SOME):
            expected = stack(lambda x, n=n: plain(x, n), X.clone())
            assert_same(stack(lambda x, n=n: ours(x, n), X.clone()), expected)


DTYPES = [torch.float16, torch.float64, torch.float32, torch.bfloat16]


def test_functions_of_one_code_are_told_apart_by_what_they_close_over():
    with_a_default = lambda f: functx.remat(lambda x, f=f: f(x * 2).sum())
    for make in (lambda f: functx.remat(lambda x: f(x * 2).sum()), with_a_default):
        for f in (torch.sin, torch.exp, torch.square):
            found = count(lambda make=make, f=f: STACKS["backward"](make(f), X.clone()))
            script._of_code.clear()
            assert found == count(lambda make=make, f=f: STACKS["backward"](make(f), X.clone()))


def test_memory_that_python_reads_in_a_region_inside_is_computed():
    """The region around leaves out what nobody reads, but for ``tolist`` further in."""

    inner = lambda x, v: x * len([t for t in v.tolist() if t > 0])

    def program(remat, i):
        return remat(lambda x: functx.remat(inner)(x.sin(), (-Y).clone()).square().sum())

    again_and_again(program)
