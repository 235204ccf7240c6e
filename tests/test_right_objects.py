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


class Counted:
    __slots__ = ("__runs", "calls")

    def __init__(self):
        self.calls = self.__runs = 0

    def run(self):
        self.__runs += 1
        return self.__runs


class Slotted(Counted):
    """As ``dataclass(slots=True)`` makes them: nothing can know it weakly."""

    __slots__ = ("hidden", "names")


class OfAClass(nn.Module):
    """Counts, and leaves losses, where all of its kind see it."""

    calls = 0
    losses: list = []  # noqa: RUF012
    last: dict = {}  # noqa: RUF012

    def forward(self, x):
        OfAClass.calls += 1
        self.losses.append(x.sin())
        OfAClass.last["x"] = x.cos()
        return (x * 2).sin() * x


class ByItsName:
    losses: list = []  # noqa: RUF012


def by_its_name(x):
    ByItsName.losses.append(x.sin())
    return (x * 3).sin() * x


@pytest.mark.parametrize("policy", [None, functx.checkpoint_policies.everything_saveable])
def test_what_is_in_slots_and_in_classes_changes_once(policy):
    def run(remat):
        slots = Slotted()
        slots.names, OfAClass.calls = "a", 0
        for c in (OfAClass.losses, OfAClass.last, ByItsName.losses):
            c.clear()

        def count(x):
            slots.calls += 1
            slots.names += "b"
            return x.sin() * x.exp() * slots.run()

        x = X.clone().requires_grad_()
        module, found = OfAClass(), []
        for _ in range(2):
            y = sum(remat(f)(x).sum() for f in (count, module, by_its_name))
            for _ in range(2):
                found += torch.autograd.grad(y, x, retain_graph=True)
        left = OfAClass.losses[-1] + OfAClass.last["x"] + ByItsName.losses[0]
        found += torch.autograd.grad(left.sum(), x)
        lengths = len(OfAClass.losses), len(ByItsName.losses)
        return found, slots.calls, slots.names, OfAClass.calls, lengths

    ours = run(lambda f: functx.remat(f, policy=policy))
    expected = run(lambda f: f)
    assert_same(ours[0], expected[0])
    assert ours[1:] == expected[1:] == (2, "abb", 2, (2, 2))


def test_what_classes_hold_can_be_freed():
    OfAClass.losses.clear()
    OfAClass.last.clear()
    x = X.clone().requires_grad_()
    y = functx.remat(OfAClass())(x).sum()
    y.backward()
    gone = [weakref.ref(t) for t in (OfAClass.losses[0], OfAClass.last["x"], x)]
    OfAClass.losses.clear()
    OfAClass.last.clear()
    del x, y
    gc.collect()
    assert not any(ref() is not None for ref in gone)


@pytest.mark.parametrize("length", [10, 10_000])
def test_a_log_changes_once_however_long_it_is(length):
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = [0.0] * length

        def forward(self, x):
            self.log.append(x.sin().sum())
            return (x * 2).sin() * x

    def run(remat):
        module, x = Logs(), X.clone().requires_grad_()
        for _ in range(3):
            y = remat(module)(x).sum()
            torch.autograd.grad(y, x, retain_graph=True)
            found = torch.autograd.grad(y + module.log[-1], x)
        return found, len(module.log), [float(torch.as_tensor(v).detach()) for v in module.log[-3:]]

    ours, expected = run(functx.remat), run(lambda f: f)
    assert_same(ours[0], expected[0])
    assert ours[1:] == expected[1:]


def test_what_is_reached_costs_no_more_than_a_few_thousand_entries(monkeypatch):
    """Data that a function closes over is not copied at each call."""
    from functx._remat import _module_state

    copied = []
    copy = _module_state.copy_of
    monkeypatch.setattr(_module_state, "copy_of", lambda c: copied.append(len(c)) or copy(c))
    tables = [dict.fromkeys(range(4000)) for _ in range(100)]
    functx.remat(lambda x: x.sin() * len(tables))(X.clone().requires_grad_()).sum().backward()
    assert 0 < sum(copied) <= _module_state._MANY


def test_many_objects_count_once():
    class One:
        def __init__(self):
            self.n, self.seen = 0, []

    ones = [One() for _ in range(250)]

    def f(x):
        for one in ones:
            one.n += 1
            one.seen.append(one.n)
        return x.sin() * x

    x = X.clone().requires_grad_()
    functx.remat(f)(x).sum().backward()
    assert {(one.n, len(one.seen)) for one in ones} == {(1, 1)}
