"""``remat`` of an ``nn.Module``: a module of a derived class over the same state.

The derived class overrides ``forward`` alone, so hooks run outside the region and once.
"""

from __future__ import annotations

import functools
import weakref
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from functx._core import RematError
from functx._remat.call import run
from functx._remat.region import Options

_OWN_FORWARD = "_functx_forward"


class RematModule:
    """Marks modules made by `functx.remat`; mixed into the class of the original."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the original class, which an importer finds by name."""
        said = _base(type(self)), self._functx_options  # type: ignore[attr-defined]
        return _rebuilt, said, self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        state: Any = _base(type(self)).__getstate__
        return self.__dict__.copy() if state is object.__getstate__ else dict(state(self))

    def __prepare_scriptable__(self) -> Any:
        """Raise an error: ``torch.jit.script`` calls this method first."""
        raise TypeError("torch.jit.script can't read a region: script the module without remat")


def _base(cls: type) -> type:
    """The original class, from which the class of a region is derived."""
    return cls.__mro__[cls.__mro__.index(RematModule) + 1]


# The derived classes, by original class. Neither is held, because each parametrized module has a
# separate class.
_known: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _derived(original: Any) -> type:
    cls = _known.get(original, lambda: None)()
    if cls is None:

        @functools.wraps(original.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            bind = functools.partial if torch.compiler.is_compiling() else MethodType
            own = self.__dict__.get(_OWN_FORWARD) or bind(original.forward, self)
            return run(own, args, kwargs, self._functx_options)

        names = {x: getattr(original, x) for x in ("__module__", "__qualname__", "__doc__")}
        names |= {"forward": forward, "__slots__": ("_functx_options",)}
        cls = type(original.__name__, (RematModule, original), names)
        _known[original] = weakref.ref(cls)
    return cls


def _rebuilt(original: type, options: Options) -> Any:
    new: Any = object.__new__(_derived(original))
    object.__setattr__(new, "_functx_options", options)
    return new


def remat_module(module: nn.Module, options: Options) -> nn.Module:
    """A module that does what ``module`` does, as a region, over the same state."""
    original = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"remat: the forward of {original.__name__} is TorchScript, not Python. Call it in a "
            "region: functx.remat(lambda x: module(x)), or functx.remat(nn.Sequential(module))."
        )
    if isinstance(module, LazyModuleMixin):
        raise RematError(
            f"remat: {original.__name__!r} has a lazy module that was not initialized. Call it "
            "once outside of regions and transforms before, with a batch of the right shape."
        )
    new = _rebuilt(_base(original) if isinstance(module, RematModule) else original, options)
    state = module.__dict__
    if "forward" in state:  # set on the instance: it would hide the class's forward
        state = dict(state)
        state[_OWN_FORWARD] = state.pop("forward")
    object.__setattr__(new, "__dict__", state)
    return new
