"""Objects that raise when they are looked at, or give others at each look, beside a region."""

import importlib.util
import sys
import types
import weakref
from unittest import mock

import pytest
import torch
from stateful import Named, State, of_two_steps

import functx
from functx._remat import _whose, _within_reach


class Child(torch.nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.parent = weakref.proxy(parent)
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        self.parent.calls += 1
        return self.layer(x) * self.parent.calls


class Parent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.child = Child(self)

    def forward(self, x):
        return self.child(x)


def test_a_child_that_knows_its_parent():
    torch.manual_seed(0)
    parent = Parent()
    gradients = []
    for wrap in (lambda f: f, functx.remat):
        parent.calls = 0
        gradients.append(of_two_steps(wrap(lambda x: parent(x))))
        assert parent.calls == 4
    assert gradients[0] == gradients[1]


def a_dead_proxy():
    gone = State()
    return [weakref.proxy(gone), 1]


def a_module_whose_parent_has_gone():
    return Parent().child


def a_module_that_has_not_begun():
    return torch.nn.Linear.__new__(torch.nn.Linear)


def a_module_without_a_hash():
    class Equal(torch.nn.Module):
        def __eq__(self, other):
            return self is other

    return torch.nn.Sequential(Equal())


def of_no_module():
    return type("C", (), {"__module__": None})()


def of_a_property():
    return type("C", (), {"__module__": property(lambda self: "zzz")})()


def whose_dict_raises():
    def raises(self):
        raise RuntimeError("no")

    return type("C", (), {"__dict__": property(raises)})()


def whose_dict_is_none():
    return type("C", (), {"__dict__": 5})()


def whose_class_raises():
    def raises(self):
        raise RuntimeError("no")

    return type("C", (), {"__class__": property(raises)})()


def that_says_it_is_a_module():
    return type("C", (), {"__class__": property(lambda self: torch.nn.Linear)})()


def that_says_it_is_a_dict():
    return type("C", (), {"__class__": property(lambda self: dict)})()


def whose_metaclass_raises():
    class Meta(type):
        def __getattribute__(cls, name):
            if name in ("__module__", "__mro__", "__dict__", "__slots__"):
                raise RuntimeError(name)
            return type.__getattribute__(cls, name)

    class C(metaclass=Meta):
        table = ([1],)

    one = C()
    one.value = [1]
    return one


def whose_values_raise():
    class C(dict):
        def values(self):
            raise RuntimeError("no")

    return C(a=[1])


def whose_length_raises():
    class C(list):
        def __len__(self):
            raise RuntimeError("no")

    return C([[1]])


def a_mock():
    return mock.MagicMock()


def a_mock_of_a_module():
    return mock.Mock(spec=torch.nn.Linear(2, 2))


def a_module_without_a_name():
    module = types.ModuleType("functx_tests_nameless")
    del module.__name__
    return module


ODD = [
    *(a_dead_proxy, a_module_whose_parent_has_gone, a_module_that_has_not_begun),
    *(a_module_without_a_hash, of_no_module, of_a_property, whose_dict_raises),
    *(whose_dict_is_none, whose_class_raises, that_says_it_is_a_module, that_says_it_is_a_dict),
    *(whose_metaclass_raises, whose_values_raise, whose_length_raises, a_mock),
    *(a_mock_of_a_module, a_module_without_a_name),
]


@pytest.mark.parametrize("build", ODD)
@pytest.mark.parametrize("held", [False, True])
def test_what_raises_when_it_is_looked_at_leads_nowhere(build, held):
    one, beside = build(), Named()
    owner = State()
    owner.one = one
    owner.beside = beside

    def f(x):
        _ = owner if held else one
        beside.ema = beside.ema + 1
        return x * beside.ema

    assert of_two_steps(functx.remat(f)) == [3, 7]


def test_a_module_that_is_loaded_when_it_is_used(tmp_path, monkeypatch):
    path = tmp_path / "functx_tests_lazy.py"
    path.write_text("raise RuntimeError('loaded')\n")
    spec = importlib.util.spec_from_file_location("functx_tests_lazy", path)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(globals(), "lazy_of_tests", module)

    def f(x):
        return x.sin() if x is not None else lazy_of_tests.sin(x)  # noqa: F821

    assert of_two_steps(functx.remat(f)) == of_two_steps(f)
    assert type(module) is not types.ModuleType


def lazy_slot():
    class Base:
        __slots__ = ("next",)

    class Lazy(Base):
        __slots__ = ()
        next = property(lambda self: Lazy())

    return Lazy()


def lazy_dict():
    class Lazy(dict):
        __slots__ = ()

        def values(self):
            return [Lazy(a=1)]

    return Lazy(a=1)


def lazy_list():
    class Lazy(list):
        __slots__ = ()

        def __iter__(self):
            yield Lazy([1])

    return Lazy([1])


def lazy_attributes():
    class Lazy:
        @property
        def __dict__(self):
            return {"next": Lazy()}

    return Lazy()


@pytest.mark.parametrize("build", [lazy_slot, lazy_dict, lazy_list, lazy_attributes])
def test_nothing_made_anew_at_each_look_is_followed(monkeypatch, build):
    """It would be followed for ever."""
    one = build()
    looks = []
    module_of_class = _whose.module_of_class

    def counted(cls):
        looks.append(cls)
        assert len(looks) < 100
        return module_of_class(cls)

    monkeypatch.setattr(_within_reach, "module_of_class", counted)
    reached = _within_reach.reach(lambda: one, [])
    assert len(reached.objects) <= 1
    assert len(reached.containers) == 0


def of_keys(state):
    held = weakref.WeakKeyDictionary()
    held[state] = torch.zeros(())

    def advance():
        held[state] = held[state] + 1
        return held[state]

    return advance


def of_values(state):
    held = weakref.WeakValueDictionary()
    held["state"] = state
    state.n = torch.zeros(())

    def advance():
        held["state"].n = held["state"].n + 1
        return held["state"].n

    return advance


def of_a_set(state):
    held, others = weakref.WeakSet([state]), [State() for _ in range(4)]
    owner = State()
    owner.held = held

    def advance():
        owner.held.add(others[len(owner.held) - 1])
        return len(owner.held) - 1

    return advance


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("build", [of_keys, of_values, of_a_set])
def test_containers_of_weak_references(build):
    for wrap in (lambda f: f, functx.remat):
        state = State()
        advance = build(state)
        assert of_two_steps(wrap(lambda x, advance=advance: x * advance())) == [3, 7]
