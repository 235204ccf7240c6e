"""``jit`` of an ``nn.Module``: a module of a derived class over the same state (J7).

The derived class overrides only ``forward``. So parameters, buffers, names, modes and attributes
are those of the original, and hooks of the module run outside of the graph, once per call.

Limits: if user code later sets an attribute ``forward`` on the instance, that replaces the compiled
one. If it replaces the ``__dict__`` of one of the two modules, they no longer share state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from functx._core import TracingError
from functx._remat import sharding

_OWN_FORWARD = "_functx_forward_of_jit"
# A slot of modules that `functx.remat` has made. It is not in ``__dict__``: `_instance` copies it.
_OF_REGIONS = "_functx_options"
Jit = Callable[[Any], Any]  # compiles a function, with options


class JittedModule:
    """Marks modules made by `functx.jit`; mixed into the class of the original."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the original class; a copy has no graphs."""
        plain = _instance(_base(type(self)), self)
        made = plain.__reduce_ex__(protocol)
        if isinstance(made, str):
            return made
        make, args, *state = made
        return _rebuilt, (make, args, self._functx_jit), *state  # type: ignore[attr-defined]

    def __prepare_scriptable__(self) -> Any:
        """Refuse ``torch.jit.script``, which calls this method first."""
        raise TypeError("torch.jit.script can't read a jitted module. Script the original module.")


def _base(cls: type) -> type:
    """The original class from which the class of a jitted module is derived."""
    return cls.__mro__[cls.__mro__.index(JittedModule) + 1]


def _derived(original: Any, jit: Jit) -> type:
    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        module, jitted = _found(self, original)
        if jitted is None:
            sharding.refuse_to_trace(module, "functx.jit", TracingError)
            own, cls = self.__dict__.get(_OWN_FORWARD), type(module)
            cls = original if module is self else cls
            jitted = jit(MethodType(cls.forward, module) if own is None else own)
            object.__setattr__(self, "_functx_jitted", (module, jitted))
        return jitted(*args, **kwargs)

    names = {x: getattr(original, x) for x in ("__module__", "__qualname__", "__doc__")}
    names |= {"forward": forward, "_functx_jit": staticmethod(jit)}
    names |= {"__slots__": ("_functx_jitted", "_functx_of")}
    return type(original.__name__, (JittedModule, original), names)


def _found(self: Any, original: type) -> tuple[Any, Any]:
    """The module whose forward is compiled, and the compiled forward, if there is one yet.

    The module is the jitted one, unless the original has got another class since, as
    `torch.nn.utils.parametrize` does; then it is the original. If another class has been derived
    from the one of a jitted module (a region of it), the slots of an instance are still empty.
    """
    try:
        of = self._functx_of
        known, jitted = self._functx_jitted
    except AttributeError:
        return self, None
    module = self if type(of) is original else of
    return module, jitted if known is module else None


def _instance(cls: type, module: Any) -> Any:
    """An instance of a class that has the state of a module."""
    new: Any = object.__new__(cls)
    object.__setattr__(new, "__dict__", module.__dict__)
    if hasattr(module, _OF_REGIONS):
        object.__setattr__(new, _OF_REGIONS, getattr(module, _OF_REGIONS))
    return new


def _rebuilt(make: Any, args: Any, jit: Jit) -> Any:
    return jitted_module(make(*args), jit)


def is_plain(module: nn.Module) -> bool:
    """Whether the forward of a module is Python code and final: not TorchScript, and not lazy."""
    return not isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin))


def jitted_module(module: Any, jit: Jit) -> nn.Module:
    """A module that does what ``module`` does, compiled by ``jit``, over the same state."""
    if isinstance(module, JittedModule):
        module = _instance(_base(type(module)), module)
    original = type(module)
    new = _instance(_derived(original, jit), module)
    state = module.__dict__
    if "forward" in state:  # set on the instance: it would hide the class's forward
        state = dict(state)
        state[_OWN_FORWARD] = state.pop("forward")
        object.__setattr__(new, "__dict__", state)
    object.__setattr__(new, "_functx_of", module)
    object.__setattr__(new, "_functx_jitted", (None, None))
    return new
