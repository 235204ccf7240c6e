"""Finds the state that a function reads in addition to its arguments, by one search (J2, J3).

A search is slow, so it runs only when a graph is made, or when an object that a graph depends on
has been replaced. It leaves flat lists. *Slots* are places that hold tensors. *Guards* are places
that hold anything else, together with the value. `functx._compile.guards` checks both at each call.

The search follows cells of functions, globals that their code names, defaults, partials, methods,
classes and modules as far as code names their attributes, attributes of objects (and their
``__slots__``), and dict, list, tuple, set and deque. It never runs user code, which could have
effects: it reads containers with the methods of their built-in base class, and objects by their
``__dict__`` and the descriptors of ``__slots__``. It does not look into the code of torch, NumPy
and the standard library. Everything that it does not reach is a constant of the graph (J3).

With a `Ran`, the code that has run in a trace, the search follows only names in that code. Without
one it follows names in all functions in reach: before a trace it is not known which of them run.
"""

from __future__ import annotations

import argparse
import array
import builtins
import collections
import contextvars
import enum
import functools
import gc
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from logging import Logger
from typing import Any

import torch
from torch import Tensor, nn

from functx._compile.running import (
    Ran,
    globals_in,
    imports_in,
    is_library,
    is_library_class,
    is_library_file,
    is_of_package,
    names_in,
    with_inner,
)
from functx._core import PLAIN as _VALUES
from functx._core import attributes

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
PLAIN = frozenset(
    {*_VALUES, type(Ellipsis), type(NotImplemented), range, torch.layout, torch.memory_format}
)
_FLOATS = {float, complex}
_BUILTINS = vars(builtins).keys()
CACHE: Any = type(functools.lru_cache(len))  # the class of functions with a cache
_ORDERED: Any = collections.OrderedDict()
_DICTS: Any = ({}, _ORDERED)
_VIEWS: Any = [view for d in _DICTS for view in (d.keys(), d.values(), d.items())]
_HOLDERS = (types.SimpleNamespace, argparse.Namespace)  # library classes with user attributes
_SMALL_ARRAY = 1 << 16  # bytes; larger arrays are compared by identity
EXACT = {dict, collections.OrderedDict, list, tuple, collections.deque, types.MappingProxyType}
_EMPTY_KINDS = {dict, collections.OrderedDict, list, collections.deque, set}
# Attributes that modules keep for themselves. User code doesn't read them in a call, and recurrent
# layers write some of them in each call, so guards on them would fail for no reason.
_BOOKKEEPING = {
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    *("_load_state_dict_post_hooks", "_non_persistent_buffers_set", "_flat_weights"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),  # set with a hook
    *("_flat_weight_refs", "_is_full_backward_hook", "_backward_pre_hooks_always"),
}
_HOOKS = {n for n in vars(nn.Module()) if n.endswith("_hooks") or n in ("_modules", "_buffers")}
_HOOKS |= {"_parameters"}
# Methods of an `autograd.Function`, which its ``apply`` calls.
_OF_FUNCTIONS = {"forward", "setup_context", "backward", "vjp", "jvp", "vmap"}
_LISTS_NAMES = {"dir", "getmembers"}

Place = tuple[Any, Any, Any]  # ITEM, container, key; READ, function, object; FIXED, tensor, None
ITEM, READ, FIXED = "item", "read", "fixed"


