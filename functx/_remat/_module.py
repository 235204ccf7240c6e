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

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from functx import _torch_modules
from functx._errors import not_initialized
from functx._remat import _function
from functx._remat._options import Options


class RematModule:
    """Marks modules made by `functx.remat`; mixed into the class of the original."""

    __slots__ = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's ``forward``, as a region."""
        forward = self.__dict__.get(_OWN_FORWARD) or super().forward  # type: ignore[misc]
        return _function.run(forward, args, kwargs, self._functx_options)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the original class, which an importer finds by name."""
        original = type(self).__mro__[2]
        return _rebuild, (original, self._functx_options), self.__getstate__()  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        original: Any = type(self).__mro__[2]
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
        new = _rebuild(type(self).__mro__[2], self._functx_options)  # type: ignore[attr-defined]
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


_OWN_FORWARD = "_functx_forward"


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
    return type(
        original.__name__,
        (RematModule, original),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__slots__": ("_functx_options",),
            "forward": _forward(original),
        },
    )


def _forward(original: Any) -> Any:
    """A forward that says of itself what the original's says: its signature and documentation."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return RematModule.forward(self, *args, **kwargs)

    return forward


def _rebuild(original: type, options: Options) -> Any:
    new: Any = object.__new__(_derived(original))
    object.__setattr__(new, "_functx_options", options)
    return new


def remat_module(module: nn.Module, options: Options) -> nn.Module:
    """A module that does what ``module`` does, as a region, over the same state."""
    original = type(module)
    if _torch_modules.is_scripted(module):
        raise TypeError(
            f"remat: {original.__name__} is TorchScript, whose forward is not Python's and can't "
            "be made into a region. Call it in one: functx.remat(lambda x: module(x)), or "
            "functx.remat(nn.Sequential(module))."
        )
    if isinstance(module, LazyModuleMixin):
        raise not_initialized(original.__name__)
    if isinstance(module, RematModule):
        original = original.__mro__[2]
    new = _rebuild(original, options)
    state = module.__dict__
    if "forward" in state:  # set on the instance: it would hide the class's forward
        state = {k: v for k, v in state.items() if k != "forward"}
        state[_OWN_FORWARD] = module.__dict__["forward"]
    object.__setattr__(new, "__dict__", state)
    return new
