"""Later runs of a region follow the script of the first one, and are right all the same."""

import functools
import gc
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cases import custom_function, identity, judged_by, numbers, unchanged
from references import assert_same, count
from torch import nn

import functx
from functx import _torch
from functx._remat import script

from .programs import STACKS, X, Y, how_regions_run, kept_bytes, same


@pytest.fixture(autouse=True)
def _no_scripts_of_other_tests():
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
    """What draws is watched; a probability that is not that of the script departs."""

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


def test_regions_inside_may_run_again_and_again():
    notes = Notes()

    def inner(x):
        notes.seen.append(listens())
        return x.sin() * Y

    again_and_again(lambda remat, i: remat(lambda x: functx.remat(inner)(x.exp()).cos().sum()))
    assert not all(notes.seen)


def test_a_region_may_call_another_region_inside_in_a_later_run():
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


# -- which runs follow


def epoch(regions, x):
    for region in regions:
        x = region(x)
    return x


def block(rate):
    return nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Tanh(), nn.Dropout(rate))


FORMS = {
    "objects": lambda layer: functx.remat(layer),
    "made anew": lambda layer: lambda x: functx.remat(lambda x: layer(x))(x),
    "checkpoint": lambda layer: lambda x: functx.checkpoint(layer, x, use_reentrant=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_blocks_with_rates_of_their_own_follow_after_their_first_call(form):
    regions = [FORMS[form](block(i / 32)) for i in range(24)]
    for i in range(3):
        with how_regions_run() as how:
            epoch(regions, X[None].clone().requires_grad_()).sum().backward()
        assert how == ["recorded: the first run" if i == 0 else "followed"] * 24


@pytest.mark.parametrize("form", FORMS)
def test_two_kinds_of_block_in_turn_follow_after_their_first_call(form):
    kinds = [nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), f) for f in (nn.Tanh(), nn.GELU())]
    regions = [FORMS[form](kind) for kind in kinds]
    with how_regions_run() as how:
        for _ in range(5):
            epoch(regions, X[None].clone().requires_grad_()).sum().backward()
    assert how == ["recorded: the first run"] * 2 + ["followed"] * 8


@pytest.mark.parametrize("shared", [False, True])
def test_a_function_that_branches_in_turn_follows_each_branch(shared):
    notes = Notes()

    def f(x):
        x = x.tanh() if shared else x
        return x.sin().exp() if notes.step % 2 else x.exp().sin()

    region = functx.remat(f)
    with how_regions_run() as how:
        for notes.step in range(40):
            region(X.clone().requires_grad_()).sum().backward()
    assert how == ["recorded: the first run", "departed: at Tensor.exp"] + ["followed"] * 38


def test_one_call_without_dropout_among_a_hundred_costs_that_call_only():
    region = functx.remat(layer := block(0.5))
    with how_regions_run() as how:
        for i in range(100):
            layer.train(i != 50)
            region(X[None].clone().requires_grad_()).sum().backward()
    followed = [i for i, h in enumerate(how) if h == "followed"]
    assert followed == [i for i in range(1, 100) if i != 50]


def test_scripts_are_few_and_hold_no_tensor():
    weight = torch.ones(3, dtype=torch.float64)
    region = functx.remat(lambda x: (x * weight).sin() * torch.tensor(2.0))
    for n in range(1, 40):
        region(numbers(n, 3).requires_grad_()).sum().backward()
    scripts = [*region.options.scripts.own, *(s for of in script._of_code.values() for _, s in of)]
    assert 0 < len(region.options.scripts.own) <= script._ENOUGH
    assert len(scripts) <= 5 * script._ENOUGH
    todo, seen = scripts, set()
    while todo:
        x = todo.pop()
        if id(x) in seen or (type(x).__module__ == "builtins" and callable(x)):
            continue
        seen.add(id(x))
        assert not isinstance(x, torch.Tensor)
        if isinstance(x, (script.Script, list, tuple, dict, set)) or "functx" in type(x).__module__:
            todo += gc.get_referents(x)


# -- departures of a run from the script that it follows

now = SimpleNamespace(other=False)
GENERATOR = torch.Generator()
LEAF = numbers(3, start=3.0).requires_grad_()
BUFFER = torch.zeros(3, dtype=torch.float64)
MASKS = torch.tensor([True, False, True]), torch.tensor([True, True, True])
library = torch.library.Library("functx_two_speeds", "DEF")
library.define("several(Tensor x) -> Tensor[]")


