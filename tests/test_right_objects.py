"""What a region changes in objects, lists, dicts and globals it changes once, as without remat."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from right import X
from torch import nn

import functx


class Recurrent:
    """Counts, logs, and keeps a tensor from call to call."""

    def __init__(self):
        self.hidden = torch.zeros(4, dtype=X.dtype)
        self.calls = 0
        self.log = []
        self.statistics = {"n": 0}

    def __call__(self, x):
        self.calls += 1
        self.hidden = torch.tanh(x + self.hidden)
        self.log.append(self.calls)
        self.statistics["n"] += len(self.log)
        return self.hidden.sin() * self.statistics["n"]

    def step(self, x):
        return self(x)

    def state(self):
        return [self.hidden, torch.tensor([self.calls, *self.log, self.statistics["n"]])]


class Module(nn.Module):
    """Holds one of those, and containers of its own."""

    def __init__(self):
        super().__init__()
        self.inner = Recurrent()
        self.tables = {}

    def forward(self, x):
        n = x.shape[-1]
        if n not in self.tables:
            self.tables[n] = torch.arange(n).to(x.dtype).cos()
        return self.inner(x * self.tables[n])


RECURRENT = Recurrent()
LOG: list = []
COUNT = 0
STATE = X


def _of_globals(x):
    global COUNT, STATE
    COUNT += 1
    STATE = torch.tanh(x * STATE)
    LOG.append(STATE.exp())
    return STATE * COUNT + RECURRENT(x)


def globals_(remat):
    global RECURRENT, COUNT, STATE
    RECURRENT, COUNT, STATE = Recurrent(), 0, X
    LOG.clear()
    return remat(lambda x: _of_globals(x)), lambda: [
        *RECURRENT.state(),
        STATE,
        *LOG,
        torch.tensor(COUNT),
    ]


def object_(remat):
    r = Recurrent()
    return remat(r), r.state


def method(remat):
    r = Recurrent()
    return remat(r.step), r.state


def closed_over(remat):
    r = SimpleNamespace(parts=[{"r": Recurrent()}])
    return remat(lambda x: r.parts[0]["r"](x)), r.parts[0]["r"].state


def argument(remat):
    r = Recurrent()
    f = remat(lambda x, r: r(x))
    return lambda x: f(x, r), r.state


def module(remat):
    m = Module()
    return remat(m), m.inner.state


def function_that_calls_a_module(remat):
    m = Module()
    return remat(lambda x: m(x)), m.inner.state


def cells(remat):
    hidden, state = [X], {"h": X, "n": 0}

    def f(x):
        hidden[0] = torch.tanh(x * hidden[0])
        state["n"] += 1
        state["h"] = hidden[0] * state["h"] * state["n"]
        return state["h"].sin()

    return remat(f), lambda: [*hidden, state["h"], torch.tensor(state["n"])]


def popped(remat):
    values = [X * i for i in range(1, 9)]
    return remat(lambda x: x * values.pop() * len(values)), lambda: values


PROGRAMS = (
    *(globals_, object_, method, closed_over, argument, module, cells, popped),
    function_that_calls_a_module,
)


def train(program, remat):
    """Two calls, a backward through what is left behind too, and a further call."""
    f, state = program(remat)
    x = X.clone().requires_grad_()
    y = f(f(x)) + f(x)
    left = [t for t in state() if t.requires_grad]
    (gradient,) = torch.autograd.grad(sum(t.cos().sum() for t in (y, *left)), x)
    after = [t.detach().clone() for t in state()]
    return [y, *after, f(x)], [gradient]


class TestCountedOnce:
    """Values, gradients, and what is there after the backward."""

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize("nested", [False, True])
    def test_state(self, program, nested):
        def twice(f):
            inner = functx.remat(f)
            return functx.remat(lambda *args: inner(*args))

        actual = train(program, twice if nested else functx.remat)
        expected = train(program, identity)
        assert_same(actual[0], expected[0])
        assert_same(actual[1], expected[1], 8.0)

    @pytest.mark.parametrize("program", [object_, module, globals_])
    def test_under_transforms(self, program):
        found = []
        for remat in (identity, functx.remat):
            f, state = program(remat)
            gradient = functx.grad(lambda x: f(f(x)).sum())  # noqa: B023
            detached = [t for t in state() if not t.is_floating_point()]
            found.append([gradient(X), *detached])
        assert_same(found[1][0], found[0][0], 8.0)
        assert_same(found[1][1:], found[0][1:])

    def test_a_list_of_no_tensors_says_how_often_it_ran(self):
        runs = []

        def f(x):
            runs.append(1)
            return x.sin()

        x = X.clone().requires_grad_()
        functx.remat(f)(x).sum().backward()
        assert len(runs) == 2
        with pytest.raises(functx.ReplayError, match=r"called with \[3\]"):
            functx.remat(lambda x: (runs.append(1), x * len(runs))[1])(x).sum().backward()

    def test_what_the_user_changes_in_between_stays(self):
        r = Recurrent()
        x = X.clone().requires_grad_()
        y = functx.remat(r)(x)
        r.log.append("mine")
        r.statistics["mine"] = 1
        r.mine = True
        y.sum().backward()
        assert r.log == [1, "mine"]
        assert r.statistics == {"n": 1, "mine": 1}
        assert (r.calls, r.mine) == (1, True)


class TestSettings:
    """A region may leave settings changed; its replay may not."""

    @pytest.mark.parametrize(
        ("write", "read", "values"),
        [
            (
                torch.set_default_dtype,
                torch.get_default_dtype,
                (torch.float32, torch.float64),
            ),
            (
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled,
                (False, True),
            ),
            (
                lambda on: torch.set_autocast_enabled("cpu", on),
                lambda: torch.is_autocast_enabled("cpu"),
                (False, True),
            ),
        ],
    )
    def test_left_changed(self, write, read, values):
        def f(x):
            write(values[1])
            return x.sin()

        x = X.clone().requires_grad_()
        try:
            y = functx.remat(f)(x)
            assert read() == values[1]
            write(values[0])
            y.sum().backward()
            assert read() == values[0]
        finally:
            write(values[0])


class TestNothingIsKept:
    """What is known of a container makes no cycle with what is in it."""

    @pytest.mark.parametrize("kind", ["cell", "global", "object"])
    def test_results_in_lists(self, kind):
        global LOG
        LOG = own = []
        owner = SimpleNamespace(log=own)
        f = {
            "cell": lambda x, _: (own.append(x.sin()), x.cos())[1],
            "global": lambda x, _: (LOG.append(x.sin()), x.cos())[1],
            "object": lambda x, owner: (owner.log.append(x.sin()), x.cos())[1],
        }[kind]
        gc.collect()
        gc.disable()
        try:
            y = functx.remat(f)(numbers(4).requires_grad_(), owner)
            left = weakref.ref(own[0])
            del y
            own.clear()
            LOG = []
            assert left() is None
        finally:
            gc.enable()
