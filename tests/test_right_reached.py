"""What a region reaches in unusual ways: state of modules, how much is looked at."""

import collections
import functools
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from stateful import Named, State, of_two_steps

import functx
from functx._remat import _whose, _within_reach


def module_named(name, text="", file=None):
    """A module of the user's that can be imported."""
    module = types.ModuleType(name)
    if file is not None:
        module.__file__ = file
    exec(text, module.__dict__)
    return module


@pytest.fixture
def settings(monkeypatch):
    module = module_named("functx_tests_settings")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(globals(), "settings_of_tests", module)
    return module


def by_name(m):
    def f(x):
        settings_of_tests.ema = settings_of_tests.ema + 1  # noqa: F821
        return x * settings_of_tests.ema  # noqa: F821

    return f


def by_closure(m):
    def f(x):
        m.ema = m.ema + 1
        return x * m.ema

    return f


def by_attribute(m):
    owner = State()
    owner.m = m

    def f(x):
        owner.m.ema = owner.m.ema + 1
        return x * owner.m.ema

    return f


def by_setattr(m):
    name = "".join(("e", "ma"))

    def f(x):
        setattr(m, name, getattr(m, name) + 1)
        return x * getattr(m, name)

    return f


def by_import(m):
    def f(x):
        import functx_tests_settings

        functx_tests_settings.ema = functx_tests_settings.ema + 1
        return x * functx_tests_settings.ema

    return f


def of_function(m):
    exec("def step(x):\n    global ema\n    ema = ema + 1\n    return x * ema", m.__dict__)
    return lambda x: m.step(x)


@pytest.mark.parametrize(
    "build", [by_name, by_closure, by_attribute, by_setattr, by_import, of_function]
)
def test_attributes_of_modules_are_changed_once(settings, build):
    for wrap in (lambda f: f, functx.remat):
        settings.ema = torch.zeros(())
        assert of_two_steps(wrap(build(settings))) == [3, 7]


def test_attributes_of_modules_that_a_region_makes(settings):
    def f(x):
        if not hasattr(settings_of_tests, "made"):  # noqa: F821
            settings_of_tests.made = torch.zeros(())  # noqa: F821
        settings_of_tests.made = settings_of_tests.made + 1  # noqa: F821
        return x * settings_of_tests.made  # noqa: F821

    for wrap in (lambda f: f, functx.remat):
        settings.__dict__.pop("made", None)
        assert of_two_steps(wrap(f)) == [3, 7]
        assert settings.made == 4


@pytest.mark.parametrize("name", ["trace", "code", "statistics"])
def test_a_package_called_as_one_of_python(monkeypatch, tmp_path, name):
    package = module_named(name, file=str(tmp_path / name / "__init__.py"))
    text = (
        "class State: pass\nSTATE = State()\n"
        "def helper(x):\n    STATE.ema = STATE.ema + 1\n    return x * STATE.ema"
    )
    model = module_named(f"{name}.model", text, str(tmp_path / name / "model.py"))
    model.__dict__["State"].__module__ = f"{name}.model"
    for module in (package, model):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    kept = dict(_whose.NOT_THE_USERS)
    _whose.NOT_THE_USERS.clear()
    try:
        helper = model.helper
        for wrap in (lambda f: f, functx.remat):
            model.STATE.ema = torch.zeros(())
            assert of_two_steps(wrap(lambda x: helper(x))) == [3, 7]
    finally:
        _whose.NOT_THE_USERS.clear()
        _whose.NOT_THE_USERS.update(kept)


def test_python_is_nobodys_project():
    for name in ("sys", "os", "functools", "unittest.mock", "importlib._bootstrap", "builtins"):
        assert _whose.NOT_THE_USERS[name], name
    for name in ("collections", "types", "__main__", "functx_tests", None):
        assert not _whose.NOT_THE_USERS[name], name


STATE = Named()


@functools.wraps(F.relu)
def relu(x):
    STATE.ema = STATE.ema + 1
    return F.relu(x) * STATE.ema


@torch.no_grad()
def count():
    STATE.ema = STATE.ema + 1
    return STATE.ema


def test_functions_that_say_they_are_of_torch(monkeypatch):
    for wrap in (lambda f: f, functx.remat):
        monkeypatch.setattr(STATE, "ema", torch.zeros(()))
        assert of_two_steps(wrap(lambda x: relu(x))) == [3, 7]


def test_functions_that_torch_has_wrapped(monkeypatch):
    """Only the function inside names what it changes."""
    for wrap in (lambda f: f, functx.remat):
        monkeypatch.setattr(STATE, "ema", torch.zeros(()))
        assert of_two_steps(wrap(lambda x: x * count())) == [3, 7]


def on_a_layer():
    layer = torch.nn.Linear(2, 2)
    layer.state = State()
    return layer, lambda: layer.state


def on_a_layer_that_had_none():
    """Others of the class were seen with as many attributes, and then without."""
    for value in (None, 3):
        other = torch.nn.Linear(2, 2)
        other.state = value
        functx.remat(lambda x, other=other: (other, x.sin())[1])(torch.ones(1, requires_grad=True))
    return on_a_layer()


def in_a_named_tuple():
    one = collections.namedtuple("One", "state")(State())
    return one, lambda: one.state


