"""A model that does something to itself is as it was when `functx.jit`, or a plan, has refused it.

The kind is described in ``tests/acts_on_models.py``.
"""

import pytest
import torch
from acts_on_models import ERRORS, FAILURES, FINE, NAMES, Acted, places
from cases import numbers
from references import assert_same
from torch import nn

import functx
from functx import RematError, TracingError

from .jitted import as_traced

X = numbers(4, 3)
ENTRIES = {
    "jit": lambda m: functx.jit(lambda x: m(x), backend=as_traced)(X),
    "jit of the module": lambda m: functx.jit(m, backend=as_traced)(X),
    "jit of grad": lambda m: functx.jit(functx.grad(lambda x: m(x).sum()), backend=as_traced)(X),
    "jit in grad": lambda m: functx.grad(lambda x: jitted(m)(x).sum())(X),
    "jit of a region": lambda m: functx.jit(functx.remat(lambda x: m(x)), backend=as_traced)(X),
    "dynamic": lambda m: functx.jit(lambda x: m(x), backend=as_traced, dynamic=True)(X),
    "plan": lambda m: functx.plan(lambda x: m(x), X, budget=1 << 20),
    "budget": lambda m: functx.remat(lambda x: m(x), budget=1 << 20)(X),
}


def jitted(model):
    return functx.jit(lambda x: model(x), backend=as_traced)


@pytest.mark.parametrize("run", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize(("act", "words"), ERRORS.items(), ids=NAMES)
def test_a_model_is_as_it_was_after_the_error(act, words, run):
    model = Acted(act)
    before, expected = places(model), Acted(lambda m: None)(X)
    for _ in range(2):  # also where another call finds the model
        with pytest.raises(RuntimeError) as raised:
            run(model)
        assert places(model) == before
    if isinstance(raised.value, TracingError):
        assert raised.match(words)
    elif not isinstance(raised.value, RematError):  # torch refuses it in eager, too
        assert raised.match("would mutate a captured Tensor")
    model.act = lambda m: None
    assert_same(model(X), expected)
    model(X).sum().backward()


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(("act", "error"), FAILURES.items())
def test_an_error_of_its_own_leaves_a_model_as_it_was_or_as_eager_does(act, error, name):
    model, eager = Acted(act), Acted(act)
    before = places(model)
    with pytest.raises(error):
        ENTRIES[name](model)
    if name in ("plan", "budget") or error is KeyboardInterrupt:
        assert places(model) == before
        return
    with pytest.raises(error):  # `functx.jit` has run it in eager, once
        eager(X)
    if "grad" not in name:
        assert_same(model.state_dict(), eager.state_dict())
        assert_same(model.table, eager.table)


@pytest.mark.parametrize("act", FINE.values(), ids=FINE)
def test_what_changes_nothing_is_no_error(act):
    model = Acted(act)
    before = places(model)
    assert_same(jitted(model)(X), Acted(act)(X))
    assert places(model) == before


@pytest.mark.parametrize("freeze", [lambda p: p.requires_grad_(False), lambda p: thaw(p)])
def test_jit_refuses_to_freeze_a_parameter(freeze):
    model = Acted(lambda m: freeze(m.layer.weight))
    before = places(model)
    with pytest.raises(TracingError, match=r"sets requires_grad .* to False"):
        jitted(model)(X)
    assert places(model) == before
    same = Acted(lambda m: m.layer.weight.requires_grad_())
    assert_same(jitted(same)(X), same(X))


def thaw(p):
    p.requires_grad = False


def test_the_error_names_the_line_and_what_to_do():
    def f(x):
        w.data = w.data * 0.9
        return x @ w

    w = nn.Parameter(numbers(3, 3))
    line = f.__code__.co_firstlineno + 1
    with pytest.raises(
        TracingError, match=rf"{__file__}:{line} .*w\.mul_\(0\.9\) under torch.no_g"
    ):
        functx.jit(f, backend=as_traced)(X)


def test_a_tensor_argument_is_not_given_other_data_silently():
    def f(x, y):
        x.data = y * 2
        return x.sin()

    with pytest.raises(TracingError, match=r"sets \.data"):
        functx.jit(f, backend=as_traced)(X, X)


@pytest.mark.parametrize("name", ["t_", "unsqueeze_", "squeeze_", "set_"])
def test_what_an_alias_becomes_is_not_seen_by_what_it_is_of(name):
    """In a graph both are one value, unless the alias changes what it is."""

    def f(x):
        args = {"unsqueeze_": (0,), "set_": (x.new_zeros(2, 2),)}.get(name, ())
        getattr(x.detach(), name)(*args)
        y = x * 1
        getattr(y.data, name)(*args)
        return x.sin() + y

    x = numbers(1, 3)
    assert_same(functx.jit(f, backend=as_traced)(x), f(x))


@pytest.mark.parametrize("name", ["t_", "squeeze_", "resize_", "as_strided_", "unsqueeze_"])
def test_jit_refuses_to_change_what_a_tensor_of_the_program_is(name):
    args = {"unsqueeze_": (0,), "resize_": (2, 2), "as_strided_": ((2,), (1,))}.get(name, ())
    w = numbers(1, 3)

    def f(x):
        getattr(w, name)(*args)
        return x + w.sum()

    with pytest.raises(TracingError, match=f"calls {name} of a tensor"):
        functx.jit(f, backend=as_traced)(X)
    assert_same(w, numbers(1, 3))


WRITES = {
    "mul_": lambda w: w.mul_(0.9),
    "data": lambda w: w.data.mul_(0.9),
    "a part": lambda w: w[0].mul_(0.9),
    "clamped data": lambda w: w.data.clamp_(-0.1, 0.1),
    "a view": lambda w: w.view(-1)[:3].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_measuring_a_plan_does_not_write_to_parameters(write):
    """A plan runs the function several times; a call writes once."""
    w, own = nn.Parameter(numbers(3, 3)), nn.Parameter(numbers(3, 3))

    def f(w, x):
        with torch.no_grad():
            write(w)
        return (torch.tanh(x @ w) @ w).sum()

    before = w.detach().clone()
    functx.plan(lambda x: f(w, x), X, budget=1 << 20)
    assert_same(w.detach(), before)
    f(own, X).backward()
    functx.remat(lambda x: f(w, x), budget=1 << 20)(X).backward()
    assert_same((w.detach(), w.grad), (own.detach(), own.grad), eps=8)
