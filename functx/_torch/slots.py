"""Read and write the places in a module that hold tensors, without ``nn.Module``'s checks.

``setattr`` refuses to replace a parameter by a plain tensor, and registers any parameter that it is
given. Transforms need to put tensors of either kind in either place. No public API does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MISSING: Any = object()  # the value of a slot that does not exist in its module


class Slot:
    """A place in a module that holds a tensor, or that may hold one.

    A slot is an entry of a dict (``_parameters``, ``_buffers``, ``__dict__``). If the attribute is
    computed by Python code (a property, ``__getattr__``), ``store`` is ``None``, and the slot is
    read and written as an attribute.
    """

    __slots__ = ("name", "owner", "store")

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self.name = owner, name
        self.store = _store_of(owner, name)

    @property
    def key(self) -> tuple[int, str]:
        """Equal for slots that are the same place.

        Owners may differ: a module made by `functx.remat` shares its dicts with the original.
        """
        return id(self.owner if self.store is None else self.store), self.name

    def read(self) -> Any:
        """The value of the slot, or `MISSING`."""
        if self.store is None:
            return getattr(self.owner, self.name, MISSING)
        try:
            return self.store[self.name]
        except KeyError:
            return MISSING

    def put(self, value: Any) -> None:
        """Set the slot to a tensor or ``None``; delete it if ``value`` is `MISSING`."""
        if self.store is not None and value is not MISSING:
            self.store[self.name] = value
        elif self.store is not None:
            self.store.pop(self.name, None)
        elif value is not MISSING:
            setattr(self.owner, self.name, value)
        elif hasattr(self.owner, self.name):
            delattr(self.owner, self.name)


def _store_of(owner: nn.Module, name: str) -> Any:
    for store in (owner._parameters, owner._buffers, vars(owner)):
        if name in store:
            return store
    for cls in type(owner).__mro__:
        if name in vars(cls):
            # The instance's dict overrides a tensor of the class, but not a property.
            return vars(owner) if isinstance(vars(cls)[name], Tensor) else None
    return None  # a new name: `__setattr__` decides where the value goes


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer, under every name that it has."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def recurrent_states(owners: Iterable[Any]) -> list[tuple[nn.RNNBase, dict[str, Any]]]:
    """The lists of their parameters that recurrent layers keep and update when they are called.

    After a call with other parameters these lists have to be put back, else the layer would keep
    those parameters alive.
    """
    layers = {id(owner): owner for owner in owners if isinstance(owner, nn.RNNBase)}
    names = "_flat_weights", "_flat_weight_refs"
    return [(x, {n: vars(x)[n] for n in names if n in vars(x)}) for x in layers.values()]


# TorchScript modules keep their tensors in C++, where no `Slot` reaches.
ScriptModules = torch.jit.ScriptModule, torch.jit.RecursiveScriptModule, torch.jit.ScriptFunction
