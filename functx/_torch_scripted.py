"""TorchScript: the part of `_torch` about scripted and traced functions and modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# What a call of a script runs by: C++ that no torch-function mode sees.
_C: Any = torch._C
FUNCTION, METHOD = _C.ScriptFunction, _C.ScriptMethod


def observe_calls(calls: Callable[[Any], Any]) -> None:
    """Wrap what calls scripts, of both kinds."""
    for kind in (FUNCTION, METHOD):
        kind.__call__ = calls(kind.__call__)


def owner_of(script: Any) -> Any:
    """The module of a scripted method; ``None`` of a function."""
    return script.owner if isinstance(script, METHOD) else None


def method_of(module: Any, name: str) -> Any:
    """What runs one of its methods."""
    return module._get_method(name)


def modules_of(owner: Any) -> list[Any]:
    """A scripted module and all below it."""
    found = [owner]
    for module in found:  # which grows
        found += (child for _, child in _C.ModuleDict(module).items())
    return found


def parameters_of(module: Any) -> list[tuple[str, Tensor]]:
    """The parameters of a scripted module itself."""
    return [(n, t) for n, t in _C.ParameterDict(module).items() if isinstance(t, Tensor)]


def buffers_of(module: Any) -> list[tuple[str, Tensor]]:
    """Other tensors that it has, buffers mostly."""
    return [(n, t) for n, t in _C.BufferDict(module).items() if isinstance(t, Tensor)]


def attributes_of(module: Any) -> Iterator[tuple[str, Any]]:
    """What it has beside tensors and modules."""
    kinds = _C.ConcreteModuleType.from_jit_type(module._type())
    tensors = {n for n, _ in (*parameters_of(module), *buffers_of(module))}
    for name in kinds.get_attributes():
        if name not in tensors:
            yield name, module.getattr(name)


def trains(module: Any) -> bool:
    """Whether a scripted module is in training mode."""
    return bool(module.hasattr("training") and module.getattr("training"))


def replica(owner: Any, tensors: Iterator[Tensor]) -> list[Any]:
    """The same modules with other tensors: parameters, then buffers, of each in turn."""
    copies: list[Any] = []

    def copy(module: Any) -> Any:
        new = module._replicate_for_data_parallel()
        copies.append(new)
        for name, _ in (*parameters_of(module), *buffers_of(module)):
            new.setattr(name, next(tensors))
        return new

    stack = [(owner, copy(owner))]
    for old, new in stack:  # which grows
        for name, child in _C.ModuleDict(old).items():
            stack.append((child, copy(child)))
            new.setattr(name, stack[-1][1])
    return copies