@torch.library.impl(library, "several", "CompositeImplicitAutograd")
def several(x):
    with torch._C.DisableTorchFunction():
        return list(x.chunk(3 if now.other else 1, -1))


def cast():
    return torch.autocast("cpu", torch.bfloat16, enabled=now.other)


def by_a_hook(x):
    y = x.sin()
    if now.other and y.requires_grad:
        y.register_hook(lambda g: None if g is None else g * 2)
    return y.exp()


def by_a_write(x):
    y = x.sin() * 2
    if now.other:
        y[1:].mul_(3)
    return y.exp()


def by_a_write_to_a_captured_tensor(x):
    if now.other:
        BUFFER.add_(1)
    return (x + BUFFER).sin().exp()


def another_result(x):
    y = x.sin()
    return (x * (y if now.other else Y)).exp()


def without_grad(x):
    with torch.set_grad_enabled(not now.other):
        y = x.exp()
    return x.sin() * y


def an_argument(x):
    return (x * (x if now.other else LEAF)).sin() * x.exp()


def a_captured_tensor(x):
    return (x * (LEAF if now.other else x)).sin() * x.exp()


DEPARTURES = {
    "at the first call": lambda x: (x.cos() if now.other else x.sin()).exp() * Y,
    "at a middle call": lambda x: torch.exp(x.sin().cos() if now.other else x.sin().exp()).cos(),
    "at the last call": lambda x: x.sin().exp().cos() if now.other else x.sin().exp().sin(),
    "at the return": lambda x: (x.sin(), x.exp())[now.other],
    "at the return, of more": lambda x: (x.sin(), x.exp())[: 1 + now.other],
    "by one call more": lambda x: x.sin().exp().cos() if now.other else x.sin().exp(),
    "by one call less": lambda x: x.sin().exp() if now.other else x.sin().exp().cos(),
    "by another shape of a result": lambda x: x.sin()[MASKS[now.other]].exp().sum(),
    "by another dtype of a result": lambda x: cast()(torch.mm)(
        x[None].float(), Y[:, None].float()
    ).double().sin(),
    "by another number of results": lambda x: torch.ops.functx_two_speeds.several(x.sin())[0].exp(),
    "by a number": lambda x: F.softplus(x.sin(), 2.0 if now.other else 1.0).exp(),
    "by a number, which is followed": lambda x: (x * (2.0 if now.other else 1.0)).sin(),
    "by a hook, which is followed": by_a_hook,
    "by a write": by_a_write,
    "by a write to a captured tensor": by_a_write_to_a_captured_tensor,
    "by a captured tensor that is a result now": another_result,
    "by an argument in the place of a captured tensor": an_argument,
    "by a captured tensor in the place of an argument": a_captured_tensor,
    "by the grad mode": without_grad,
    "by a draw": lambda x: x.sin() * (torch.rand(3, dtype=x.dtype) if now.other else Y),
    "by a draw less": lambda x: x.sin() * (Y if now.other else torch.rand(3, dtype=x.dtype)),
    "by a draw with a generator": lambda x: x.sin() * (
        torch.rand(3, dtype=x.dtype, generator=GENERATOR) if now.other else Y
    ),
    "by a draw with a generator less": lambda x: x.sin() * (
        Y if now.other else torch.rand(3, dtype=x.dtype, generator=GENERATOR)
    ),
    "by another generator, which is followed": lambda x: x.sin() * torch.rand(
        3, dtype=x.dtype, generator=torch.default_generator if now.other else GENERATOR
    ),
}  # fmt: skip
LEVELS = {
    "backward": STACKS["backward"],
    "grad": STACKS["grad"],
    "vmap(grad)": STACKS["vmap(grad)"],
    "jvp": lambda f, x: functx.jvp(f, (x,), (x.cos(),)),
    "jvp(grad)": STACKS["jvp(grad)"],
    "grad(grad)": STACKS["grad(grad)"],
}
ORDERS = {
    "once": (False, False, True, False, False),
    "and back": (False, False, True, True, False, True),
    "at once": (False, True, False, True, True, True),
}
# torch refuses hooks in forward mode, generators under vmap, and writes to what a level captures.
NOT = {
    "by a hook, which is followed": {"jvp", "jvp(grad)"},
    "by a write to a captured tensor": {*LEVELS} - {"backward"},
    "by another shape of a result": {"vmap(grad)"},
    **{name: {"vmap(grad)"} for name in DEPARTURES if "generator" in name},
}
CASES = [(d, s) for d in DEPARTURES for s in LEVELS if s not in NOT.get(d, ())]


