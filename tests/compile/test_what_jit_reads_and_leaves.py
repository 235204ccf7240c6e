"""What a function reads is read at each call, and a trace leaves nothing in what it reads."""

import functools
import logging
import math
import types

import numpy as np
import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn

import functx
from functx._core import compiler_warnings

from .jitted import as_traced

X = numbers(3)


def jit(f):
    return functx.jit(f, backend=as_traced)


# -- what it leaves

KEPT = r"float64 of shape \(3,\), is kept by {} \(.*\), .*Return it.*clear that"


class Cached(nn.Module):
    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.cos(torch.arange(3.0, dtype=torch.float64))
        return x * self.table


def test_a_table_that_the_trace_fills_is_an_error_until_it_is_filled_before():
    model = Cached()
    jitted = jit(model)
    for _ in range(2):
        with pytest.raises(functx.TracingError, match=KEPT.format("Cached")):
            jitted(X)
    assert model.table is None
    expected = model(X)
    assert_same(jitted(X), expected)
    model.table = model.table + 1
    assert_same(jitted(X), X * model.table)


def leaves():
    of_cell, found, net = None, {}, nn.Identity()
    net.register_forward_hook(lambda module, args, out: found.update(out=out))
    of_list, of_dict, of_object = [], {"x": {}}, types.SimpleNamespace()

    def binds(x):
        nonlocal of_cell
        of_cell = x.sin()
        return x.sum()

    keeps = lambda keep: lambda x: (keep(x.sin()), x.sum())[1]
    yield "a list", "leaves.*lambda>", keeps(lambda t: of_list.append(t))
    yield "a dict in a dict", "leaves.*lambda>", keeps(lambda t: of_dict["x"].update(y=t))
    yield "an attribute", "SimpleNamespace", keeps(lambda t: setattr(of_object, "y", t))
    yield "a hook", "leaves.*lambda>", lambda x: net(x.sin()).sum()
    yield "a variable", "leaves.*binds", binds


@pytest.mark.parametrize(("owner", "f"), [pytest.param(*x, id=name) for name, *x in leaves()])
@pytest.mark.parametrize(
    "transform", [lambda f: f, functx.grad, lambda f: lambda x: functx.jvp(f, (x,), (x,))[1]]
)
def test_a_tensor_that_would_be_left_is_an_error(owner, f, transform):
    with pytest.raises(functx.TracingError, match=KEPT.format(owner)):
        jit(transform(f))(X)


