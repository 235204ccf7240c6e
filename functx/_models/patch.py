"""`patch_checkpoint`: third-party code that calls ``torch.utils.checkpoint`` runs on functx.

torch's function stays the same object, so it does not matter where code has stored it: under a name
of a module's own, in a partial, in a closure. While a patch is in place, calls of that object run
functx's implementation. ``torch.compile`` knows the object and never looks into it, so compiled
code is the same with and without a patch.
"""

from __future__ import annotations

import threading
from typing import Any

from functx._core import uncompiled
from functx._models.checkpoint import checkpoint
from functx._torch import compiler
from functx._transforms import reverse_mode

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
                compiler.replace_checkpoint(patched_checkpoint)
            elif _active == 0 < was:
                compiler.replace_checkpoint(None)
            reverse_mode.checkpoint_is_patched = _active > 0

    def __enter__(self) -> Patch:
        self._put(True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def patch_checkpoint() -> Patch:
    """Make code that calls ``torch.utils.checkpoint`` use functx instead, in the whole process.

    Each call of torch's function runs `functx.checkpoint`. It does not matter under which name or
    in which partial code holds the function, nor whether it got it before the patch. So models of
    Hugging Face that were enabled before are covered, as are torch's ``checkpoint_sequential`` and
    FSDP's ``checkpoint_wrapper``. Calls mean what they mean to `functx.checkpoint`.

    The patch does not change the graphs of ``torch.compile``, ``torch.export`` and
    ``torch.jit.trace``. The compiler recomputes by its own means, and code that was compiled under
    the patch may be used after it, and the other way round. (Gradients of torch.func *inside* of
    compiled code, which torch refuses around a checkpoint, use functx.)

    ``torch.distributed._composable.checkpoint`` stays torch's: it works by hooks around a module,
    which transforms refuse. Use ``checkpoint_wrapper`` or `functx.apply_remat` in its place.

    Hugging Face's ``gradient_checkpointing_enable`` also hangs a hook for the reentrant checkpoint
    on the embeddings, which calls ``requires_grad_``. torch.func refuses that; functx's transforms
    allow it, with and without the patch.

    A backward pass may come after the patch, unless checkpoints are nested: a replay has to find
    the inner ones as the forward did, else it raises `ReplayError`.

    The patch is in place when this returns; patches may nest, across threads too, and the last to
    be undone puts torch's function back.

    Returns:
        A handle: use it in a ``with`` block, or call its ``undo()``, or drop it and leave the patch
        in place for good.

    Raises:
        RuntimeError: another library had replaced torch's function before functx was imported.

    Example:
        >>> import torch, functx
        >>> def loss(x):
        ...     return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()
        >>> with functx.patch_checkpoint():
        ...     print(functx.vmap(functx.grad(loss))(torch.zeros(2, 3)))
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    compiler.check_checkpoint()
    return Patch()


@uncompiled
def patched_checkpoint(*args: Any, **options: Any) -> Any:
    """Run in each call of ``torch.utils.checkpoint.checkpoint`` while a patch is in place."""
    if compiler.checkpoint_is_of_a_graph() or not (args or "function" in options):
        # (Without a function, torch 2.14 returns a decorator.)
        return compiler.own_checkpoint()(*args, **options)
    return checkpoint(*args, **options)
