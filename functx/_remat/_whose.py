"""Whose something is: the user's, a library's or Python's. Nothing of its own runs to tell.

What an object says of itself is not asked: its ``__class__`` may be that of something else, a proxy
may be dead, a module that is loaded when it is first used would be loaded by a look.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NEVER = frozenset({"torch", "numpy", "functx", "jax", "jaxlib"})
# Without those whose classes hold what a user puts there.
_PYTHONS = frozenset(sys.stdlib_module_names) - {"types", "collections", "argparse"}
_PLACES = tuple(
    {
        os.path.join(form(place), "")
        for place in (
            *(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")),
            os.path.dirname(os.__file__),
        )
        for form in (str, os.path.realpath)
    }
)
_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})
_MANY = 4096

# As `type` has them: a metaclass may have others.
mro: Any = type.__dict__["__mro__"].__get__
held_by: Any = type.__dict__["__dict__"].__get__
module_of_class: Any = type.__dict__["__module__"].__get__
_namespace: Any = vars(types.ModuleType)["__dict__"].__get__


def namespace(module: Any) -> Any:
    """What a module holds, whatever it does when an attribute is asked for."""
    return _namespace(module) if issubclass(type(module), types.ModuleType) else _NOTHING


def module_of(value: Any) -> str:
    """The name of the module that a value is, or is of; ``""`` where that is not known."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        name = _namespace(value).get("__name__")
    elif kind is types.FunctionType:
        name = value.__module__
    else:
        name = module_of_class(value if issubclass(kind, type) else kind)
    return name if isinstance(name, str) else ""


def is_there(cls: type) -> bool:
    """Whether a class is one of its module's, and not made by a function: to be remembered."""
    return namespace(sys.modules.get(module_of(cls))).get(cls.__name__) is cls


def package_of(value: Any) -> str:
    """The package of that module."""
    return module_of(value).partition(".")[0]


def is_users(function: types.FunctionType) -> bool:
    """Whether a function is, or wraps, one of the user's.

    ``functools.wraps`` has it say that it is of the module of what it wraps.
    """
    name = function.__globals__.get("__name__")
    return not (
        NOT_THE_USERS[module_of(function)] and isinstance(name, str) and NOT_THE_USERS[name]
    )


class _NotTheUsers(dict[Any, bool]):
    """By the name of a module, whether it is torch's, Python's or the like.

    A project may have a package that is called as one of Python's (``code``, ``trace``): where the
    module lies tells whose it is.
    """

    def __missing__(self, module: Any) -> bool:
        if not isinstance(module, str):
            return False
        package = module.partition(".")[0]
        found = package in _NEVER
        if package in _PYTHONS:
            there = sys.modules.get(package)
            if there is None:  # it may be another when it is
                return True
            found = _is_pythons(there)
        if len(self) >= _MANY:
            self.clear()
        self[module] = found
        return found


NOT_THE_USERS = _NotTheUsers()


def _is_pythons(module: Any) -> bool:
    file = _file(module)
    if not file:  # built in, frozen, or a folder with no file of its own
        paths = [*namespace(module).get("__path__", ())]
        return not paths or str(paths[0]).startswith(_PLACES)
    return file.startswith(_PLACES) and _LIBRARIES.isdisjoint(Path(file).parts)


def _file(module: Any) -> str:
    file = namespace(module).get("__file__")
    return file if isinstance(file, str) else ""


@functools.cache
def is_installed(package: str) -> bool:
    """Whether a package is a library, in one of the places for these."""
    return not _LIBRARIES.isdisjoint(Path(_file(sys.modules.get(package))).parts)
