"""A policy keeps what is a result, too, and no tape reads: the caller may write to it."""

import itertools

import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx import checkpoint_policies as cp
from functx._remat import _written_since
from functx._remat._checksum import bits_of, has_bits

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
        assert not {torch.ops.aten.arange, torch.ops.aten.bitwise_xor_}.intersection(ran)


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


def sgd(v):
    factors = {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
    torch._fused_sgd_(
        [v.detach()],
        [torch.ones_like(v)],
        [],
        **factors,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def statistics(v):
    rows, variance = torch.ones(4, len(v), dtype=v.dtype), torch.ones(len(v), dtype=v.dtype)
    torch.nn.functional.batch_norm(rows, v.detach(), variance, training=True)


def through_data(v):
    v.data.mul_(1.5)


def by_numpy(v):
    v.detach().numpy()[:] = 0.7


UNCOUNTED = [sgd, statistics, through_data, by_numpy]
UNDER_A_MODE = [
    sgd,
    statistics,
    lambda v: torch._foreach_mul_([v.detach()], 2.0),
    lambda v: torch._foreach_mul_([v.detach(), v.detach() * 1], 2.0),
    lambda v: torch._foreach_copy_([v.detach()], [v.detach() * 2]),
    lambda v: torch._foreach_clamp_max_([v.detach()], 0.5),
]


@pytest.mark.parametrize("policy", [None, KEEP, cp.everything_saveable])
@pytest.mark.parametrize("body", [result, in_place, part_in_place, twice_in_place, name_in_place])
@pytest.mark.parametrize("write", UNCOUNTED)
def test_a_write_that_torch_does_not_count(body, write, policy):
    def program(region):
        x = X.clone().requires_grad_()
        v, s = region(x)
        loss = s * v.sin().sum() if write is by_numpy else None
        write(v)
        loss = s * v.sin().sum() if loss is None else s
        return v, *torch.autograd.grad(loss, x)

    assert_same(program(functx.remat(body, policy=policy)), program(body), eps=8)


@pytest.mark.parametrize("policies", [*itertools.product([None, KEEP], repeat=2)])
@pytest.mark.parametrize("body", [result, view, in_place, part_in_place, name_in_place])
@pytest.mark.parametrize("write", UNDER_A_MODE)
def test_a_write_that_torch_does_not_count_between_two_regions(body, write, policies):
    def writing(region):
        def f(x):
            v, s = region(x)
            write(v)
            return v.sin().sum() * s

        return f

    inner, outer = policies
    nested = functx.remat(writing(functx.remat(body, policy=inner)), policy=outer)
    for stack in ("base", "grad"):
        ours, expected = (STACKS[stack](f)(X) for f in (nested, writing(body)))
        assert_same(ours, expected, eps=8)


def hidden(p):
    v = p.cos()
    return (v.sin().sum() * v).exp()


def shown(p):
    v = p.cos()
    return v, v.sin().sum()


@pytest.fixture
def looked_at(monkeypatch):
    """How many kept values were looked at when regions had run."""
    found = []

    def counting(t):
        found.append(t.shape)
        return bits_of(t)

    monkeypatch.setattr(_written_since, "bits_of", counting)
    return found


@pytest.mark.parametrize("stack", STACKS)
def test_what_nobody_else_holds_is_not_looked_at(stack, looked_at):
    def run(body):
        STACKS[stack](lambda x: sum(map(torch.sum, functx.remat(body, policy=KEEP)(x))))(X)

    run(lambda p: (hidden(p).sum(),))
    assert not looked_at
    run(shown)
    assert looked_at


def test_a_region_around_it_that_keeps_it_can_not_write_to_it(looked_at):
    region = functx.remat(lambda p: hidden(p).sum(), policy=KEEP)
    functx.remat(region, policy=KEEP)(X.clone().requires_grad_())
    assert not looked_at


def test_where_nobody_can_tell_it_is_computed_anew(monkeypatch):
    monkeypatch.setattr(_written_since, "bits_of", lambda t: None)
    x = X.clone().requires_grad_()
    v, s = functx.remat(result, policy=KEEP)(x)
    through_data(v)
    assert_same(torch.autograd.grad(s, x), torch.autograd.grad(result(x)[1], x))


@pytest.mark.parametrize(
    "t",
    [
        X,
        X.to(torch.complex128).conj(),
        torch.arange(3) > 1,
        X.to(torch.float16),
        numbers(9).reshape(3, 3).t(),
        torch.zeros(3, 40000),
    ],
)
def test_bits(t):
    """They are those of a copy, and of nothing that differs from it in one entry or in two."""
    bits = bits_of(t)
    assert bits is not None
    assert has_bits(t.clone(), bits)
    if t.dtype is torch.bool:
        assert not has_bits(t.flip(0), bits)
        return
    with torch.no_grad():
        for those in (slice(0, 1), slice(0, 2), slice(1, 3)):
            other = t.clone()
            other[those] = 2.0
            assert not has_bits(other, bits)
        assert not has_bits(-t, bits)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_bits_of_what_is_quantized():
    a, b = (torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8) for t in (X, X + 1))
    bits = bits_of(a)
    assert bits is not None
    assert has_bits(a.clone(), bits)
    assert not has_bits(b, bits)


def test_what_a_look_takes_is_bounded():
    t = torch.zeros(1 << 20)
    with torch.profiler.profile(profile_memory=True) as profiled:
        bits_of(t)
    assert 0 < max(e.cpu_memory_usage for e in profiled.events()) < t.nbytes // 8


def test_what_has_no_bits():
    x = torch.ones(8, device="meta").requires_grad_()
    v, s = functx.remat(shown, policy=KEEP)(x)
    v.data.mul_(2)
    (g,) = torch.autograd.grad(s, x)
    assert g.shape == (8,)