class Search:
    """Searches everything that ``roots`` reach, and leaves a flat list for each kind of guard.

    ``key`` describes the found state by value, and ``tensors`` are in the order of the key. So two
    searches with equal keys may use the same graph, each with its own tensors as inputs.
    """

    def __init__(self, roots: Iterable[Any], ran: Ran | None = None) -> None:
        roots = [*roots]
        self._search(roots, ran)
        while ran is not None and not self._named_by_objects <= ran.names:
            ran = ran.with_names(self._named_by_objects)
            self._search(roots, ran)

    def _search(self, roots: Sequence[Any], ran: Ran | None) -> None:
        self.ran = ran
        self.tensors: list[Tensor] = []
        self.slots: list[list[Place]] = []  # for each tensor, all places that hold it
        self.key: list[Any] = []
        # All visited objects. They must stay alive: Python reuses the ids of dead objects.
        self.held: list[Any] = []
        self.known: list[Any] = []  # the objects whose ids are in the key
        self.generators: list[torch.Generator] = []
        # Guards, by how they are checked:
        self.items: list[Any] = []  # (container, key, value)
        self.reads: list[Any] = []  # (function, object, value)
        self.absent: list[Any] = []  # (dict, key), a name that is not bound yet
        self.lengths: list[Any] = []  # (container, length)
        self.empty: list[Any] = []  # containers
        self.falsy: list[Any] = []  # (dict of a module, name of hooks)
        self.orders: list[Any] = []  # (dict, its keys)
        self.kinds: list[Any] = []  # (object, class)
        self.own: list[Any] = []  # (object, its ``__dict__``)
        self.values: list[Any] = []  # (function, object, value), compared by ==
        # Containers that a trace may change, with copies; only in a search without ``ran``:
        self.snapshots: list[Any] = []  # (container, its contents, its owner)
        self._numbers: dict[int, int] = {}
        self._of_tensors: dict[int, int] = {}
        self._named_by_objects: set[str] = set()  # names inside objects like `operator.attrgetter`
        self._lists_subclasses = False
        self._names: set[str] = set(ran.names) if ran else {"forward"}
        self._functions: list[types.FunctionType] = []
        self._classes: dict[type, None] = {}
        self._modules: list[types.ModuleType] = []
        self._looked: set[Any] = set()  # (id of a namespace, name) for each name looked up in it
        self._todo: list[Any] = [(root, None) for root in roots[::-1]]
        self._walk()
        while self._look_up_names():
            self._walk()

    # -- the walk

    def _walk(self) -> None:
        todo, numbers, key = self._todo, self._numbers, self.key
        while todo:
            x, place = todo.pop()
            kind = type(x)
            if type(kind) is type and kind in PLAIN:
                key += kind, repr(x) if kind in _FLOATS else x  # 0.0 == -0.0
                self._guard(place, x)
                continue
            is_new = id(x) not in numbers
            if is_new:
                numbers[id(x)] = len(numbers)
                self.held.append(x)
            else:
                key.append(numbers[id(x)])
            if issubclass(kind, Tensor):
                self._tensor(x, place, is_new)
                continue
            self._guard(place, x)
            if is_new:
                self._by_identity(kind)
                self._look(x, kind)

    def _guard(self, place: Place | None, x: Any) -> None:
        if place is None:
            return
        how, first, second = place
        (self.items if how is ITEM else self.reads).append((first, second, x))

    def _tensor(self, t: Tensor, place: Place | None, is_new: bool) -> None:
        if is_new:
            self.key.append(Tensor)
            self._of_tensors[id(t)] = len(self.tensors)
            self.tensors.append(t)
            self.slots.append([])
            own = t.__dict__  # attributes that user code has set
            self._container(own, {**own}, t)
            self.lengths.append((own, len(own)))
            named = [n for n in own if self.ran is None or n in self.ran.names]
            if named:
                self._guard(place, t)
                self.key += named
                self._todo += ((own[name], (ITEM, own, name)) for name in named)
        self.slots[self._of_tensors[id(t)]].append(place or (FIXED, t, None))

    def _look(self, x: Any, kind: Any) -> None:
        """Push the parts of an object, and guard their number."""
        for base, look in _LOOKS.items():
            if issubclass(kind, base):
                look(self, x, kind)
                return
        if any(k.__name__ == "ndarray" and k.__module__ == "numpy" for k in kind.__mro__):
            self._array(x, kind)
        else:
            self._object(x, kind)

    def _by_identity(self, x: Any) -> None:
        self.key.append(id(x))
        self.known.append(x)

    # -- functions and their wrappers

    def _function(self, f: types.FunctionType, kind: Any) -> None:
        code = f.__code__
        self._by_identity(code)
        push, of_library = self._todo.append, is_library_file(code.co_filename)
        if of_library and not f.__closure__:
            return
        if not of_library:
            runs = self.ran is None or self.ran.runs(code)
            self._attributes_of_function(f, runs)
            if not runs:
                return
            self.reads.append((_CODE, f, code))
            self._functions.append(f)
            if f.__defaults__:
                push((f.__defaults__, (READ, _DEFAULTS, f)))
            if f.__kwdefaults__:
                push((f.__kwdefaults__, (READ, _KWDEFAULTS, f)))
        for cell in f.__closure__ or ():
            self._cell(cell, types.CellType)

    def _attributes_of_function(self, f: types.FunctionType, runs: bool) -> None:
        own = f.__dict__
        self._length(own, dict, len(own))  # so that an attribute that is set later fails a guard
        self._container(own, {**own}, f)
        for name, value in own.items():
            is_wanted = runs or self.ran is None or name in self.ran.names
            if is_wanted and not name.startswith("_torchdynamo"):
                self.key.append(name)
                self._todo.append((value, (ITEM, own, name)))

    def _cell(self, cell: Any, kind: Any) -> None:
        value = in_cell(cell)
        if value is MISSING:
            self.reads.append((in_cell, cell, MISSING))
        else:
            self._todo.append((value, (READ, _CELL, cell)))

    def _method(self, x: types.MethodType, kind: Any) -> None:
        self._todo += (x.__self__, None), (x.__func__, None)

    def _bound(self, x: Any, kind: Any) -> None:
        """A method of a built-in class, such as ``d.get``."""
        self._by_identity(x)
        owner = x.__self__
        if owner is not None and not issubclass(type(owner), (types.ModuleType, type)):
            self._todo.append((owner, None))

    def _partial(self, x: Any, kind: Any) -> None:
        self._todo += (x.keywords, None), (x.args, None), (x.func, None)
        own = _own_attributes(x)
        self._container(own, {**own}, x)
        self.lengths.append((own, len(own)))
        for name, value in own.items():
            self.key.append(name)
            self._todo.append((value, (ITEM, own, name)))

    def _wrapper(self, x: Any, kind: Any) -> None:
        names = ("__wrapped__", "fget", "func", "__func__", "args", "keywords")
        found = (getattr(x, n, None) for n in names)
        self._todo += ((f, None) for f in found if f is not None)

    # -- containers

    def _container(self, x: Any, copy: Any, owner: Any) -> None:
        if self.ran is None:
            self.snapshots.append((x, copy, owner))

    def _length(self, x: Any, kind: Any, length: int) -> None:
        if not length and kind in _EMPTY_KINDS:
            self.empty.append(x)
        else:
            self.lengths.append((x, length))

    def _tuple(self, x: Any, kind: Any) -> None:
        items = [*tuple.__iter__(x)]
        self.key.append(len(items))
        exact = type(x) is tuple
        for i in range(len(items) - 1, -1, -1):
            place = (ITEM, x, i) if exact else (READ, functools.partial(_tuple_item, i), x)
            # A tuple never changes, so only tensors need a place from which to be read.
            self._todo.append((items[i], place if issubclass(type(items[i]), Tensor) else None))
        if not exact and not is_library_class(kind):
            self._attributes(x, kind)

    def _sequence(self, x: Any, kind: Any) -> None:
        base: Any = list if issubclass(kind, list) else collections.deque
        if kind.__module__.startswith("functx."):  # functx's own notes
            return
        items = [*base.__iter__(x)]
        self.key.append(len(items))
        self._container(x, items, x)
        self._length(x, kind, len(items))
        exact = kind in EXACT
        for i in range(len(items) - 1, -1, -1):
            place = (ITEM, x, i) if exact else (READ, functools.partial(_list_item, base, i), x)
            self._todo.append((items[i], place))
        if not exact:
            self._attributes(x, kind)

    def _set(self, x: Any, kind: Any) -> None:
        base: Any = set if issubclass(kind, set) else frozenset
        items = [*base.__iter__(x)]
        if base is set:
            self._container(x, items, x)
            self._length(x, kind, len(items))
            if items:
                self.values.append((_identities, x, _identities(x)))
        plain = [v for v in items if type(v) in PLAIN]
        self.key += len(items), frozenset((type(v), repr(v)) for v in plain)
        self._todo += ((v, None) for v in items if type(v) not in PLAIN)
        if kind not in (set, frozenset) and not is_library_class(kind):
            self._attributes(x, kind)

    def _dict(self, x: Any, kind: Any) -> None:
        if kind.__module__.startswith("functx."):
            return
        items = x if kind is dict else dict(_ordered(x))
        self.key.append(len(items))
        self._container(x, {**items}, x)
        self._length(x, kind, len(items))
        if len(items) > 1 and kind in EXACT and {*map(type, items)} == {str}:
            self.orders.append((x, (*items,)))
        elif len(items) > 1:
            self.values.append((_key_identities, x, _key_identities(x)))
        exact = kind in EXACT
        for k, v in reversed([*items.items()]):
            place = (ITEM, x, k) if exact else (READ, functools.partial(_dict_item, k), x)
            self._todo.append((v, place))
            self._todo.append((k, None))
        if not is_library_class(kind):
            self._attributes(x, kind)

    def _proxy(self, x: Any, kind: Any) -> None:
        # ``x`` may stand for an object of any class, and reading ``x`` would call its methods. The
        # garbage collector finds the object without running code.
        self._todo += ((shown, None) for shown in gc.get_referents(x))

    def _getter(self, x: Any, kind: Any) -> None:
        self._by_identity(x)
        texts = (a for a in x.__reduce__()[1] if type(a) is str)
        self._named_by_objects.update(part for text in texts for part in text.split("."))

    def _buffer(self, x: Any, kind: Any) -> None:
        self.key.append(bytes(x))
        self.values.append((bytes, x, bytes(x)))

    def _array(self, x: Any, kind: Any) -> None:
        self._by_identity(x)
        self.key += x.shape, str(x.dtype)
        if not is_library_class(kind):
            self._attributes(x, kind)
        base: Any = next(k for k in kind.__mro__ if k.__module__ == "numpy")
        x = x if kind is base else x.view(base)  # the same memory, but with NumPy's own methods
        if x.nbytes <= _SMALL_ARRAY and not x.dtype.hasobject:
            self.key.append(x.tobytes())
            self.values.append((_bytes, x, _bytes(x)))
        elif x.nbytes <= _SMALL_ARRAY and x.dtype == object:
            self.values.append((_objects_in, x, _objects_in(x)))
            for i, item in enumerate(x.ravel().tolist()):
                self._todo.append((item, (READ, functools.partial(_item_of_array, i), x)))

    # -- classes, modules, objects

    def _class(self, cls: Any, kind: Any) -> None:
        self._by_identity(cls)
        self._met(cls)
        self._met(kind)

    def _met(self, cls: type) -> None:
        if not is_library_class(cls):
            self._classes.setdefault(cls)

    def _module(self, x: types.ModuleType, kind: Any) -> None:
        self._by_identity(x)
        if not is_library(str((attributes(x) or {}).get("__name__", ""))):
            self._modules.append(x)

    def _generator(self, x: torch.Generator, kind: Any) -> None:
        self._by_identity(x)
        self.generators.append(x)

    def _identity(self, x: Any, kind: Any) -> None:
        self._by_identity(x)

    def _reference(self, x: Any, kind: Any) -> None:
        self._todo.append((x(), (READ, _referent, x)))

    def _weak_proxy(self, x: Any, kind: Any) -> None:
        self._todo.append((_proxied(x), (READ, _proxied, x)))

    def _of_context(self, x: Any, kind: Any) -> None:
        self._by_identity(x)
        self._todo.append((_in_context(x), (READ, _in_context, x)))

    def _of_thread(self, x: Any, kind: Any) -> None:
        self._todo.append((_in_thread(x), (READ, _in_thread, x)))
        self._met(kind)

    def _object(self, x: Any, kind: Any) -> None:
        # The hooks of a module lead to FSDP's state, and from there to the parameters of all other
        # modules. As inputs of the graph these would get their gradients after FSDP reduced them.
        if (
            kind.__module__.startswith("torch.distributed.") and not issubclass(kind, nn.Module)
        ) or not self._attributes(x, kind):
            self._by_identity(x)

    def _attributes(self, x: Any, kind: Any) -> bool:
        """Follow the attributes of an object; returns whether it can have any."""
        push, found = self._todo.append, False
        self._met(kind)
        if not is_library_class(kind):
            wrapped = type.__getattribute__(kind, "__dict__")
            found = "__slots__" in wrapped
        for member in _members(kind):
            value = _of_member(member, x)
            found, read = True, functools.partial(_of_member, member)
            if value is MISSING:
                self.reads.append((read, x, MISSING))
            elif self._is_wanted(member.__name__, x, kind):
                self.key.append(member.__name__)
                push((value, (READ, read, x)))
        own = _own_attributes(x)
        if own is None:
            return found
        of_functx = kind.__module__.startswith("functx.")
        is_module = issubclass(kind, nn.Module)
        if not of_functx:
            self.kinds.append((x, kind))
            self.own.append((x, own))
            self.lengths.append((own, len(own)))
            self._container(own, {**own}, x)
        for name, value in [*own.items()][::-1]:
            if type(name) is not str or (is_module and name in _BOOKKEEPING):
                continue
            if of_functx and (type(value) in PLAIN or name in ("backend", "scripts")):
                continue  # functx's own notes, which change between calls, and the compiler
            if is_module and name in _HOOKS and type(value) in _EMPTY_KINDS and not value:
                if self._is_wanted(name, x, kind):
                    self.falsy.append((own, name))
                self._container(value, type(value)(), x)
                continue
            if self._is_wanted(name, x, kind):
                self.key.append(name)
                push((value, (ITEM, own, name)))
        return True

    def _is_wanted(self, name: str, x: Any, kind: Any) -> bool:
        """Whether the code that has run may read an attribute, judging by the names in the code."""
        if self.ran is None or name in self.ran.names or kind.__module__.startswith("functx."):
            return True
        if is_library_class(kind) and kind not in _HOLDERS:
            return not issubclass(kind, nn.Module)  # names read by torch's modules are in ``ran``
        return self.ran.computes_names

    # -- names

    def _look_up_names(self) -> bool:
        """Follow names of the code in the classes, modules and globals found so far.

        Returns whether anything new was found.
        """
        before, names, ran = len(self._todo), self._names, self.ran
        functions, self._functions = self._functions, []
        for f in functions:
            for code in with_inner(f.__code__):
                # Only user code counts: an installed package may list subclasses, and from those
                # the search would reach everything.
                asks = "__subclasses__" in code.co_names and not is_of_package(code.co_filename)
                if asks and (ran is None or code in ran.codes):
                    self._lists_subclasses = True
                if ran is None:
                    names |= names_in(code)
                    self._in_space(f.__globals__, code.co_names)
                    self._unbound(f.__globals__, globals_in(code, stored=True))
                elif code in ran.codes:
                    self._in_space(f.__globals__, globals_in(code))
                    self._unbound(f.__globals__, globals_in(code))
                if ran is None or code in ran.codes:
                    users = [name for name in imports_in(code) if not is_library(name)]
                    self._in_space(sys.modules, users)
        for cls in [*self._classes]:
            for k in cls.__mro__:
                if not is_library_class(k):
                    self._in_class(k, names)
        for module in self._modules:
            space = attributes(module) or {}  # `vars` would load a lazy module
            if id(space) not in self._looked:
                self._looked.add(id(space))
                self.lengths.append((space, len(space)))
            self._in_space(space, names)
        return len(self._todo) > before

    def _in_space(self, space: Any, names: Iterable[str]) -> None:
        for name in sorted({*names} & space.keys()):
            if (id(space), name) not in self._looked:
                self._looked.add((id(space), name))
                self._todo.append((space[name], (ITEM, space, name)))
                self.key.append(name)

    def _unbound(self, space: Any, names: Iterable[str]) -> None:
        for name in sorted({*names} - space.keys()):
            if (id(space), name) not in self._looked:
                self._looked.add((id(space), name))
                self.absent.append((space, name))
                if name not in _BUILTINS:
                    self.key.append(name)
                    self.absent.append((vars(builtins), name))

    def _in_class(self, cls: type, names: set[str]) -> None:
        space = namespace(cls)
        if id(space) not in self._looked:
            self._looked.add(id(space))
            self.held.append(cls)
            self.lengths.append((space, len(space)))
            self.reads.append((_MRO, cls, _MRO(cls)))
            # Python calls special methods that no code names. Another one, set later, could run.
            self.key += sorted(name for name in space if name[:2] == "__")
            if self.ran is None:
                self.snapshots.append((space, {**space}, cls))
            if self._lists_subclasses:
                self.values.append((_subclasses, cls, _subclasses(cls)))
                subclasses: list[type] = type.__subclasses__(cls)
                self._todo += [(derived, None) for derived in subclasses]
        is_function = issubclass(cls, torch.autograd.Function)
        everything = self.ran is not None and not names.isdisjoint(_LISTS_NAMES)
        for name, value in [*space.items()]:
            if (id(space), name) in self._looked or type(value) is types.MemberDescriptorType:
                continue
            is_called = name[:2] == "__" or (is_function and name in _OF_FUNCTIONS)
            if name in names or everything or (is_called and self._runs(value)):
                self._looked.add((id(space), name))
                self._todo.append((value, (ITEM, space, name)))
                self._by_identity(cls)
                self.key.append(name)

    def _runs(self, value: Any) -> bool:
        """Whether Python or torch may call this method by itself, though no code names it."""
        if type(value) in (staticmethod, classmethod):
            value = value.__func__
        if type(value) is not types.FunctionType:
            return False
        if value.__closure__ and is_library_file(value.__code__.co_filename):
            return True  # a wrapper, such as `once_differentiable`
        return self.ran is None or self.ran.runs(value.__code__)


