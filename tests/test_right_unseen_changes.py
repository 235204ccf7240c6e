"""What changes between forward and replay where no operation is called with it: found, too."""

import functools
import threading

import numpy as np
import pytest
import torch
from cases import numbers
from references import assert_same

import functx
from functx import checkpoint_policies as policies
from functx._remat import _known_runs, _letting_go
from functx._remat._known_runs import ALIKE

pytestmark = pytest.mark.usefixtures("no_hooks")

NOW = {}
X = numbers(3, 4)

READS = {
    "a number": (lambda x: (x * NOW["it"]).sin(), 2.0, 3.0),
    "a number of another type": (lambda x: x.sin() ** NOW["it"], 2, 2.0),
    "a flag": (lambda x: x.sin() if NOW["it"] else x.cos(), True, False),
    "one of two": (lambda x, y: (x, y)[NOW["it"]].sin() + (x * y), 0, 1),
    "a dtype": (lambda x: x.to(NOW["it"]).sin().double(), torch.float64, torch.float32),
    "in a region of its own": (
        functx.remat(lambda x: functx.remat(lambda x: x.sin() * NOW["it"])(x).cos()),
        2.0,
        3.0,
    ),
}


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
@pytest.mark.parametrize("reads", READS)
def test_what_it_reads_has_changed(reads, policy):
    f, before, after = READS[reads]
    inner = functx.remat(f, policy=policy)
    given = (lambda x: (x, x.exp())) if reads == "one of two" else lambda x: (x,)
    outer = functx.remat(lambda x: inner(*given(x.cos())).exp(), policy=policy)
    x = X.clone().requires_grad_()
    NOW["it"] = before
    y = outer(x)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    NOW["it"] = after
    with pytest.raises(functx.ReplayError, match="a region inside it"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    NOW["it"] = before
    assert_same(torch.autograd.grad(y.sum(), x)[0], expected)


def test_under_transforms():
    NOW["it"] = 2.0
    inner = functx.remat(READS["a number"][0])
    y, pull = functx.vjp(functx.vmap(functx.remat(lambda x: inner(x.cos()).exp())), X)
    expected = pull(y)
    NOW["it"] = 3.0
    with pytest.raises(functx.ReplayError, match="a region inside it"):
        pull(y)
    NOW["it"] = 2.0
    assert_same(pull(y), expected)


def test_a_nan_is_like_another():
    inner = functx.remat(lambda x: x.sin().nan_to_num(float("nan")))
    outer = functx.remat(lambda x: inner(x).cos())
    x = X.clone().requires_grad_()
    outer(x).sum().backward()
    assert_same(x.grad, -x.sin().sin() * x.cos(), eps=4)


def test_not_where_nobody_wants_it_checked():
    NOW["it"] = 2.0
    inner = functx.remat(READS["a number"][0], determinism_check="none")
    x = X.clone().requires_grad_()
    y = functx.remat(lambda x: inner(x.cos()).exp())(x)
    NOW["it"] = 3.0
    y.sum().backward()
    assert x.grad is not None


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = NOW["it"]
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor


class New(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = NOW["it"]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor


@torch.library.custom_op("functx_tests::factored", mutates_args=())
def factored(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


factored.register_autograd(
    lambda ctx, g: g * ctx.factor,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", NOW["it"]),
)

# Nothing that an operation is called with shows what has changed.
UNSEEN = {
    "which of those computed is used": lambda x: (x.sin(), x.cos())[NOW["it"]] * 1.5,
    "which of those computed is returned": lambda x: [x.sin(), x.cos()][NOW["it"]],
    "which part is used": lambda x: x.chunk(2, -1)[NOW["it"]].exp(),
    "what a Function keeps": Old.apply,
    "what a Function of the new style keeps": New.apply,
    "what an operator keeps": factored,
    "a seed": lambda x: x.sin() * torch.rand(4, generator=torch.Generator().manual_seed(NOW["it"])),
}
ONLY_AT_THE_BASE = ("what a Function keeps", "what an operator keeps")


@pytest.mark.parametrize(
    ("unseen", "way"),
    [
        (unseen, way)
        for unseen in UNSEEN
        for way in ("backward", "vjp", "in a region")
        if not (way == "vjp" and unseen in ONLY_AT_THE_BASE)
    ],
)
def test_what_no_operation_is_called_with(unseen, way):
    f = functx.remat(UNSEEN[unseen])
    if way == "in a region":
        f = functx.remat(lambda x, f=f: f(x.exp()).exp())
    NOW["it"] = 1
    if way == "vjp":
        y, pull = functx.vjp(f, X)
    else:
        x = X.clone().requires_grad_()
        y = f(x)

        def pull(cotangent):
            return torch.autograd.grad(y, x, cotangent, retain_graph=True)

    expected = pull(torch.ones_like(y))
    NOW["it"] = 0
    with pytest.raises(functx.ReplayError):
        pull(torch.ones_like(y))
    NOW["it"] = 1
    assert_same(pull(torch.ones_like(y)), expected)


def by_numpy(x):
    c = x.detach().clone()
    c.numpy()[:] *= 2
    return c * x.sin()


def by_apply(x):
    c = x.detach().clone()
    c.apply_(lambda a: a * 2)
    return c * x.sin()


def by_map(x):
    c = x.detach().clone()
    c.map_(x.detach(), lambda a, b: a * b)
    return c * x.sin()


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
@pytest.mark.parametrize("f", [by_numpy, by_apply, by_map])
def test_memory_that_is_written_to_unseen_is_not_kept(f, policy):
    def gradient(f):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)

    outer = functx.remat(functx.remat(f, policy=policy), policy=policy)
    assert_same(gradient(functx.remat(f, policy=policy)), gradient(f))
    assert_same(gradient(outer), gradient(f))


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("how", ["closed over", "made inside", "given", "given under grad"])
@pytest.mark.parametrize("share", [torch.from_numpy, torch.from_dlpack, torch.frombuffer])
def test_memory_that_is_not_torchs(share, how, change):
    """It has no version: its bits are compared."""
    array = np.array([1.0, 2.0])
    kwargs = {"dtype": torch.float64} if share is torch.frombuffer else {}
    outside = share(array, **kwargs)
    x = torch.ones(2, dtype=torch.float64)

    def loss(x):
        if how.startswith("given"):
            y = functx.remat(lambda x, t: (x * t.clone()).sin())(x, outside)
        elif how == "made inside":
            y = functx.remat(lambda x: (x * share(array, **kwargs).clone()).sin())(x)
        else:
            y = functx.remat(lambda x: (x * outside.clone()).sin())(x)
        if change:
            array[0] = 7
        return y.sum()

    def gradient():
        if how == "given under grad":
            return functx.grad(loss)(x)
        return torch.autograd.grad(loss(leaf := x.clone().requires_grad_()), leaf)[0]

    if change:
        with pytest.raises(functx.ReplayError, match="modified in place"):
            gradient()
    else:
        values = torch.tensor([1.0, 2.0], dtype=torch.float64)
        assert_same(gradient(), values.cos() * values)


def test_memory_that_is_shown_to_numpy_meanwhile():
    """It is no longer torch's alone, and has not changed."""
    outside = torch.from_numpy(np.array([1.0, 2.0]))
    x = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([5.0, 6.0], dtype=torch.float64, requires_grad=True)
    loss = functx.remat(lambda x, t: (x * t.clone() * w).sin())(x, outside).sum()
    logged = w.detach().numpy().copy()
    (g,) = torch.autograd.grad(loss, x)
    values = outside * torch.from_numpy(logged)
    assert_same(g, (x.detach() * values).cos() * values, eps=2)


def test_what_no_function_mode_sees():
    """What a body reads past the modes is there in a replay, however often it ran without."""
    seen, reads = [], [False]

    def body(x):
        a = x.sin()
        if reads[0]:
            with torch._C.DisableTorchFunction():
                seen.append(a.detach().sum())
        return (a * 2).cos()

    f = functx.remat(body)
    for i in range(ALIKE + 3):
        reads[0] = i > ALIKE + 1
        try:
            f(X.clone().requires_grad_()).sum().backward()
        except functx.RematError as error:  # some other test has left a thread behind
            assert "another thread put something" in str(error)  # noqa: PT017
            assert threading.active_count() > 1
            return
    assert seen
    assert_same(seen, [X.sin().sum()] * len(seen))


def of_a_parameter(region, x, p):
    return region(lambda x: (x * p).sin() * p)(x)


def of_an_argument(region, x, p):
    return region(lambda x, p: (x * p).sin() * p)(x, p)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("use", [of_a_parameter, of_an_argument])
@pytest.mark.parametrize("way", ["autograd", "vjp", "vmap"])
def test_memory_is_another(way, use, requires_grad):
    """``p.data = other`` has no version. A second one may come to be where the first was."""
    for step in range(ALIKE + 6):
        p = (X[0] * 2).requires_grad_(requires_grad)
        x = X.clone().requires_grad_(way == "autograd")

        def f(x, p=p):
            return use(functx.remat, x, p)

        if way == "autograd":
            y = f(x)
            pull = functools.partial(torch.autograd.grad, y, x)
        else:
            y, pull = functx.vjp(functx.vmap(f) if way == "vmap" else f, x)
        if step in (1, ALIKE + 3, ALIKE + 5):
            p.data = p.data * 2
            p.data = p.data * 2
            with pytest.raises(functx.ReplayError, match="modified"):
                pull(y)
            continue
        z = X.clone().requires_grad_()
        expected = torch.autograd.grad(use(lambda f: f, z, p.detach()), z, y.detach())[0]
        assert_same(pull(y.detach())[0].detach(), expected)


def test_memory_given_again_is_the_same():
    """As of ``module.to(dtype)`` where it has that dtype, and of memory that is made anew."""
    p = torch.nn.Parameter(X[0] * 2)
    x = X.clone().requires_grad_()
    y = functx.remat(lambda x: (x * p).sin())(x)
    p.data = p.data
    p.untyped_storage().resize_(0)
    p.untyped_storage().resize_(p.nbytes)
    p.data.copy_(X[0] * 2)
    assert_same(torch.autograd.grad(y.sum(), x)[0], (x * p).cos() * p)


@pytest.mark.parametrize("size", [(), (4,), (8, 8)])
@pytest.mark.parametrize("change", ["written", "another", "module"])
@pytest.mark.parametrize("way", ["autograd", "vjp", "nested"])
def test_what_no_pullback_reads_may_change(size, change, way, monkeypatch):
    """However small: nobody compares what a replay does not compute with."""
    monkeypatch.setattr(_letting_go, "_WORTH", 128)
    monkeypatch.setattr(_known_runs, "_sightings", {})  # a run that differs keeps everything
    module = torch.nn.Module()
    for _ in range(ALIKE + 4):
        module.register_buffer("c", numbers(*size, start=1.0) + 1)
        c, x = module.c, X[0, 0].clone().requires_grad_(way != "vjp")

        def f(x, c=c):
            c = module.c if change == "module" else c
            return functx.remat(lambda x: x.sin() + c * 2)(x)

        around = functx.remat(lambda x, f=f: f(x) * 1.0) if way == "nested" else f
        y, pull = functx.vjp(around, x) if way == "vjp" else (around(x), None)
        if change == "another":
            c.data = c.data * 3
        else:
            c.mul_(3)
        one = torch.ones_like(y)
        (gradient,) = pull(one) if pull is not None else torch.autograd.grad(y, x, one)
        assert_same(gradient.detach(), (x.cos() * one).sum().detach())
