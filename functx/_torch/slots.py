"""The places in a module that hold tensors, which no public name reaches without checks.

``setattr`` refuses a plain tensor in the place of a parameter, and registers a parameter in the
place of a plain tensor. What a transform puts into a module is neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MISSING: Any = object()  # what a slot holds that is not there


class Slot:
    """A place in a module that holds a tensor, or that may hold one.

    A slot is an entry of a dict (``_parameters``, ``_buffers``, ``__dict__``). If Python code
    stands between a name and what it means (a property, ``__getattr__``), the slot is the attribute
    itself, without a ``store``.
    """

    __slots__ = ("name", "owner", "store")

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self.name = owner, name
        self.store = _store_of(owner, name)

    @property
    def key(self) -> tuple[int, str]:
        """Equal for two names of one place; modules made by `functx.remat` share their dicts."""
        return id(self.owner if self.store is None else self.store), self.name

    def read(self) -> Any:
        """What the slot holds, or `MISSING`."""
        if self.store is None:
            return getattr(self.owner, self.name, MISSING)
        try:
            return self.store[self.name]
        except KeyError:
            return MISSING

    def put(self, value: Any) -> None:
        """Let the slot hold a tensor, ``None`` or, if the value is `MISSING`, nothing."""
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
            # A tensor of the class is hidden by one in the instance's dict; a property is not.
            return vars(owner) if isinstance(vars(cls)[name], Tensor) else None
    return None  # new to the module: `__setattr__` decides where it goes


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer, under every name that it has."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def recurrent_states(owners: Iterable[Any]) -> list[tuple[nn.RNNBase, dict[str, Any]]]:
    """What recurrent layers among some modules note of their parameters when they are called.

    Left as it is after a call, it would hold the tensors that the call has used.
    """
    layers = {id(owner): owner for owner in owners if isinstance(owner, nn.RNNBase)}
    names = "_flat_weights", "_flat_weight_refs"
    return [(x, {n: vars(x)[n] for n in names if n in vars(x)}) for x in layers.values()]


# Modules of TorchScript have slots of their own, in C++.
ScriptModules = torch.jit.ScriptModule, torch.jit.RecursiveScriptModule, torch.jit.ScriptFunction