def loss_of(f):
    def loss(x):
        out = f(x)
        return sum(t.sum() for t in (out if isinstance(out, tuple) else [out]))

    return loss


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_run_that_departs_is_right(name, level, order):
    """Values, derivatives, generators, what is written, and what is left in memory."""
    found = {}
    for remat in (identity, functx.remat):
        region, results = remat(DEPARTURES[name]), []
        torch.manual_seed(0)
        GENERATOR.manual_seed(1)
        BUFFER.zero_()
        with how_regions_run() as how:
            for now.other in ORDERS[order]:
                results.append(loss_of(region)(X.clone()).detach())
                run = lambda region=region: LEVELS[level](loss_of(region), X.clone())
                results.append(run())
                results += [torch.get_rng_state(), GENERATOR.get_state(), BUFFER.clone()]
                held, left = kept_bytes(run)
                results += [left, None if "place of" in name else held]  # (there, a tape)
        found[remat] = results
    now.other = False
    same(found[functx.remat], found[identity])
    own = [h for h in how if h != "recorded: a pullback"]
    assert any(h == "followed" for h in own)
    assert any(h.startswith("departed") for h in own) or "which is followed" in name


def in_the_inner_one(remat, f):
    inner = remat(f)
    return remat(lambda x: loss_of(inner)(x * 2).exp() * x)


def in_the_outer_one(remat, f):
    inner = remat(lambda x: x.sin() * Y)
    return remat(lambda x: loss_of(f)(inner(x)) * inner(x.cos()))


def in_the_one_between(remat, f):
    inner = remat(torch.cos)
    between = remat(lambda x: loss_of(f)(inner(x * 2)) * inner(x))
    return remat(lambda x: between(x.sin()) * between(x))


def in_one_made_anew(remat, f):
    return remat(lambda x: loss_of(remat(f))(x * 2).exp() * remat(lambda y: y * x)(x.sin()))


# (In float32, second derivatives of nests differ in the last bits: sums are in another order.)
OF_NESTS = [case for case in CASES if case != ("by another dtype of a result", "grad(grad)")]
NESTS = [in_the_inner_one, in_the_outer_one, in_the_one_between, in_one_made_anew]