def test_what_else_a_function_does_to_objects_is_done_in_eager_at_each_call(monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    seen, traced = [], []
    f = lambda x: (seen.append(len(x)), x.sin())[1]
    jitted = functx.jit(f, backend=lambda m, _: traced.append(m) or m)
    with pytest.warns(RuntimeWarning, match=r"runs in eager, because it changes the items"):
        assert_same(jitted(X), X.sin())
    assert_same(jitted(X), X.sin())
    assert seen == [3, 3]
    assert len(traced) <= 1


def test_a_tensor_left_where_functx_does_not_look_computes_nothing_silently(monkeypatch):
    @functools.cache
    def table(n):
        return torch.arange(float(n))

    jitted, expected = jit(lambda x: x * table(3)), X * torch.arange(3.0)
    assert_same(jitted(X), expected)
    assert_same(jitted(numbers(2, 3)), numbers(2, 3) * torch.arange(3.0))
    assert_same(X * table(3), expected)

    def keeps(x):
        math.left = x.sin()  # a module of the standard library is not looked into
        return x.sum()

    monkeypatch.setattr(math, "left", None, raising=False)
    jit(keeps)(X)
    with pytest.raises(AssertionError, match="FakeTensor"):
        X * math.left


def test_a_hook_that_reads_its_own_tensor_is_not_taken_for_one_that_keeps_it():
    def f(x):
        y = x * 2
        y.register_hook(lambda g: g * y.detach())
        return (y.sin() * x).sum()

    assert_same(jit(functx.grad(f))(X), functx.grad(f)(X))


@pytest.mark.parametrize("change", [lambda s: s.append(X), lambda s: s.pop(), lambda s: s.clear()])
def test_a_change_of_an_argument_that_is_not_returned_is_an_error(change):
    with pytest.raises(functx.TracingError, match="changes an argument, a list"):
        jit(lambda s: (change(s), X.sin())[1])([X])


def test_a_change_of_an_argument_may_be_returned():
    def step(state):
        state["n"] = state["n"] + 1
        return state

    assert_same(jit(step)({"n": X})["n"], X + 1)


def test_what_changes_may_be_returned_in_parts():
    def step(state, x):
        parameters, momenta = state
        for name in parameters:
            momenta[name] = 0.9 * momenta[name] + x
            parameters[name] = parameters[name] - momenta[name]
        return parameters, momenta

    state = lambda: ({"a": X}, {"a": 2 * X})
    assert_same(jit(step)(state(), X), step(state(), X), eps=1)
    assert_same(functx.remat(step)(state(), X), step(state(), X))


def test_a_second_trace_does_not_begin_where_the_first_one_ended(monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    depth = 0

    def f(x):
        nonlocal depth
        depth += 1
        drops = lambda a: torch.nn.functional.dropout(a, 0.5)
        out = functx.vmap(drops, randomness="different")(x) * depth
        depth -= 1
        return out

    jitted = functx.jit(f, backend=as_traced, dynamic=True)
    with pytest.warns(RuntimeWarning, match="one graph can't serve all sizes here"):
        found = jitted(torch.ones(4, 3))
    assert {*found.unique().tolist()} <= {0.0, 2.0}


# -- tensors that it is given twice


class Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.sum() * b.sum()

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b.sum() * torch.ones_like(a), g * a.sum() * torch.ones_like(b)


def test_gradients_of_a_tensor_and_of_one_computed_of_it_are_not_mixed():
    w = X.clone().requires_grad_()
    for h in (w + 1, w[:2], w * w):
        f = lambda x, h=h: h.sum() + (2 * w + x).sum()
        of_w = [torch.autograd.grad(g(X), w, retain_graph=True)[0] for g in (jit(f), f)]
        assert_same(*of_w)
        with pytest.raises(functx.TracingError, match="computed from it outside"):
            jit(lambda x, h=h: Dot.apply(w, h) + x)(X)  # which no function mode is shown
    h = w + 1
    (got,) = torch.autograd.grad(jit(lambda h: (h + 2 * w).sum())(h), w)
    assert_same(got, torch.full_like(w, 3.0))


def test_what_is_computed_outside_may_be_read_where_gradients_are_not_mixed():
    net = nn.Linear(3, 3).double()
    h = net(X)
    detached = lambda x: (net(x) * h.detach()).sum()
    of_weight = lambda r: torch.autograd.grad(r, net.weight, retain_graph=True)[0]
    assert_same(of_weight(jit(detached)(X)), of_weight(detached(X)), eps=4)
    given = lambda w: ((w @ X) * h).sum()  # which is another input than what `h` is computed of
    assert_same(of_weight(jit(given)(net.weight)), of_weight(given(net.weight)), eps=4)


def test_a_module_may_hold_a_tensor_computed_of_its_parameters_that_it_does_not_read():
    net = nn.Linear(3, 2).double()
    net.last = net(X)
    (got,) = torch.autograd.grad(jit(net)(X).sum(), net.weight)
    assert_same(got, X.expand(2, 3))


def test_several_results_of_one_operation_may_be_read():
    w = X.clone().requires_grad_()
    a, b = (w * 2).split([1, 2])
    f = lambda x: (a.sum() * b.sum() + x).sum()
    assert_same(
        *[torch.autograd.grad(g(X), w, retain_graph=True)[0] for g in (jit(f), f)],
    )


def written_twice():
    w, kv = torch.zeros(2), torch.zeros(2, 2)
    k = kv[0]
    yield "closed over", lambda a: (a.add_(1), 2 * w)[1], (w,)
    yield "a detached alias", lambda a: (a.add_(1), 2 * w)[1], (w.detach(),)
    yield "twice an argument", lambda a, b: (a.add_(1), 2 * b)[1], (w, w)
    yield "a view of what is read", lambda x: (k.add_(x), kv.sum())[1], (torch.ones(2),)


@pytest.mark.parametrize(("f", "args"), [pytest.param(*x, id=n) for n, *x in written_twice()])
def test_a_tensor_that_is_written_and_read_under_another_name_is_an_error(f, args):
    before = [a.clone() for a in args]
    with pytest.raises(functx.TracingError, match="writes to a tensor"):
        jit(f)(*args)
    for a, b in zip(args, before):
        assert_same(a, b)


def test_parts_of_one_memory_that_do_not_overlap_may_be_written():
    kv = torch.zeros(2, 2)
    first, second = kv
    jitted = jit(lambda x: (first.add_(x), second.sum() + first.sum())[1])
    assert_same(jitted(torch.ones(2)), torch.tensor(2.0))
    assert_same(kv, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_a_tensor_that_is_only_read_may_be_given_twice():
    assert_same(jit(lambda a, b: a * b)(X, X), X * X)


# -- optimizers


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_step_of_an_optimizer_is_an_error_that_says_to_call_it_outside(kind):
    p = nn.Parameter(X.clone())
    p.grad = torch.ones_like(p)
    optimizer = kind([p], lr=0.1)
    step = jit(lambda: optimizer.step())
    before = p.detach().clone()
    with pytest.raises(functx.TracingError, match=rf"calls {kind.__name__}\.step\(\).*outside"):
        step()
    assert_same(p.detach(), before)
    assert not optimizer.state
    optimizer.step()
    assert (p < before).all()


def test_reading_grad_is_an_error():
    p = nn.Parameter(X.clone())
    p.grad = torch.ones_like(p)
    with pytest.raises(functx.TracingError, match=r"reads \.grad"):
        jit(lambda: p.detach() - p.grad)()


def test_the_old_weight_norm_is_an_error_that_names_the_new_one():
    with pytest.warns(FutureWarning, match="deprecated"):
        net = nn.utils.weight_norm(nn.Linear(3, 2).double())
    assert_same(jit(net)(X), net(X))  # its hook runs outside of the graph
    with pytest.raises(functx.TracingError, match=r"nn\.utils\.parametrizations"):
        jit(lambda x: net(x))(X)
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).double())
    assert_same(jit(net)(X), net(X))


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


def test_attention_whose_second_derivative_there_is_not_says_to_detach():
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 2, 3, 4)
    attention = torch.nn.functional.scaled_dot_product_attention
    gradient = functx.grad(lambda w: attention(x @ w, x, x).sum())
    with pytest.raises(functx.TracingError, match=r"Detach parameters"):
        jit(gradient)(w)
    torch.testing.assert_close(jit(gradient)(w.detach()), gradient(w).detach())


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
    zero = types.SimpleNamespace(scale=0.0)
    yield "a sign", lambda x: x / zero.scale, set_in(zero, -0.0)
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


