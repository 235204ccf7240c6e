"""TorchScript in a region: what it calls is one operation, on the module's tensors too.

NOTE [scripts]
C++ calls scripted functions and modules, and shows no torch-function mode what they are given. So
their calls ask the running region for stand-ins, as custom Functions do. A module's own parameters
and buffers are arguments of the operation: what runs is a replica of the module that has their
stand-ins. Its interpreter optimizes what it has run twice, so a replay may run other operations
than the forward, and nothing is left out of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function

from functx import _torch_scripted
from functx._errors import RematError
from functx._remat._tracker import OBSERVERS, active_tracker
from functx._remat._watch import all_must_run


def script(
    buffers: Sequence[Tensor],
    written: bool,
    module: _Module,
    parameters: Sequence[Tensor],
    args: Any,
    kwargs: Any,
) -> Any:
    """The operation. By its first two arguments, `_writes` can tell what it writes to."""
    return module(parameters, buffers, args, kwargs)


class _Module:
    """What is called, and the tensors of it.

    Args:
        called: the function or method.
        plain: what calls it.
    """

    def __init__(self, called: Any, plain: Callable[..., Any]) -> None:
        self._called, self._plain = called, plain
        self._owner = _torch_scripted.owner_of(called)
        self._modules = [] if self._owner is None else _torch_scripted.modules_of(self._owner)
        self._parameters = [*map(_torch_scripted.parameters_of, self._modules)]
        self._buffers = [*map(_torch_scripted.buffers_of, self._modules)]

    def parameters(self) -> list[Tensor]:
        """Those of all modules."""
        return [t for those in self._parameters for _, t in those]

    def buffers(self) -> list[Tensor]:
        """Those of all modules."""
        return [t for those in self._buffers for _, t in those]

    def writes(self) -> bool:
        """Whether it may write to buffers."""
        return any(map(_torch_scripted.trains, self._modules))

    def __call__(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """On these in place of its own."""
        if self._owner is None:
            return self._plain(self._called, *args, **kwargs)
        p, b = iter(parameters), iter(buffers)
        tensors = []
        for own, others in zip(self._parameters, self._buffers):
            tensors += [*(next(p) for _ in own), *(next(b) for _ in others)]
        copies = _torch_scripted.replica(self._owner, iter(tensors))
        before = [dict(_torch_scripted.attributes_of(c)) for c in copies]
        out = self._plain(_torch_scripted.method_of(copies[0], self._called.name), *args, **kwargs)
        after = [dict(_torch_scripted.attributes_of(c)) for c in copies]
        bound = [t for c in copies for t in _tensors_of(c)]
        if after != before or any(new is not old for new, old in zip(bound, tensors)):
            raise RematError(
                f"remat: the scripted module {self._owner.qualified_name!r}, called in a region, "
                "binds attributes of its own to other values, which could not be taken back for a "
                "replay. Let it write in place to a buffer, or give remat the module before "
                "torch.jit.script."
            )
        return out


def _tensors_of(module: Any) -> list[Tensor]:
    those = (*_torch_scripted.parameters_of(module), *_torch_scripted.buffers_of(module))
    return [t for _, t in those]


def observe_scripts() -> None:
    """``NOTE [scripts]``."""

    def calls(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(called: Any, *args: Any, **kwargs: Any) -> Any:
            if active_tracker() is None:
                return plain(called, *args, **kwargs)
            all_must_run()
            module = _Module(called, plain)
            those = (module.buffers(), module.writes(), module, module.parameters(), args, kwargs)
            return handle_torch_function(script, (), *those)  # by the modes

        return call

    _torch_scripted.observe_calls(calls)


OBSERVERS.append(observe_scripts)