_LOOKS: dict[Any, Callable[[Search, Any, Any], None]] = {
    types.FunctionType: Search._function,
    types.MethodType: Search._method,
    types.BuiltinMethodType: Search._bound,
    types.MethodWrapperType: Search._bound,
    functools.partial: Search._partial,
    tuple: Search._tuple,
    list: Search._sequence,
    collections.deque: Search._sequence,
    set: Search._set,
    frozenset: Search._set,
    dict: Search._dict,
    type: Search._class,
    types.ModuleType: Search._module,
    types.CellType: Search._cell,
    torch.Generator: Search._generator,
    types.MappingProxyType: Search._proxy,
    operator.attrgetter: Search._getter,
    bytearray: Search._buffer,
    array.array: Search._buffer,
    Logger: Search._identity,  # its attributes lead to all loggers of the process
    types.CodeType: Search._identity,
    enum.Enum: Search._identity,
    contextvars.ContextVar: Search._of_context,
    threading.local: Search._of_thread,
    weakref.ReferenceType: Search._reference,
    **dict.fromkeys(weakref.ProxyTypes, Search._weak_proxy),
    **dict.fromkeys(map(type, _VIEWS), Search._proxy),
    **dict.fromkeys(
        [property, staticmethod, classmethod, functools.cached_property, functools.partialmethod],
        Search._wrapper,
    ),
    CACHE: Search._wrapper,
}


