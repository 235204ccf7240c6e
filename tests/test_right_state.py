"""State that a region reaches: modules count once; what is written to too early raises."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPE, numbers
from programs import identity
from references import assert_same
from torch import nn

import functx


class PowerIteration(nn.Module):
    """Rebinds a buffer and a number at each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 3))
        self.register_buffer("u", torch.ones(3, dtype=DTYPE))
        self.calls = 0

    def forward(self, x):
        with torch.no_grad():
            u = self.weight @ self.u
            self.u = u / u.norm()
        self.calls += 1
        return (x @ self.weight / (self.u @ self.weight @ self.u)).tanh()


@dataclasses.dataclass
class Holder:
    model: object


class Slots:
    __slots__ = ("model",)

    def __init__(self, model):
        self.model = model


class Callable:
    def __init__(self, model):
        self.parts = SimpleNamespace(models=[{"a": model}])

    def __call__(self, x):
        return self.parts.models[0]["a"](x)


def of_an_object(model):
    holder = Holder(model)
    return lambda x: holder.model(x)


def of_slots(model):
    holder = Slots(model)
    return lambda x: holder.model(x)


def in_a_closure(model):
    function = Callable(model)
    return lambda x: function(x)


def by_default(model):
    made = Holder(model)
    return lambda x, holder=made: holder.model(x)


@pytest.mark.parametrize("reach", [of_an_object, of_slots, Callable, in_a_closure, by_default])
@pytest.mark.parametrize("calls", [1, 2])
def test_counts_once(reach, calls):
    """With two calls before the backward, the first replay must not bring back what it found."""

    def program(remat):
        model = PowerIteration()
        region = remat(reach(model))
        x = numbers(2, 3, start=1.0).requires_grad_()
        y = [region(x * i) for i in range(1, calls + 1)]
        gradients = torch.autograd.grad(sum(y).sum(), [x, model.weight])
        assert model.calls == calls
        return y, gradients, model.u

    assert_same(program(functx.remat), program(identity), eps=16)


@pytest.mark.parametrize("library", [functx, torch.func])
@pytest.mark.parametrize("way", ["grad", "grad(grad)", "jacrev(grad)", "jvp(grad)", "vmap(grad)"])
@pytest.mark.parametrize("around", [False, True])
def test_buffers_made_below_transforms_advance(library, way, around):
    """Each level lets only that be written to which it has seen being made, in replays as well."""
    norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)

    def program(remat):
        def f(x):
            mean = x.detach().sum(0) * 0.5
            buffers = {"running_mean": mean, "running_var": mean.square() + 1.0}
            buffers["num_batches_tracked"] = torch.zeros((), dtype=torch.int64)
            y = torch.func.functional_call(remat(norm), buffers, (x,))
            return (y.sin() * x).sum() * buffers["num_batches_tracked"] + (mean * x).sum()

        f = remat(f) if around else f
        x = numbers(4, 3)
        if way == "vmap(grad)":
            return library.vmap(library.grad(f))(torch.stack([x, x.sin()]))
        if way == "jvp(grad)":
            return library.jvp(library.grad(f), (x,), (x,))
        outer = library.jacrev if way == "jacrev(grad)" else library.grad
        g = library.grad(f)
        if way == "grad(grad)":
            return library.grad(lambda x: g(x).sin().sum())(x)
        return g(x) if way == "grad" else outer(g)(x)

    assert_same(program(functx.remat), program(identity), eps=64)


class TestWrittenBeforeThePullback:
    """Under a transform torch compares no versions: it is the region that does."""

    @pytest.mark.parametrize("stack", [lambda f: f, functx.vmap], ids=["vjp", "vjp of vmap"])
    @pytest.mark.parametrize("who", ["a parameter", "a tensor", "an argument", "one in a list"])
    def test_raises(self, who, stack):
        weight = numbers(4, 4, start=1.0)
        if who == "a parameter":
            weight.requires_grad_()

        def f(x, given=None, *, rows=None):
            own = weight if given is None else given
            return (x @ (own if rows is None else rows[0])).sin()

        g = functx.remat(f)
        calls = {
            "an argument": lambda x: g(x, weight),
            "one in a list": lambda x: g(x, rows=[weight]),
        }
        _, pullback = functx.vjp(stack(calls.get(who, g)), numbers(3, 4))
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(functx.ReplayError, match=r"modified in place.*[Mm]odify it after"):
            pullback(numbers(3, 4))


@pytest.mark.parametrize("given", [True, False])
def test_a_backward_inside_that_accumulates_outside_is_refused(given):
    """In plain torch the leaf would have it; here a stand-in has."""
    w = numbers(3).requires_grad_()

    def body(x, *those):
        (leaf,) = those or (w,)
        (x.detach() * leaf).sum().backward()
        return x.sin()

    with pytest.raises(functx.RematError, match=r"calls \.backward\(\)"):
        functx.remat(body)(numbers(3).requires_grad_(), *([w] if given else []))


def test_a_backward_inside_to_a_leaf_of_its_own():
    def body(x):
        leaf = x.detach().requires_grad_()
        leaf.sin().sum().backward()
        return x * leaf.grad

    x = numbers(3).requires_grad_()
    assert_same(torch.autograd.grad(functx.remat(body)(x).sum(), x), (x.detach().cos(),))


@pytest.mark.parametrize("check", ["default", "values", "none"])
@pytest.mark.parametrize("nested", [False, True])
def test_statistics_advance_once_however_replays_are_compared(nested, check):
    def program(remat):
        norm, x = nn.BatchNorm1d(3).double(), numbers(4, 3).requires_grad_()
        f = remat(lambda x: norm(x.sin()).exp())
        whole = remat(lambda x: f(x * 2) * x) if nested else f
        gradients = torch.autograd.grad(whole(x).sum(), [x, *norm.parameters()])
        return gradients, [*norm.buffers()]

    ours = program(lambda f: functx.remat(f, determinism_check=check))
    assert_same(ours, program(identity), 8)
