"""What a region has run on is gone when the program lets go of it, and what is noted is bounded.

The kind: functx notes what a region has run (a plan for later runs), and finds it by the function.
What it is found by must not hold the function's objects. Members: each way in which a callable can
hold a tensor or another object of the program, under each entry point that runs regions.
"""

import functools
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn

import functx
from functx._remat import script

policies = functx.checkpoint_policies
TIMES = 5


class Holder:
    def __init__(self):
        self.t = numbers(4)

    def method(self, y):
        return (y * self.t).sin()

    def __call__(self, y):
        return y * self.t


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(numbers(4))

    def forward(self, y):
        return y * self.w

    def other(self, y):
        return (y * self.w).sin()


def tensor():
    return numbers(4)


def leaf():
    return numbers(4).requires_grad_()


def subclass():
    return nn.Parameter(numbers(4))


def holding(**values):
    """A function whose globals are its own, of code that is its own."""
    exec("def f(y): return y * t", values)
    return values["f"]


remat = functx.remat
# For each, what makes an object, and a function of it.
CALLABLES = {
    "a method of a tensor": (tensor, lambda o: o.mul),
    "a method of a leaf": (leaf, lambda o: o.mul),
    "a method of a parameter": (subclass, lambda o: o.__mul__),
    "a method in a cell": (tensor, lambda o: (lambda m: lambda y: m(y))(o.mul)),
    "a method as a default": (tensor, lambda o: lambda y, m=o.mul: m(y)),
    "a partial of a method": (tensor, lambda o: functools.partial(o.mul)),
    "a partial over a tensor": (tensor, lambda o: functools.partial(torch.add, o)),
    "a partial by keyword": (tensor, lambda o: functools.partial(torch.add, other=o)),
    "a tensor in a cell": (tensor, lambda o: lambda y: y * o),
    "an object in a cell": (Holder, lambda o: lambda y: o(y)),
    "methods in a tuple": (tensor, lambda o: (lambda ms: lambda y: ms[0](y))((o.mul,))),
    "a method of a dict": (tensor, lambda o: (lambda get: lambda y: y * get("a"))({"a": o}.get)),
    "a method of an object": (Holder, lambda o: o.method),
    "a partial of a method of an object": (Holder, lambda o: functools.partial(o.method)),
    "an object that can be called": (Holder, lambda o: o),
    "a module": (Scaled, lambda o: o),
    "a method of a module": (Scaled, lambda o: o.other),
    "a function of new code": (tensor, lambda o: holding(t=o)),
}
# Each runs a region of a function, and differentiates it.
ENTRIES = {
    "remat": lambda f, y: gradient(remat(f), y),
    "remat with a policy": lambda f, y: gradient(remat(f, policy=policies.dots_saveable), y),
    "remat with a budget": lambda f, y: gradient(remat(f, budget=1 << 20), y),
    "checkpoint": lambda f, y: gradient(functools.partial(functx.checkpoint, f), y),
    "a region in a region": lambda f, y: gradient(remat(lambda y: remat(f)(y)), y),
    "grad of a region": lambda f, y: functx.grad(lambda y: remat(f)(y).sum())(y),
    "a region of grad": lambda f, y: gradient(remat(functx.grad(lambda y: f(y).cos().sum())), y),
    "jvp": lambda f, y: functx.jvp(remat(f), (y,), (y,)),
    "hessian": lambda f, y: functx.hessian(lambda y: remat(f)(y).sin().sum())(y),
    "grad": lambda f, y: functx.grad(lambda y: f(y).sum())(y),
    "saved_residuals": lambda f, y: functx.saved_residuals(remat(f), y),
}


def gradient(f, y):
    return torch.autograd.grad(f(y).sum(), y)


@pytest.fixture(autouse=True)
def _plans_of_its_own(monkeypatch):
    monkeypatch.setattr(script, "_of_code", OrderedDict())


@pytest.mark.parametrize("run", ENTRIES.values(), ids=ENTRIES)
def test_nothing_is_held_by_what_functx_notes(run):
    y, refs = leaf(), []
    for name, (make, callable_of) in CALLABLES.items():
        for _ in range(TIMES):
            made = make()
            refs.append((name, weakref.ref(made)))
            f = callable_of(made)
            for _ in range(3):  # recorded, and followed
                run(f, y)
    del made, f
    gc.collect()
    assert not [name for name, ref in refs if ref() is not None]


def test_a_region_that_fails_holds_nothing_either():
    y, refs = leaf(), []
    for error in (ValueError, KeyboardInterrupt):
        made = tensor()
        refs.append(weakref.ref(made))

        def fails(y, mul=made.mul, error=error):
            mul(y)
            raise error

        with pytest.raises(error):
            remat(fails)(y)
        del made, fails
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_methods_of_different_tensors_are_different_functions():
    """They share what is noted, and each run is that of its own tensor."""
    x, y = numbers(4), leaf()
    others = [numbers(4, start=1.0), leaf(), numbers(1), numbers(3, 4), numbers(4).float()]
    for other in [x, *others, x, *others]:
        for name in ("mul", "add", "sub", "__rsub__", "maximum"):
            found, expected = remat(getattr(other, name))(y), getattr(other, name)(y)
            assert_same(found, expected)
            wanted = [t for t in {id(t): t for t in (y, other)}.values() if t.requires_grad]
            assert_same(*(torch.autograd.grad(t.sum(), wanted) for t in (found, expected)))


def test_methods_of_one_name_of_different_objects_are_different_functions():
    y = leaf()
    for get in ({"a": 2.0}.get, {"a": 3.0}.get, OrderedDict(a=4.0).get):
        assert_same(remat(lambda y, get=get: y * get("a"))(y), y * get("a"))


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(script, "_MANY", 10)
    y, x = leaf(), tensor()
    for _ in range(25):
        remat(holding(t=x))(y)
        remat(Holder().method)(y)
        remat(x.clone().mul)(y)
    assert 0 < len(script._of_code) <= 10
