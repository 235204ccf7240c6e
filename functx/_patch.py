"""`patch_checkpoint`: third-party code that calls ``torch.utils.checkpoint`` runs on functx.

Modules hold ``torch.utils.checkpoint.checkpoint`` under names of their own. A patch puts functx's
in its place wherever a loaded module has it, and the end of the patch puts torch's back wherever a
module has functx's: those that were imported meanwhile are covered too.
"""

from __future__ import annotations

import inspect
import sys
import threading
from types import ModuleType
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from functx._checkpoint import checkpoint
from functx._torch import compiler

_lock = threading.Lock()
_active = 0


class Patch:
    """A patch that is in place, until `undo` or the end of a ``with`` block."""

    def __init__(self) -> None:
        self._on = False
        self._put(True)

    def undo(self) -> None:
        """Take the patch back; a second call does nothing."""
        self._put(False)

    def _put(self, on: bool) -> None:
        global _active
        with _lock:
            was, _active = _active, _active + on - self._on
            self._on = on
            if was == 0 < _active:
                _exchange(torch_checkpoint, patched_checkpoint)
            elif _active == 0 < was:
                _exchange(patched_checkpoint, torch_checkpoint)

    def __enter__(self) -> Patch:
        self._put(True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def patch_checkpoint() -> Patch:
    """Make code that calls ``torch.utils.checkpoint`` use functx instead, in the whole process.

    Replaces ``checkpoint`` in ``torch.utils.checkpoint`` and in each loaded module that imported it
    by name; torch's ``checkpoint_sequential`` and FSDP's checkpoint wrapper call it there. Calls
    mean what they mean to `functx.checkpoint`. Code that ``torch.compile`` compiles keeps the
    compiler's own implementation.

    A function that was stored elsewhere before stays torch's: call Hugging Face's
    ``gradient_checkpointing_enable`` while the patch is in place, as it stores a partial. It also
    hangs a hook for the reentrant checkpoint on the embeddings, which calls ``requires_grad_``:
    torch refuses that in `grad` and the like, but not where the patch is in place. A backward
    pass may come after the patch, unless checkpoints are nested: a replay has to find the inner
    ones as the forward did, else it raises `ReplayError`.

    The patch is in place when this returns; patches may nest, across threads too, and the last to
    be undone puts torch's function back.

    Returns:
        A handle: use it in a ``with`` block, or call its ``undo()``, or drop it and leave the patch
        in place for good.

    Example:
        >>> import torch, functx
        >>> def loss(x):
        ...     return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()
        >>> with functx.patch_checkpoint():
        ...     print(functx.vmap(functx.grad(loss))(torch.zeros(2, 3)))
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    return Patch()


def _exchange(old: Any, new: Any) -> None:
    """Wherever a module has ``old``, it has ``new`` from now on, but for this module."""
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType) and module.__name__ not in _OWN:
            names = vars(module)
            for name in [name for name, value in [*names.items()] if value is old]:
                names[name] = new


_OWN = {__name__, checkpoint.__module__, "functx._remat.call"}


def patched_checkpoint(function: Any, *args: Any, **options: Any) -> Any:
    """What is called in place of ``torch.utils.checkpoint.checkpoint``."""
    if compiler.in_plain_graph():
        return torch_checkpoint(function, *args, **options)
    return checkpoint(function, *args, **options)


# The compiler tells options from arguments of the function by it.
patched_checkpoint.__signature__ = inspect.signature(torch_checkpoint)  # type: ignore[attr-defined]
