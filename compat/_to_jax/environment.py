"""What a function's trace depends on besides its arguments: what it reads, and torch's settings.

Invariant: two calls with equal environments would trace to the same graph, as far as can be seen
from outside the function (`functx._jit.state`).  Values of tensors are not part of it, only which
they are: they are read again at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from functx._errors import LoweringError
from functx._jit import State
from functx.compat._torch import has_backward_hooks


class Environment:
    """What a trace of ``f`` depends on besides its arguments; ``key`` holds while this lives."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._state = state = State([f])
        for module in state.held:
            if isinstance(module, torch.nn.Module) and has_backward_hooks(module):
                raise LoweringError(
                    f"{type(module).__name__} or a parameter of it has backward hooks, which JAX's"
                    " derivatives would leave out silently: remove them (handle.remove()), or put"
                    " what they do to gradients into an autograd.Function"
                )
        self.key: Hashable = (
            *(torch.get_default_dtype(), torch.is_autocast_enabled("cpu")),
            *(torch.get_autocast_dtype("cpu"), *map(id, state.tensors), *state.key),
        )

    @property
    def device(self) -> str:
        """The device of what is closed over; inputs are traced as if they were there."""
        return str(self._state.tensors[0].device) if self._state.tensors else "cpu"