def test_a_function_that_is_traced_at_every_call_warns_of_what_changes():
    owner = types.SimpleNamespace(steps=0, scale=2.0)
    jitted = jit(lambda x: x * owner.scale + owner.steps)
    for steps in range(2):
        assert_same(jitted(X), X * 2 + steps)
        owner.steps += 1
    said = r"because steps of SimpleNamespace changes \(0, then 1, then 2\)\. Use a tensor"
    with pytest.warns(RuntimeWarning, match=said):
        assert_same(jitted(X), X * 2 + 2)
    owner.steps += 1
    assert_same(jitted(X), X * 2 + 3)  # and warns no more


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([(numbers(n), 2.0) for n in (3, 4, 5)], r"sizes of the arguments.*dynamic=True"),
        ([(X, k) for k in (2.0, 3.0, 4.0)], r"an argument that is not a tensor changes \(.*4\.0"),
    ],
)
def test_the_third_trace_warns_of_sizes_and_of_arguments(calls, said, monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    jitted = jit(lambda x, k: x * k)
    for x, k in calls[:2]:
        assert_same(jitted(x, k), x * k)
    with pytest.warns(RuntimeWarning, match=said):
        jitted(*calls[2])


def test_training_and_evaluation_with_and_without_gradients_warn_of_nothing():
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
    jitted = jit(lambda x: net(x))
    for x in (numbers(2, 3), numbers(4, 3)):
        for grad in (True, False):
            for training in (True, False):
                net.train(training)
                with torch.set_grad_enabled(grad):
                    jitted(x)


def test_what_no_code_that_runs_names_is_no_part_of_a_signature():
    owner, traced = types.SimpleNamespace(steps=0, scale=2.0), []
    jitted = functx.jit(lambda x: x * owner.scale, backend=lambda m, _: traced.append(m) or m)
    for _ in range(3):
        assert_same(jitted(X), X * 2)
        owner.steps += 1
        owner.log = [owner.steps]
    assert len(traced) == 1


def test_a_logger_is_not_looked_into():
    """It knows all loggers of the process, and notes which levels it has been asked for."""
    logger, traced = logging.getLogger("of a test"), []

    def f(x):
        logger.debug("called")
        return x.sin()

    jitted = functx.jit(f, backend=lambda module, _: traced.append(1) or module)
    for name in "abc":
        assert_same(jitted(X), X.sin())
        logging.getLogger(f"of another test, {name}")
    assert len(traced) == 1


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
        assert len(traced) == 1  # a forward: its own parameters, which require grad, are not read


def test_a_tensor_of_a_module_is_an_input():
    settings, traced = types.ModuleType("settings"), []
    jitted = functx.jit(
        lambda x: x * settings.weight, backend=lambda module, _: traced.append(1) or module
    )
    for start in (0.0, 5.0):
        settings.weight = numbers(3, start=start)
        assert_same(jitted(X), X * settings.weight)
    assert len(traced) == 1


@pytest.mark.filterwarnings("ignore:TF32")  # torch's, of these flags on Intel
def test_a_kernel_that_leaves_its_backward_nothing_is_an_error_with_a_way_out():
    net, x = nn.LSTM(3, 2), X.float()[None]  # oneDNN's, in float32
    jitted = functx.jit(lambda x: net(x)[0].sum(), backend="aot_eager")
    if torch.backends.mkldnn.is_available():
        with pytest.raises(functx.TracingError, match=r"mkldnn\.flags\(enabled=False\)"):
            jitted(x)
    with torch.backends.mkldnn.flags(enabled=False):
        expected = torch.autograd.grad(net(x)[0].sum(), net.weight_ih_l0)
        net = functx.remat(net)
        again = functx.jit(lambda x: net(x)[0].sum(), backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(again(x), net.weight_ih_l0), expected)
