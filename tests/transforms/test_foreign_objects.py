"""Objects that are not functx's, as arguments, closed over, or in a module.

The kind: functx walks arguments, closures, modules and the arguments of operators, and meets
objects of classes that it does not know. These classes may override every method that a walk would
call, so that the call raises, loads a file, or changes something: containers derived from tuple,
list, dict and set, lazy modules, proxies with the ``__class__`` of another object, objects without
hash or with an ``__eq__`` that raises, tuples with a constructor of their own. functx neither calls
their methods nor changes them, and it computes what torch computes in the presence of such objects.
"""

import collections
import dataclasses
import importlib.util
import types

import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn

import functx
import functx.memory
from functx import per_sample

X = numbers(3)
called = []


def refusing(name):
    def method(self, *args, **kwargs):
        called.append(name)
        raise RuntimeError(f"{name} of a foreign object was called")

    return method


_NAMES = "len", "iter", "getitem", "contains", "eq", "hash", "bool", "repr"
OVERRIDDEN = [f"__{name}__" for name in _NAMES]
OF_DICTS = ["values", "items", "keys", "get", "copy"]


def derived(base, *names):
    methods = {name: refusing(name) for name in (*OVERRIDDEN, *names)}
    return type(f"Lazy{base.__name__}", (base,), methods)


Irreps, Layers = derived(tuple), derived(list)
Files, Ordered = derived(dict, *OF_DICTS), derived(collections.OrderedDict, *OF_DICTS)
Names, Fixed = derived(set), derived(frozenset)


class Proxy:
    """Says that it is of another class, as those of werkzeug and of mocks do."""

    __class__ = property(lambda self: list)


class Config(dict):
    """Its keys are its attributes, too."""

    def __init__(self, **values):
        super().__init__(**values)
        self.__dict__ = self


class Strange:
    def __init__(self):
        self.__dict__ = Files(a=1)


# No container that jit knows, so that it has to have a hash as an argument of jit.
WITHOUT_HASH = Strange, Proxy, collections.UserDict, types.MappingProxyType
FOREIGN = {
    "tuple": lambda: tuple.__new__(Irreps, (1, X)),
    "list": lambda: Layers([1, X]),
    "dict": lambda: Files(a=1, b=X),
    "ordered dict": Ordered,
    "set": Names,
    "frozenset": lambda: frozenset.__new__(Fixed, (1,)),
    "in a list": lambda: [Irreps(), {"files": Files(a=1)}],
    "attributes of a dict": Strange,
    "attributes are items": lambda: Config(a=1, b=[2]),
    "proxy": Proxy,
    "user's dict": lambda: collections.UserDict(a=1),
    "default dict": lambda: collections.defaultdict(list, a=1),
    "read-only": lambda: types.MappingProxyType(Files(a=1)),
    "named result": lambda: torch.max(torch.ones(2, 3), 1),
}


