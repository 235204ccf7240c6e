"""Operators of the user's, made of others in Python: a replay runs the same, or raises."""

import pytest
import torch
from cases import numbers

import functx
from functx import _torch_operators
from functx._remat import _prune

pytestmark = pytest.mark.usefixtures("no_hooks")


@pytest.fixture
def operator():
    """Defines an operator ``f(x, w)`` made of others, for a while."""
    library = torch.library.Library("functx_parts", "DEF")
    library.define("f(Tensor x, Tensor w) -> Tensor")

    def define(f):
        library.impl("f", f, "CompositeImplicitAutograd")
        return torch.ops.functx_parts.f

    yield define
    library._destroy()


# What an operator runs, and what it runs when something has changed.
CHANGES = {
    "another function": (lambda x, w: x.sin() * w, lambda x, w: x.cos() * w),
    "another number": (lambda x, w: x.sin() * 2, lambda x, w: x.sin() * 3),
    "another view": (lambda x, w: x.sin()[0] * w, lambda x, w: x.sin()[1] * w),
    "more": (lambda x, w: x.sin() * w, lambda x, w: x.sin() * w * 1.0),
    "less": (lambda x, w: x.sin().tanh(), lambda x, w: x.sin()),
    "nothing but views": (lambda x, w: x.sin() * w, lambda x, w: x.t()),
    "something at last": (lambda x, w: x.t(), lambda x, w: x.sin() * w),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reads_all", [True, False])
@pytest.mark.parametrize("check", ["default", "values"])
def test_a_change_inside_is_noticed(operator, change, nested, reads_all, check):
    """Also where all inputs were kept, and where nothing is left out of the replay."""
    now = list(CHANGES[change])
    f = operator(lambda x, w: now[0](x, w))
    x, w = numbers(3, 3).requires_grad_(), numbers(3, 3, start=1.0).requires_grad_()
    region = functx.remat(
        lambda x, w: f(x, w).sin() * (x * w if reads_all else x + w), determinism_check=check
    )
    out = functx.remat(lambda x, w: region(x * 1, w) * x)(x, w) if nested else region(x, w)
    now.reverse()
    with pytest.raises(functx.ReplayError, match=r"departed from its forward"):
        out.sum().backward()


@pytest.mark.parametrize("way", ["plain", "vmap(grad)", "jvp(grad)", "grad(grad)"])
def test_an_operator_that_does_the_same_passes(operator, way):
    def body(x, w):
        y = x.sin()
        return y.mul_(w.cos()).sum(-1)

    f = operator(body)
    ways = {
        "plain": lambda f: torch.autograd.grad(f(x).sum(), x),
        "vmap(grad)": lambda f: functx.vmap(functx.grad(f))(x),
        "jvp(grad)": lambda f: functx.jvp(functx.grad(lambda x: f(x).sum()), (x,), (x,)),
        "grad(grad)": lambda f: functx.grad(
            lambda x: functx.grad(lambda x: f(x).sum())(x).sin().sum()
        )(x),
    }
    x, w = numbers(2, 3).requires_grad_(), numbers(3, start=1.0)
    ours, expected = (
        ways[way](remat(lambda x: f(x.exp(), w).tanh())) for remat in (functx.remat, lambda f: f)
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


# What departs below the functions that a body calls, where torch itself is the one that does: an
# operator of the user's shows it, when nobody looks inside.


@pytest.fixture
def unseen(monkeypatch):
    monkeypatch.setattr(_torch_operators, "is_foreign", lambda func: False)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("way", ["plain", "twice", "inside"])
def test_a_replay_that_runs_other_operations_begins_again(operator, way):
    """It has all that it reads, though not all inputs were kept."""
    flag = [False]

    def body(x, w):
        return x.sin() + (w * 2 if flag[0] else w + w)

    f = operator(body)
    x, w = numbers(3, 3).requires_grad_(), numbers(3, 3, start=1.0).requires_grad_()

    def gradients(remat):
        generator = torch.Generator().manual_seed(5)

        def inner(x, w):
            (w * 3).exp()  # left out of the replay
            torch.empty_like(w).uniform_(generator=generator)  # by a shape alone
            noise = torch.rand(3, 3, dtype=x.dtype, generator=generator)
            return f(x.cos() * noise, w.tanh() + 1).sin()

        region = remat(inner)
        if way == "inside":
            region = remat(lambda x, w: remat(inner)(x, w) * 2 + w)
        flag[0] = False
        out = region(x, w)
        flag[0] = True
        first = torch.autograd.grad(out.sum(), [x], create_graph=way == "twice")
        return torch.autograd.grad(first[0].sin().sum(), [x]) if way == "twice" else first

    ours, expected = gradients(functx.remat), gradients(lambda f: f)
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize(
    "now",
    [
        lambda x, w: x.sin() * w,  # the tape holds it
        lambda x, w: x.sin() * (w * 2).exp(),  # or what comes from it
        lambda x, w: x.sin() + w * w.clone().mul_(x),
        lambda x, w: x.sin() + (w * w if w.sum() > 0 else w),  # nobody knows
        lambda x, w: x.sin() + w * w[w > 0].sum(),
        lambda x, w: x.sin() + torch.nn.functional.dropout(w, 0.5),
        lambda x, w: (torch.bernoulli(w.sigmoid()), x.sin() + w * 2)[1],  # it draws
        lambda x, w: (w.detach().clone().bernoulli_(), x.sin() + w * 2)[1],
        lambda x, w: (x.detach().to_sparse(), x.sin() * (w * 2).exp())[1],  # no memory to look at
    ],
)
def test_what_reads_an_input_that_was_not_kept_is_refused(operator, now):
    """A relaxed comparison must not let memory through that nobody wrote to."""
    what = [lambda x, w: x.sin() + w * 2, now]
    f = operator(lambda x, w: what[0](x, w))
    x, w = numbers(3, 3).requires_grad_(), numbers(3, 3, start=1.0).requires_grad_()
    out = functx.remat(lambda x, w: f(x.cos(), w) * 2)(x, w)
    what.reverse()
    with pytest.raises(functx.ReplayError, match="departed from its forward"):
        out.sum().backward()


@pytest.mark.usefixtures("unseen")
def test_a_departure_is_of_the_region_that_departs(operator):
    """An outer region's passes through the inner one that runs in its replay."""
    flag = [False]

    def body(x, w):
        return x.sin() + (w * 2 if flag[0] else w + w)

    f = operator(body)
    x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()

    def program(remat):
        def inner(x, w):
            return torch.autograd.grad(remat(lambda x: f(x, w).sin() * x)(x).sum(), x)[0]

        def outer(x, w):
            (x * 3).exp()
            return torch.autograd.grad((inner(x, w) + x).sum(), x, create_graph=True)[0] * x.sin()

        def again(x, w):
            x = x * 1.0
            h = remat(lambda x: f(x, w).sin() * x)(x)
            return torch.autograd.grad(h.sum(), x, create_graph=True)[0] * x.sin() + w

        flag[0] = False
        out = remat(again)(x, w)
        flag[0] = True
        return torch.autograd.grad(out.sum(), x)

    ours, expected = program(functx.remat), program(lambda f: f)
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("checked", [True, False])
def test_a_replay_that_ends_early_begins_again(operator, checked, monkeypatch):
    """What it ran last was taken for an operation whose result nobody reads."""
    flag = [False]

    def body(x, w):
        if not flag[0]:
            x.exp()
        return x.exp()

    f = operator(body)
    x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
    # Where a region is inside, steps do not all belong to operations.
    out = functx.remat(lambda x, w: (functx.remat(torch.sin)(w) + 0, f(x, w)))(x, w)
    flag[0] = True
    if not checked:
        monkeypatch.setattr(_prune.Pruned, "check", lambda self, results: None)
    ours = torch.autograd.grad(out[1].sum(), x)[0]
    assert torch.equal(ours, x.exp()) == checked


def test_operators_made_of_others_can_be_looked_into():
    """Which overload is meant, and a call that function modes see the inside of."""
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    library = torch.library.Library("functx_canary_parts", "DEF")
    library.define("f(Tensor x, float y) -> Tensor")
    library.impl("f", lambda x, y: (x * y).sin(), "CompositeImplicitAutograd")
    try:
        f, args = torch.ops.functx_canary_parts.f, (torch.ones(2, requires_grad=True), 2.0)
        assert _torch_operators.is_foreign(f)
        assert _torch_operators.is_foreign(f.default)
        assert not any(map(_torch_operators.is_foreign, (torch.sin, torch.ops.aten.sin)))
        assert not _torch_operators.is_foreign(torch.ops.aten.sin.default)
        overload = _torch_operators.composite(f, args, {})
        assert overload is f.default
        with Mode():
            out = _torch_operators.run_inside(overload, args, {}, args[:1])
        assert torch.equal(out, f(*args))
        assert out.grad_fn.name() == "SinBackward0"
        assert seen == [torch.Tensor.mul, torch.Tensor.sin]
    finally:
        library._destroy()
    assert _torch_operators.composite(torch.ops.aten.sin, args[:1], {}) is None


def test_an_operator_that_runs_functions_may_be_given_keywords_alone():
    class Sine(torch._ops.HigherOrderOperator):
        def __init__(self):
            super().__init__("functx_sine")

        def __call__(self, **kwargs):
            return super().__call__(**kwargs)

    sine = Sine()
    sine.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda *, x: x.sin())
    sine.fallthrough(torch._C.DispatchKey.AutogradCPU)
    x = numbers(3).requires_grad_()
    assert torch.equal(functx.remat(lambda x: sine(x=x) * x)(x), x.sin() * x)


@pytest.mark.parametrize(
    "f",
    [
        lambda h: torch._foreach_mul([h], 2.0)[0],
        lambda h: sum(torch._foreach_exp((h, h + 1))),
        lambda h: torch._foreach_lerp([h], [h * 2], 0.5)[0],
    ],
)
def test_lists_that_are_only_read(f):
    """``torch._foreach_add`` writes nothing, as ``torch._foreach_add_`` does."""
    x = numbers(3).requires_grad_()
    for _ in range(8):
        h = x.tanh()
        y = functx.remat(f)(h)
        assert h._version == 0
        (found,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad(f(x.tanh()).sum(), x)
        assert torch.equal(found, expected)


def test_lists_that_are_written_to():
    def f(x):
        h = x * 2
        torch._foreach_mul_([h], [x])
        return h.sin()

    x = numbers(3).requires_grad_()
    for _ in range(8):
        (found,) = torch.autograd.grad(functx.remat(f)(x).sum(), x)
        (expected,) = torch.autograd.grad(f(x).sum(), x)
        assert torch.equal(found, expected)
