"""What a function reads is read at each call, and a trace leaves nothing in what it reads."""

import functools
import types

import numpy as np
import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn

import functx
from functx._torch import compiler

from .jitted import as_traced

X = numbers(3)


def jit(f):
    return functx.jit(f, backend=as_traced)


# -- what it leaves


class Cached(nn.Module):
    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.cos(torch.arange(3.0, dtype=torch.float64))
        return x * self.table


class Counted(nn.Module):
    """Its forward writes to all kinds of places before it fails, or leaves a tensor."""

    def __init__(self, fails):
        super().__init__()
        self.fails, self.seen, self.tables = fails, [], {}

    def forward(self, x):
        self.training, self.new = False, 1
        self.seen.append(x.sin())
        self.tables["x"] = {"sine": x.sin()}
        return x * float(x.sum()) if self.fails else x


def kept_of(model):
    return dict(vars(model), seen=[*model.seen], tables={**model.tables})


def test_a_table_cached_in_the_first_call_is_part_of_the_graph_and_not_of_the_model():
    model = Cached()
    jitted = jit(model)
    for x in (X, X, numbers(2, 3)):
        assert_same(jitted(x), x * torch.cos(torch.arange(3.0, dtype=torch.float64)))
        assert model.table is None
    expected = model(X)
    assert_same(jitted(X), expected)


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_function_reads_is_as_before_where_its_trace_fails_or_leaves_a_tensor(fails):
    model = Counted(fails)
    before = kept_of(model)
    if fails:
        with pytest.raises(functx.TracingError, match="reads the value"):
            jit(model)(X)
    else:
        assert_same(jit(model)(X), X)
    assert kept_of(model) == before


def test_a_variable_is_as_before_too():
    of_cell, of_list = None, []

    def fills(x):
        nonlocal of_cell
        of_cell = x.sin()
        of_list.append(x.cos())
        return x.sum()

    for f in (fills, functx.grad(fills), lambda x: functx.jvp(fills, (x,), (x,))[1]):
        assert_same(jit(f)(X), f(X))
        of_cell = None
        of_list.clear()
        jit(f)(X)
        assert (of_cell, of_list) == (None, [])


def test_a_trace_that_ends_well_leaves_what_the_function_did():
    seen = []
    assert_same(jit(lambda x: (seen.append(len(x)), x.sin())[1])(X), X.sin())
    assert seen == [3]


def test_in_eager_an_error_undoes_nothing(monkeypatch):
    monkeypatch.setattr(compiler, "_told", set())  # of other tests
    seen = []

    def f(x):
        seen.append(1)
        raise ZeroDivisionError

    with pytest.warns(RuntimeWarning, match="in eager"), pytest.raises(ZeroDivisionError):
        functx.vmap(jit(f))(X)
    assert seen == [1]


def test_a_tensor_in_a_cache_that_is_not_looked_into_is_an_error_until_it_is_cleared():
    @functools.cache
    def table(n):
        return torch.arange(float(n))

    jitted = jit(lambda x: x * table(3))
    with pytest.raises(functx.TracingError, match=r"functools\.cache say.*aten\.arange\.default"):
        jitted(X)
    with pytest.raises(functx.TracingError, match=r"of an earlier trace.*Clear that"):
        jitted(X)
    table.cache_clear()
    expected = X * table(3)
    assert_same(jitted(X), expected)


def test_a_hook_that_keeps_a_result_has_none():
    model, found = nn.Linear(3, 3).double(), {}
    model.register_forward_hook(lambda module, args, out: found.update(out=out))
    jit(model)(X)
    assert found == {}


# -- optimizers


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_the_step_of_an_optimizer_is_an_error_that_says_to_call_it_outside(kind):
    p = nn.Parameter(X.clone())
    p.grad = torch.ones_like(p)
    optimizer = kind([p], lr=0.1)
    step = jit(lambda: optimizer.step())
    before = p.detach().clone()
    with pytest.raises(functx.TracingError, match=r"reads \.grad.*step\(\) outside"):
        step()
    assert not optimizer.state
    assert_same(p.detach(), before)
    optimizer.step()
    assert (p < before).all()


def test_a_named_stretch_of_the_profiler_is_not_in_the_graph():
    def f(x):
        with torch.profiler.record_function("sine"):
            return torch.sin(x)

    targets = []

    def backend(module, _):
        targets.extend(str(n.target) for n in module.graph.nodes if n.op == "call_function")
        return module

    assert_same(functx.jit(f, backend=backend)(X), X.sin())
    assert targets == ["aten.sin.default"]
    assert_same(functx.jit(f, backend="aot_eager")(X), X.sin())


# -- what it reads


class Named:
    scale = 2.0


def reads():
    settings, array, names = types.ModuleType("settings"), np.ones(2), {1, 2}
    settings.scale = 2.0
    set_in = lambda x, value: lambda: setattr(x, "scale", value)
    yield "a module", lambda x: x * settings.scale, set_in(settings, 3.0)
    yield "a class", lambda x: x * Named.scale, set_in(Named, 3.0)
    yield "an array", lambda x: x * float(array[0]), lambda: array.__setitem__(0, 3.0)
    yield "a set", lambda x: x * (2 if 7 in names else 3), lambda: names.add(7)


@pytest.mark.parametrize(("f", "change"), [pytest.param(*r[1:], id=r[0]) for r in reads()])
def test_another_value_traces_again(f, change, monkeypatch):
    traced = []
    jitted = functx.jit(f, backend=lambda module, _: traced.append(1) or module)
    monkeypatch.setattr(Named, "scale", 2.0)
    first = f(X)
    assert_same(jitted(X), first)
    assert_same(jitted(X), first)
    change()
    assert not torch.equal(f(X), first)
    assert_same(jitted(X), f(X))
    assert len(traced) == 2


def test_a_recurrent_layer_is_traced_once_with_the_weights_it_is_given():
    """It notes them, and weak references to them, anew at each call."""
    net, traced = nn.LSTM(3, 2).double(), []
    jitted = functx.jit(
        lambda weights, x: functx.functional_call(net, weights, (x,))[0],
        backend=lambda module, _: traced.append(1) or module,
    )
    for _ in range(3):
        weights = {name: p.detach() + 1 for name, p in net.named_parameters()}
        expected = functx.functional_call(net, weights, (X[None],))[0]
        assert_same(jitted(weights, X[None]), expected)
        assert len(traced) == 2  # a forward and a backward: its own parameters require grad


def test_a_tensor_of_a_module_is_an_input():
    settings, traced = types.ModuleType("settings"), []
    jitted = functx.jit(
        lambda x: x * settings.weight, backend=lambda module, _: traced.append(1) or module
    )
    for start in (0.0, 5.0):
        settings.weight = numbers(3, start=start)
        assert_same(jitted(X), X * settings.weight)
    assert len(traced) == 1
