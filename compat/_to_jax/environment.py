"""The environment of a trace: variables that the function reads, and settings of torch.

Invariant: two calls with equal environments trace to the same graph, as far as this can be seen
from outside the function (`functx._compile.state`). The environment identifies the tensors that the
function reads but does not contain their values, which are read again at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from functx._compile import State
from functx._core import LoweringError
from functx._torch.lowering import has_backward_hooks


class Environment:
    """Everything in addition to its arguments that a trace of ``f`` depends on.

    ``key`` contains ids of objects, so it is valid as long as this object lives.
    """

    def __init__(self, f: Callable[..., Any]) -> None:
        state = State([f])
        self._held = state.known, state.tensors
        for module in state.held:
            if isinstance(module, torch.nn.Module) and has_backward_hooks(module):
                raise LoweringError(
                    f"{type(module).__name__} or one of its parameters has backward hooks, which"
                    " JAX's derivatives would ignore silently. Remove them (handle.remove()), or"
                    " change gradients in an autograd.Function instead"
                )
        casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        settings = *casts, torch.get_default_dtype()
        self.key: Hashable = (*settings, *map(id, state.tensors), *state.key)
        # Inputs are traced as if they were on the device of the tensors that `f` closes over.
        self.device = str(state.tensors[0].device) if state.tensors else "cpu"
