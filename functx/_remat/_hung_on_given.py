"""Hooks that a body hangs on what it did not make.

NOTE [hooks on what is given]
Without remat such a hook hangs on the tensor itself, and is called with all of its gradient, also
with what comes from elsewhere. What a replay pulls back to its stand-in is the region's part. So
the first run hangs it there, once, where a handle takes it off; replays do not hang it again. What
it closes over, of what the first run made, has left the region. Each region in a nest hands it on,
to where the tensor was made. What it has been given and written to counts as made in the region.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from functx import _torch_nodes
from functx._errors import RematError

# What a tracker answers where something is left to be done as ever.
LEFT = object()

HANGING = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


def hang(func: Callable[..., Any], t: Tensor, hook: Any, outer: Any, name: str) -> Any:
    """Hang a hook on what the region ``name`` did not make; its handle.

    Args:
        func: one of `HANGING`.
        t: the tensor, as it is outside of the region.
        hook: the user's.
        outer: the tracker of the region around, if there is one.
        name: of the region.

    Raises:
        RematError: it is one of the hooks of ``register_multi_grad_hook``, which count calls.
    """
    if _torch_nodes.is_of_many(hook):
        raise RematError(
            f"remat: the region {name!r} calls register_multi_grad_hook for a tensor of shape "
            f"{tuple(t.shape)} that it did not make; the hook would wait for a stand-in. Call it "
            "outside of the region, or for tensors alone that the region makes."
        )
    handle = LEFT if outer is None else outer.hang(func, t, hook)
    return func(t, hook) if handle is LEFT else handle


def hung_already(hooks: Any = None) -> RemovableHandle:
    """What a replay is given for a handle; it takes nothing off, of ``hooks`` either."""
    return RemovableHandle(OrderedDict() if hooks is None else hooks)


def hook_refused(t: Tensor, name: str) -> RematError:
    """The error where a body hangs a hook on what it has captured and written to."""
    return RematError(
        f"remat: the region {name!r} writes in place to a tensor of shape {tuple(t.shape)} that it "
        "captured, and hangs a hook on that; a replay would not find it. Pass it as an argument, "
        "or hang the hook on a .clone()."
    )


def after_refused(t: Tensor, name: str) -> RematError:
    """The error where a hook waits for what a replay does not do."""
    return RematError(
        f"remat: the region {name!r} makes a leaf of shape {tuple(t.shape)}, computes with it, and "
        "hangs a hook on it by register_post_accumulate_grad_hook; a replay accumulates no .grad, "
        "so the hook would not be called. Make the leaf outside of the region, or use "
        "register_hook."
    )


def gradient_refused(t: Tensor, name: str) -> RematError:
    """The error where a body asks for the gradient of what it has hung a hook on."""
    return RematError(
        f"remat: the region {name!r} hangs a hook on a tensor of shape {tuple(t.shape)} that it "
        "did not make, and takes a gradient with respect to that (torch.autograd.grad); the hook "
        "would not be called. Hang it on a .clone(), or take the gradient outside of the region."
    )