class Holder(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.weight, self.held = nn.Parameter(numbers(3, start=2.0)), held

    def forward(self, x, *others):
        return (x * self.weight).sin().sum()


class Callable:
    def __init__(self, held):
        self.held = held

    def __call__(self, x, *others):
        return x.sin().sum()


def functions(held):
    """Functions that have ``held``, and the further arguments that they are called with."""
    first, *_ = held

    def closure(x):
        return (first, held) if x is None else x.sin().sum()

    def default(x, held=held):
        return x.sin().sum()

    arguments = [one for one in held if type(one) not in WITHOUT_HASH]
    return [
        *((closure, ()), (default, ()), (Holder(held), ()), (Callable(held), ())),
        *((Callable(0), arguments), (Callable(0), [arguments])),
    ]


def required():
    return X.clone().requires_grad_()


USES = {
    "profile": lambda f, *o: functx.memory.profile(f, X, *o),
    "saved_residuals": lambda f, *o: str(functx.saved_residuals(f, required(), *o)),
    "plan": lambda f, *o: functx.plan(f, required(), *o, budget=1.0),
    "remat": lambda f, *o: [functx.remat(f)(required(), *o).backward() for _ in range(3)],
    "budget": lambda f, *o: functx.remat(f, budget=1.0)(required(), *o).backward(),
    "checkpoint": lambda f, *o: functx.checkpoint(f, required(), *o, use_reentrant=False),
    "grad": lambda f, *o: functx.grad(functx.remat(f))(X, *o),
    "vjp": lambda f, *o: functx.vjp(lambda x: f(x, *o), X)[1](X.new_ones(())),
    "jvp": lambda f, *o: functx.jvp(lambda x: f(x, *o), (X,), (X,)),
    "jacobians": lambda f, *o: functx.jacfwd(functx.jacrev(f))(X, *o),
    "vmap": lambda f, *o: functx.vmap(functx.grad(f), (0, *[None] * len(o)))(X[None], *o),
    "jit": lambda f, *o: [functx.jit(f, backend="eager")(X, *o) for _ in range(2)],
    "jit of a region": lambda f, *o: functx.jit(functx.grad(functx.remat(f)), backend="eager")(
        X, *o
    ),
    "per_sample": lambda f, *o: per_sample.norms(
        lambda w, x, *o: f(w * x, *o), in_dims=(None, 0, *[None] * len(o)), budget=1.0
    )(X, X[None], *o),
}


@pytest.mark.parametrize("use", USES)
def test_a_foreign_object_is_neither_called_nor_changed(use):
    held = [make() for make in FOREIGN.values()]
    for f, others in functions(held):
        called.clear()
        USES[use](f, *others)
        assert not called
    assert next(one for one in held if type(one) is collections.defaultdict) == {"a": 1}


@pytest.mark.parametrize("use", USES)
def test_a_lazy_module_is_not_loaded(use):
    spec = importlib.util.find_spec("this")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def f(x):
        return module.text if x is None else x.sin().sum()

    USES[use](f)
    assert object.__getattribute__(module, "__class__").__name__ == "_LazyModule"


class WithoutHash:
    __hash__ = refusing("__hash__")


class Incomparable:
    __eq__ = refusing("__eq__")

    def __hash__(self):
        return 1


class Frame:
    """Compares as those of pandas do: to something that has no truth value."""

    __hash__ = None

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("The truth value is ambiguous")


@pytest.mark.parametrize("kind", [WithoutHash, Incomparable, Frame])
def test_a_region_closes_over_what_has_no_hash_or_can_not_be_compared(kind):
    for _ in range(3):
        held, x = kind(), required()
        functx.remat(lambda x, held=held: x.sin().sum())(x).backward()
        assert_same(x.grad, X.cos())
        of_region = functx.remat(lambda x, held=held: x.cos().sum())
        assert_same(functx.grad(of_region)(X), -X.sin())


@pytest.mark.parametrize("kind", [WithoutHash, Incomparable, Frame, collections.UserDict])
def test_jit_asks_for_no_hash_and_compares_no_argument(kind):
    jitted, held = functx.jit(lambda x, held: x.sum(), backend="eager"), kind()
    for _ in range(3):
        assert_same(jitted(X, held), X.sum())


def test_jit_sees_what_is_in_a_container_of_a_class_of_its_own():
    class Factors(list):
        __iter__ = refusing("__iter__")

    factors = Factors([2.0])
    factors.power = 1.0
    f = functx.jit(lambda x, by: x * list.__getitem__(by, 0), backend="eager")
    g = functx.jit(lambda x: x * list.__getitem__(factors, 0) ** factors.power, backend="eager")
    assert_same(f(X, factors), X * 2)
    assert_same(g(X), X * 2)
    factors[0] = 3.0
    assert_same(f(X, factors), X * 3)
    assert_same(g(X), X * 3)
    factors.power = 2.0
    assert_same(g(X), X * 9)


class Pair(tuple):
    def __new__(cls, one, other):
        return tuple.__new__(cls, (one, other))


class Twice(collections.namedtuple("Of", "one other")):
    def __new__(cls, one):
        return super().__new__(cls, one, one)


SEQUENCES = {
    "a constructor of its own": Pair,
    "a named tuple's": lambda *two: tuple.__new__(Twice, two),
    "no length": lambda *two: tuple.__new__(Irreps, two),
    "a list's": lambda *two: Layers(two),
}


@pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES)
def test_an_operator_in_a_region_takes_a_sequence_of_any_class(make):
    """Regions put other tensors into what operators are given."""
    w = numbers(3, start=2.0).requires_grad_()
    outside = w.sin()

    def f(x):
        largest = torch.max(torch.stack(make(x * w, outside)), 0)
        assert type(largest) is torch.return_types.max
        return torch.cat(make(x.sin(), outside)).square().sum() + largest.values.sum()

    for region in (functx.remat(f), functx.remat(f)):  # the second one follows the first one
        x, plain = required(), required()
        found = torch.autograd.grad(region(x), (x, w), retain_graph=True)
        assert_same(found, torch.autograd.grad(f(plain), (plain, w), retain_graph=True))
    of_functx = functx.vmap(functx.grad(functx.remat(f)))(X[None])
    assert_same(of_functx, torch.func.vmap(torch.func.grad(f))(X[None]))


def test_an_error_names_the_class_of_what_has_no_repr():
    with pytest.raises(RuntimeError, match="an object of type Lazyset"):
        functx.grad(lambda x: x)(Names())


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


HOLDING = {
    "dict": lambda: Files(x=X),
    "tuple": lambda: tuple.__new__(Irreps, (X,)),
    "slots": lambda: Slotted(X),
    "user's dict": lambda: collections.UserDict(x=X),
    "read-only": lambda: types.MappingProxyType({"x": X}),
}


@pytest.mark.parametrize("make", HOLDING.values(), ids=HOLDING)
def test_an_object_that_holds_tensors_is_not_shared_by_mistake(make):
    called.clear()
    f = per_sample.grads(lambda w, held, x: (w * x).sum())
    with pytest.raises(ValueError, match=r"is not a pytree. Pass a dict"):
        f(X, make(), numbers(3, 3))
    assert not called


def test_a_mapping_that_loads_its_values_is_shared_without_loading_them():
    class Loader(collections.abc.Mapping):
        __getitem__, __iter__, __len__ = map(refusing, ("__getitem__", "__iter__", "__len__"))

    called.clear()
    f = per_sample.grads(lambda w, loader, x: (w * x).sum())
    assert_same(f(X, Loader(), numbers(3, 3)), numbers(3, 3))
    assert not called
