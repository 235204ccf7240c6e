"""What a function's trace depends on besides its arguments: what it reads, and torch's settings.

Invariant: two calls with equal environments would trace to the same graph, as far as can be seen
from outside the function (`functx._compile.state`).  Values of tensors are not part of it, only
which they are: they are read again at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from functx._compile import State
from functx._core import LoweringError
from functx._torch.lowering import has_backward_hooks


class Environment:
    """What a trace of ``f`` depends on besides its arguments; ``key`` holds while this lives."""

    def __init__(self, f: Callable[..., Any]) -> None:
        state = State([f])
        self._held = state.known, state.tensors
        for module in state.held:
            if isinstance(module, torch.nn.Module) and has_backward_hooks(module):
                raise LoweringError(
                    f"{type(module).__name__} or a parameter of it has backward hooks, which JAX's"
                    " derivatives would leave out silently: remove them (handle.remove()), or put"
                    " what they do to gradients into an autograd.Function"
                )
        casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        settings = *casts, torch.get_default_dtype()
        self.key: Hashable = (*settings, *map(id, state.tensors), *state.key)
        # That of what is closed over: inputs are traced as if they were there.
        self.device = str(state.tensors[0].device) if state.tensors else "cpu"
