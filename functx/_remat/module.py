"""``remat`` of an ``nn.Module``: a module of a derived class over the same state.

The derived class overrides ``forward`` alone. So hooks run outside the region and once, and
parameters, buffers, submodules and ``state_dict`` keys are those of the original, which shares
its state with the new module.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from functx._errors import not_initialized
from functx._remat.call import run
from functx._remat.region import Options


class RematModule:
    """Marks modules made by `functx.remat`; mixed into the class of the original."""

    __slots__ = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's ``forward``, as a region."""
        original = self._functx_original()  # type: ignore[attr-defined]
        if original is not None and original.__class__ is not self._functx_follows:  # type: ignore[attr-defined]
            _follow(self, original.__class__)
        forward = self.__dict__.get(_OWN_FORWARD) or super().forward  # type: ignore[misc]
        return run(forward, args, kwargs, self._functx_options)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the original class, which an importer finds by name."""
        original = _base(type(self))
        return _rebuild, (original, self._functx_options), self.__getstate__()  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        original: Any = _base(type(self))
        if original.__getstate__ is not object.__getstate__:
            return dict(original.__getstate__(self))
        return self.__dict__.copy()

    def __prepare_scriptable__(self) -> Any:
        """Called by ``torch.jit.script``, which puts what it is given into the module around."""
        raise TypeError(
            f"torch.jit.script: {type(self).__name__} was made by functx.remat, and TorchScript "
            "knows no regions. Script the module that was given to remat, which has the same "
            "parameters and buffers, in a model of its own; or use torch.jit.trace, torch.export "
            "or functx.jit, which run regions."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = _rebuild(_base(type(self)), self._functx_options)  # type: ignore[attr-defined]
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


_OWN_FORWARD = "_functx_forward"
_SLOTS = ("_functx_options", "_functx_original", "_functx_follows")


def _nobody() -> None:
    """The original of a copy."""


def _base(cls: type) -> type:
    """The class that one of a region is derived from."""
    bases = cls.__mro__
    return bases[bases.index(RematModule) + 1]


def _follow(module: Any, original: type) -> None:
    """Be of a class derived from that of the original, which a parametrization gives another."""
    object.__setattr__(module, "_functx_follows", original)
    if type(module).__mro__[1] is _Slots:
        module.__class__ = _derived(
            _base(original) if issubclass(original, RematModule) else original
        )


class _Slots(RematModule):
    """So that an instance may come to be of another class derived from this one."""

    __slots__ = _SLOTS


# By the class of the original; neither is held, as a parametrized module has a class of its own,
# which holds it.
_known: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _derived(original: type) -> type:
    made = _known.get(original)
    cls = None if made is None else made()
    if cls is None:
        cls = _derive(original)
        _known[original] = weakref.ref(cls)
    return cls


def _derive(original: type) -> type:
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": _forward(original),
    }
    try:
        return type(original.__name__, (_Slots, original), {**names, "__slots__": ()})
    except TypeError:  # it has slots of its own
        return type(original.__name__, (RematModule, original), {**names, "__slots__": _SLOTS})


def _forward(original: Any) -> Any:
    """A forward that says of itself what the original's says: its signature and documentation."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return RematModule.forward(self, *args, **kwargs)

    return forward


def _rebuild(original: type, options: Options) -> Any:
    new: Any = object.__new__(_derived(original))
    object.__setattr__(new, "_functx_options", options)
    object.__setattr__(new, "_functx_original", _nobody)
    return new


def remat_module(module: nn.Module, options: Options) -> nn.Module:
    """A module that does what ``module`` does, as a region, over the same state."""
    original = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"remat: {original.__name__} is TorchScript, whose forward is not Python's and can't "
            "be made into a region. Call it in one: functx.remat(lambda x: module(x)), or "
            "functx.remat(nn.Sequential(module))."
        )
    if isinstance(module, LazyModuleMixin):
        raise not_initialized(original.__name__)
    if isinstance(module, RematModule):
        original = _base(original)
    new = _rebuild(original, options)
    state = module.__dict__
    if "forward" in state:  # set on the instance: it would hide the class's forward
        state = {k: v for k, v in state.items() if k != "forward"}
        state[_OWN_FORWARD] = module.__dict__["forward"]
    object.__setattr__(new, "__dict__", state)
    object.__setattr__(new, "_functx_original", weakref.ref(module))
    object.__setattr__(new, "_functx_follows", type(module))
    return new