@functools.cache
def namespace(cls: type) -> Any:
    """The ``__dict__`` of a class, always the same object: each plain access makes a new proxy."""
    return type.__dict__["__dict__"].__get__(cls)


@functools.cache
def _members(cls: type) -> tuple[Any, ...]:
    """The descriptors of ``__slots__``."""
    classes = (k for k in cls.__mro__ if not is_library_class(k))
    found = (v for k in classes for v in namespace(k).values())
    return tuple(v for v in found if type(v) is types.MemberDescriptorType)


_own: Any = object.__getattribute__


def _own_attributes(x: Any) -> Any:
    """The ``__dict__`` of an object, or ``None`` if it has no plain dict there."""
    try:
        found = _own(x, "__dict__")
    except Exception:  # the class may define it as a property, which may raise any error
        return None
    return found if type(found) is dict else None


def _of_member(member: Any, x: Any) -> Any:
    try:
        return member.__get__(x, type(x))
    except AttributeError:
        return MISSING


def in_cell(cell: Any) -> Any:
    """The value in a cell of a closure, or `MISSING` if the variable is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def member_of(function: Any) -> Any:
    """The descriptor of ``__slots__`` that a guard reads by; ``None`` for other guards."""
    if type(function) is functools.partial and function.func is _of_member:
        return function.args[0]
    return None


def _in_context(x: Any) -> Any:
    return x.get(None)


def _in_thread(x: Any) -> Any:
    return threading.local.__getattribute__(x, "__dict__")


def _referent(x: Any) -> Any:
    return x()


def _tuple_item(i: int, x: Any) -> Any:
    return tuple.__getitem__(x, i)


def _list_item(base: Any, i: int, x: Any) -> Any:
    return base.__getitem__(x, i)


def _dict_item(key: Any, x: Any) -> Any:
    return dict.get(x, key, MISSING)


def _identities(x: Any) -> Any:
    return frozenset(map(id, set.__iter__(x)))


def _key_identities(x: Any) -> Any:
    return (*(id(k) for k, _ in _ordered(x)),)


def _ordered(x: Any) -> Any:
    """The items of a dict in order; an ``OrderedDict`` does not have the order of its base dict."""
    is_ordered = isinstance(x, collections.OrderedDict)
    return collections.OrderedDict.items(x) if is_ordered else dict.items(x)


def _proxied(x: Any) -> Any:
    """The object that a `weakref.proxy` stands for; ``None`` if it is dead."""
    try:
        return x.__init__.__self__
    except ReferenceError:
        return None


def _objects_in(x: Any) -> Any:
    """The ids of the objects in an array."""
    return (*map(id, x.ravel().tolist()),)


def _item_of_array(i: int, x: Any) -> Any:
    return x.ravel()[i]


def _subclasses(x: Any) -> Any:
    return (*map(id, type.__subclasses__(x)),)


def _bytes(x: Any) -> Any:
    return x.tobytes()


_CODE = operator.attrgetter("__code__")
_DEFAULTS = operator.attrgetter("__defaults__")
_KWDEFAULTS = operator.attrgetter("__kwdefaults__")
_CELL = operator.attrgetter("cell_contents")
CELL, CODE = _CELL, _CODE
_MRO: Any = vars(type)["__mro__"].__get__  # a metaclass may define another ``__mro__``


def read(place: Place) -> Any:
    """The value that a place holds now, or `MISSING` if it holds none."""
    how, first, second = place
    if how is FIXED:
        return first
    try:
        return first[second] if how is ITEM else first(second)
    except (KeyError, IndexError, ValueError, AttributeError):
        return MISSING