def of_nests():
    """Each case in one of the nests; in all others in `make sweep`."""
    for i, (name, level) in enumerate(OF_NESTS):
        for j, nest in enumerate(NESTS):
            marks = [] if (i + i // 4) % len(NESTS) == j else [pytest.mark.sweep]
            yield pytest.param(name, level, nest, marks=marks, id=f"{name}-{level}-{nest.__name__}")


@pytest.mark.parametrize(("name", "level", "nest"), [*of_nests()])
def test_a_run_of_a_nest_that_departs_is_right(name, level, nest):
    """Values, derivatives, generators and what is written, as regions inside or around depart."""
    found = {}
    for remat in (identity, functx.remat):
        f, results = nest(remat, DEPARTURES[name]), []
        torch.manual_seed(0)
        GENERATOR.manual_seed(1)
        BUFFER.zero_()
        for now.other in (False, False, False, True, False, True, True):
            results.append(loss_of(f)(X.clone()).detach())
            results.append(LEVELS[level](loss_of(f), X.clone()))
            results += [torch.get_rng_state(), GENERATOR.get_state(), BUFFER.clone()]
        found[remat] = results
    now.other = False
    same(found[functx.remat], found[identity])


# Operations that compute nothing: of nodes, of what is left out, and of a copy before a write.
ENGINE = {"detach", "alias", "view", "empty_strided", "as_strided", "clone"}


@pytest.mark.parametrize("name", DEPARTURES)
def test_a_run_that_departs_makes_each_call_once(name):
    """In the forward; a replay leaves nothing out of what it had in common with the script."""
    f = DEPARTURES[name]
    region, counts = functx.remat(f), []
    with how_regions_run() as how:
        for now.other in (False, False, True):
            x = X.clone().requires_grad_()
            out = []
            forward = count(lambda x=x, out=out: out.append(loss_of(region)(x)))
            backward = count(lambda x=x, out=out: torch.autograd.grad(out[0], x))
            counts.append((forward, backward))
    plain_out = []
    x = X.clone().requires_grad_()
    plain = count(lambda: plain_out.append(loss_of(f)(x)))
    plain_backward = count(lambda: torch.autograd.grad(plain_out[0], x))
    now.other = False
    assert how[1] == "followed"
    forward, backward = counts[-1]
    for op in {*forward, *plain} - ENGINE:
        assert forward[op] == plain[op], op
    for op in {*backward} - ENGINE:
        assert backward[op] <= plain[op] + plain_backward[op] + 1, op


# -- runs of kinds of their own


def all_follow(region, run, runs=3):
    """After the first."""
    with how_regions_run() as how:
        found = [run(region) for _ in range(runs)]
    first = how.count("recorded: the first run")  # of the region, and of its pullbacks
    assert how == ["recorded: the first run"] * first + ["followed"] * first * (runs - 1)
    return found


WEIGHT = numbers(3, 3, start=2.0).requires_grad_()
KINDS = {
    "that returns an input as another object": lambda x: x.to(x.dtype).sin().exp() * x.contiguous(),
    "that returns a captured parameter as another object": lambda x: (
        WEIGHT.to(WEIGHT.dtype).sin().sum(0) * x
    ),
    "of captured parameters": lambda x: F.linear(x, WEIGHT).tanh(),
    "of what is not differentiated": lambda x: x.detach().sin() + x.round(),
    "that returns its argument": lambda x: (x.sin(), x)[1],
}


LINEAR = nn.Linear(3, 3, dtype=torch.float64)


def with_one_inside(remat):
    inner = remat(torch.sin)
    return remat(lambda x: inner(x * 2) * x)


def with_one_inside_that_runs_twice(remat):
    inner = remat(torch.sin)
    return remat(lambda x: inner(inner(x)))


def with_one_inside_that_captures(remat):
    return remat(lambda x: remat(lambda: x.sin() * Y)() * x)


def with_a_module_inside(remat):
    inner = remat(LINEAR)
    return remat(lambda x: inner(x.sin()).exp())


def with_data_made_inside(remat):
    inner = remat(lambda x: x * torch.tensor([1.0, 2.0, 3.0]))
    return remat(lambda x: inner(x.sin()))


def three_deep(remat):
    innermost = remat(torch.cos)
    inner = remat(lambda x: innermost(x * Y))
    return remat(lambda x: inner(x.exp()) * inner(x))


NESTED = [
    *(with_one_inside, with_one_inside_that_runs_twice, with_one_inside_that_captures),
    *(with_a_module_inside, with_data_made_inside, three_deep),
]


@pytest.mark.parametrize("level", [*LEVELS, "vmap(hessian)"])
@pytest.mark.parametrize("nest", NESTED, ids=lambda nest: nest.__name__)
def test_later_runs_follow_nests_and_their_pullbacks(nest, level):
    hessian = lambda loss, x: functx.vmap(functx.hessian(loss))(x[None])
    derivative = (LEVELS | {"vmap(hessian)": hessian})[level]
    run = lambda f: derivative(lambda x: (f(x) * x).sum(), X.clone())
    expected, region = run(nest(identity)), nest(functx.remat)
    with how_regions_run() as how:
        found = [run(region) for _ in range(3)]
        n = len(how)
        found.append(run(region))
    assert how[n:]
    assert {*how[n:]} == {"followed"}
    for one in found:
        same(one, expected)


@pytest.mark.parametrize("stack", ["backward", "vmap(grad)", "grad(grad)"])
def test_what_a_nest_recomputes_stays_the_same(stack):
    inner = functx.remat(lambda x: (x @ x).sin())
    region = functx.remat(lambda x: (inner(x) @ inner(x.cos()) @ x).sum())
    x = numbers(3, 3)
    found = [count(lambda: STACKS[stack](region, x.clone()))["mm"] for _ in range(4)]
    assert found == [found[0]] * 4


def test_a_replay_of_a_nest_that_is_followed_is_compared():
    """In the region inside, and around it; numbers too, which a forward may change."""
    notes = Notes()

    def inner(x):
        y = x.sin() if notes.step != 1 else x.cos()
        return y.mul(3.0 if notes.step == 2 else 2.0)

    f = functx.remat(inner)
    region = functx.remat(lambda x: (f(x).exp() if notes.step < 3 else f(x).tanh()) * x)
    for _ in range(3):
        region(X.clone().requires_grad_()).sum().backward()
    for changed in (1, 2, 3):
        notes.step = 0
        x = X.clone().requires_grad_()
        with how_regions_run() as how:
            out = region(x).sum()
        assert how == ["followed", "followed"]
        notes.step = changed
        with pytest.raises(functx.ReplayError):
            torch.autograd.grad(out, x)


@pytest.mark.parametrize("level", ["jvp", "grad", "vmap(grad)", "jvp(grad)"])
@pytest.mark.parametrize("name", KINDS)
def test_later_runs_follow_a_region(name, level):
    f = KINDS[name]
    run = lambda f: LEVELS[level](lambda x: (f(x) * x).sum(), X.clone())
    for found in all_follow(functx.remat(f), run):
        same(found, run(f))


def test_regions_of_one_code_with_captured_tensors_of_two_kinds_follow_in_forward_mode():
    """A script of other inputs is tried first, and stand-ins are on the tape there, too."""
    scale = numbers(3, 3, start=5.0)

    def f(w):
        return lambda x: functx.jvp(functx.remat(lambda x: (x * w).sin()), (x,), (x.cos(),))[1]

    def run():
        x = X.clone().requires_grad_()
        return [torch.autograd.grad(f(w)(x).sum(), x) for w in (WEIGHT, scale)]

    with how_regions_run() as how:
        found = [run() for _ in range(4)]
    assert how[4:] == ["followed"] * 4
    for one in found:
        same(one, found[0])


def test_a_region_of_which_nothing_is_differentiated_returns_what_the_function_returns():
    region = functx.remat(lambda x: (x, x.sin()))
    for same_one, sine in all_follow(region, lambda region: region(X)):
        assert same_one is X
        assert not sine.requires_grad


def test_what_is_not_differentiated_may_write_in_forward_mode():
    def f(x, y):
        y = y.clone()
        return y.mul_(2) + x.detach().add_(1)

    program = lambda f: functx.jvp(lambda x: f(x, x), (X.clone(),), (X,))
    for found in all_follow(functx.remat(f), program):
        same(found, program(f))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_leaf_may_be_asked_for_in_each_run():
    def run(region):
        a, x = numbers(3, 3).to_sparse_csr().requires_grad_(), numbers(3, 2).requires_grad_()
        return torch.autograd.grad(region(a, x).sum(), [x])

    f = lambda a, x: torch.mm(a, x).sin()
    for found in all_follow(functx.remat(f), run):
        same(found, run(f))


def test_a_partial_of_tuples_of_tensors_follows_also_where_it_is_made_anew():
    """As transformers calls its checkpoints: with what all layers share as keywords."""

    def layer(x, pair=None):
        return (x * pair[0]).sin() * pair[1]

    def run(_):
        x = X.clone().requires_grad_()
        out = functx.checkpoint(functools.partial(layer, pair=(Y, Y.cos())), x, use_reentrant=False)
        return torch.autograd.grad(out.sum(), x)

    all_follow(None, run)


@pytest.mark.parametrize("level", ["backward", "grad", "jvp(grad)"])
@pytest.mark.parametrize("returned", [lambda x: x.to(x.dtype), lambda x: x.contiguous()])
def test_a_run_that_departs_after_a_call_that_returns_an_input_is_right(level, returned):
    """What follows has numbers of its own, and not those of inputs."""

    def f(x, y):
        z = returned(y)
        a = (z.cos() if now.other else z.sin()) * x
        b = (a.exp() if now.other else a.tanh()) * y
        return a * b + x.sin()

    expected, found = [], []
    for results, one in ((expected, f), (found, functx.remat(f))):
        for now.other in (False, False, True, True, False):
            results.append(LEVELS[level](lambda x, one=one: one(x.cos(), x.exp()).sum(), X))
    now.other = False
    same(found, expected)


@pytest.mark.parametrize("generator", [None, GENERATOR])
@pytest.mark.parametrize("level", ["backward", "grad"])
def test_a_draw_of_the_script_that_is_tried_second_is_drawn_again(level, generator):
    """The one that was followed last draws nothing."""

    def f(x):
        return x.exp() if now.other else x.exp() * torch.rand(3, dtype=x.dtype, generator=generator)

    found = []
    for one in (f, functx.remat(f)):
        torch.manual_seed(0)
        GENERATOR.manual_seed(1)
        for now.other in (False, True, False, True, False):
            found.append(LEVELS[level](lambda x, one=one: one(x.sin()).sum(), X))
    now.other = False
    same(found[5:], found[:5])


def test_the_script_that_fits_at_the_return_is_the_one_that_the_replay_compares_with():
    def f(x):
        y = sum(x.unbind()[: 3 if now.other else 2])
        return y, x, y

    region, found, expected = functx.remat(f), [], []
    with how_regions_run() as how:
        for now.other in (False, False, True, False, True):
            for results, one in ((found, region), (expected, f)):
                x = X.clone().requires_grad_()
                y, z, w = one(x)
                results.append(torch.autograd.grad((y * 2 + z.sin() + w).sum(), x))
    now.other = False
    same(found, expected)
    assert how[3:] == ["followed"] * 2


def files_that_run(f, x):
    """The files of functx whose code a call runs, after two others."""
    f(x), f(x)
    seen = set()

    def note(frame, event, arg):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        f(x)
    finally:
        sys.setprofile(None)
    return {file for file in seen if file.startswith(os.path.dirname(functx.__file__) + os.sep)}


def test_a_later_call_runs_code_of_few_files():
    """A reader who follows the gradient of a region opens ten files more than without it."""
    f = lambda x: x.sin().sum()
    without = files_that_run(functx.grad(f), X)
    with_a_region = files_that_run(functx.grad(functx.remat(f)), X)
    assert without < with_a_region
    assert len(with_a_region) <= len(without) + 10


@pytest.mark.parametrize("level", ["grad", "vmap(grad)", "grad(grad)"])
def test_torch_is_not_asked_about_leaves_that_functx_asks_for(level, monkeypatch):
    """It would raise an error for each, which takes longer than all else that a node does."""
    answers = []
    plain = _torch.will_run

    def will_run(node):
        answers.append("raised")
        answers[-1] = plain(node)
        return answers[-1]

    monkeypatch.setattr(_torch, "will_run", will_run)
    region = functx.remat(lambda x, w: (x * w).sin())
    run = lambda x: LEVELS[level](lambda x: region(x, x.cos()).sum() + region(x, x).sum(), x)
    same(run(X.clone()), LEVELS[level](lambda x: ((x * x.cos()).sin() + (x * x).sin()).sum(), X))
    assert "raised" not in answers


CONSTANT = torch.full((3,), 2.0, dtype=torch.float64)


def with_a_hook_on_a_result(a, b):
    y = a.sin() * b
    if y.requires_grad:
        y.register_hook(lambda g: CONSTANT if now.other else None)
    return y * y


def with_a_hook_on_a_branch(a, b):
    """Without the hook, both gradients are one tensor."""
    b = b + 0.0
    if b.requires_grad:
        b.register_hook(lambda g: CONSTANT if now.other else None)
    return (a + b).sin()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("f", [with_a_hook_on_a_result, with_a_hook_on_a_branch])
def test_a_hook_that_makes_no_call_may_decide_what_a_gradient_depends_on(f, order):
    """The script of a pullback does not say it: no call shows the hook."""
    found = {}
    for remat in (identity, functx.remat):
        region, found[remat] = remat(f), []
        for now.other in ORDERS[order]:
            a, b, w = (numbers(3, start=float(i)).requires_grad_() for i in range(3))
            gradients = torch.autograd.grad((region(a, b) * w).sum(), [a, b], create_graph=True)
            total = (gradients[0] + 3 * gradients[1] * a).sum()
            second = torch.autograd.grad(total, [a, b, w], materialize_grads=True)
            found[remat] += [*gradients, *second]
    now.other = False
    same(found[functx.remat], found[identity])
