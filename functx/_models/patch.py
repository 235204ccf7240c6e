"""`patch_checkpoint`: let code that calls ``torch.utils.checkpoint`` use functx instead.

torch's function stays the same object, so the patch also reaches code that has imported it under
another name, or holds it in a partial or a closure. While a patch is in place, calls of that object
run functx's implementation. ``torch.compile`` recognises the object without tracing into it, so
compiled code is the same with and without a patch.
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
    """A patch that is in place until `undo` is called or its ``with`` block ends."""

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

    Each call of torch's function runs `functx.checkpoint`, with the same arguments. It does not
    matter under which name code holds the function, or whether it was imported before the patch. So
    the patch also reaches Hugging Face models on which ``gradient_checkpointing_enable`` was called
    before, torch's ``checkpoint_sequential`` and FSDP's ``checkpoint_wrapper``.

    The patch does not change the graphs of ``torch.compile``, ``torch.export`` and
    ``torch.jit.trace``. The compiler recomputes by its own means, so code that was compiled under
    the patch may be used after it, and vice versa. (The exception are gradients of torch.func
    *inside* compiled code: torch refuses a checkpoint there, so functx runs it.)

    ``torch.distributed._composable.checkpoint`` is not patched: it works by hooks around a module,
    which transforms refuse. Use ``checkpoint_wrapper`` or `functx.apply_remat` instead.

    Hugging Face's ``gradient_checkpointing_enable`` also registers a hook on the embeddings for the
    reentrant checkpoint, which calls ``requires_grad_``. torch.func refuses that; functx's
    transforms allow it, with and without the patch.

    A backward pass may run after the patch has ended, unless checkpoints are nested: a replay must
    find the inner checkpoints as the forward did, else it raises `ReplayError`.

    The patch is in place when this function returns. Patches may nest, also across threads; the
    last one that is undone restores torch's function.

    Returns:
        A handle. Use it in a ``with`` block, or call its ``undo()``. If you do neither, the patch
        stays in place.

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
    """Replaces ``torch.utils.checkpoint.checkpoint`` while a patch is in place."""
    if compiler.checkpoint_is_of_a_graph() or not (args or "function" in options):
        # (Without a function, torch 2.14 returns a decorator.)
        return compiler.own_checkpoint()(*args, **options)
    return checkpoint(*args, **options)