def in_a_tuple_of_ones_own():
    class Pair(tuple):
        __slots__ = ()

    one = Pair((State(), 1))
    return one, lambda: one[0]


def in_a_frozenset():
    one = frozenset([State()])
    return one, lambda: next(iter(one))


def in_a_mapping():
    one = types.MappingProxyType({"state": State()})
    return one, lambda: one["state"]


def in_a_class():
    class Holder:
        state = State()

    return Holder, lambda: Holder.state


def by_a_reference():
    one = State()
    known = weakref.ref(one)
    return one, lambda: known()


def by_a_proxy():
    one = State()
    known = weakref.proxy(one)
    return one, lambda: known


HOLDERS = [
    *(on_a_layer, on_a_layer_that_had_none, in_a_named_tuple, in_a_tuple_of_ones_own),
    *(in_a_frozenset, in_a_mapping, in_a_class, by_a_reference, by_a_proxy),
]


@pytest.mark.parametrize("build", HOLDERS)
def test_where_state_is_held(build):
    for wrap in (lambda f: f, functx.remat):
        holder, state = build()
        state().ema = torch.zeros(())

        def f(x, state=state):
            s = state()
            s.ema = s.ema + 1
            return x * s.ema

        assert of_two_steps(wrap(f)) == [3, 7]
        del holder


def test_a_class_attribute_that_is_bound_to_another_object():
    class Holder:
        state = Named()

    def f(x):
        new = Named()
        new.ema = Holder.state.ema + 1
        Holder.state = new
        return x * Holder.state.ema

    for wrap in (lambda f: f, functx.remat):
        Holder.state = Named()
        assert of_two_steps(wrap(f)) == [3, 7]


def test_a_list_by_its_method():
    for wrap in (lambda f: f, functx.remat):
        held = []
        append = held.append
        owner = State()
        owner.held = held

        def f(x, append=append):
            append(x.detach() * 1)
            return x * 2

        assert of_two_steps(wrap(f)) == [4, 4]
        assert len(held) == 4
    assert any(c is held for c in _within_reach.reach(lambda: append, []).containers)


def in_a_dict(append):
    held = {"log": append, "other": torch.sin}
    return lambda x: (held["log"](x.detach() * 1), x * 2)[1]


def in_nested_containers(append):
    held = [(append, torch.sin), {}]
    return lambda x: (held[0][0](x.detach() * 1), x * 2)[1]


def by_a_partial(append):
    return functools.partial(lambda log, x: (log(x.detach() * 1), x * 2)[1], append)


def by_a_partial_in_a_list(append):
    held = [functools.partial(append)]
    return lambda x: (held[0](x.detach() * 1), x * 2)[1]


@pytest.mark.parametrize(
    "build", [in_a_dict, in_nested_containers, by_a_partial, by_a_partial_in_a_list]
)
@pytest.mark.parametrize("container", [list, collections.deque, set])
@pytest.mark.usefixtures("forgotten")
def test_a_container_by_a_method_that_is_held(build, container):
    for wrap in (lambda f: f, functx.remat):
        held = container()
        add = getattr(held, "append", None) or held.add
        assert of_two_steps(wrap(build(add))) == [4, 4]
        assert len(held) == 4


@pytest.mark.parametrize("keywords", [True, False])
@pytest.mark.usefixtures("forgotten")
def test_a_list_by_a_method_that_is_an_argument(keywords):
    def f(x, log):
        log(x.detach() * 1)
        return x * 2

    for g in (f, functx.remat(f)):
        held = []

        def step(x, g=g, append=held.append):
            return g(x, log=append) if keywords else g(x, append)

        assert of_two_steps(step) == [4, 4]
        assert len(held) == 4


def tree(depth):
    return {} if depth == 0 else {letter: tree(depth - 1) for letter in "abcdefgh"}


class Link:
    __slots__ = ("next", "value")

    def __init__(self, after):
        self.next, self.value = after, [1]


def chain(n):
    last = None
    for _ in range(n):
        last = Link(last)
    return last


def test_so_many_things_are_looked_at():
    """The nearest first; and what is not looked into costs next to nothing."""
    records = [[{"at": [i], "of": {"id": i}} for i in range(1000)] for _ in range(20)]
    for many in (records, tree(5)):
        near = [Named() for _ in range(50)]
        for f in (lambda a=near, b=many: 0, lambda a=many, b=near: 0):
            reached = _within_reach.reach(f, [])
            assert any(o is near[0] for o in reached.objects)
            assert 1000 < len(reached.containers) <= 8194
    first = chain(5000)
    links = _within_reach.reach(lambda: first, [])
    assert 1000 < len(links.attributes) <= 1026


def test_a_layer_of_torch_is_looked_at_once(monkeypatch):
    layers = torch.nn.Sequential(*(torch.nn.LayerNorm(3) for _ in range(9)), torch.nn.Linear(2, 2))
    looked = []
    look = _within_reach._module
    monkeypatch.setattr(
        _within_reach, "_module", lambda m, *rest: looked.append(m) or look(m, *rest)
    )
    _within_reach.reach(lambda: layers, [])
    looked.clear()
    _within_reach.reach(lambda: layers, [])
    assert looked == []
