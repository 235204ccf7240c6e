"""`checkpoint_name`: a name for a value, for policies to refer to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functx import _torch, _tree
from functx._arrays import backend_of
from functx._remat._capture import FirstRun
from functx._remat._holders import base_of
from functx._remat._ledger import Ledger
from functx._remat._observers import notify_name
from functx._remat._replay import Replay
from functx._remat._tracker import Tracker, active_tracker


def checkpoint_name(x: Any, name: str) -> Any:
    """Give a value a name that `functx.checkpoint_policies` can refer to.

    Outside of a `functx.remat` region it does nothing. It works under every transform, and in the
    ``forward`` of a custom ``autograd.Function``.

    Args:
        x: a tensor, or a pytree of them; other leaves just pass.
        name: any string. A value may have several.

    Returns:
        ``x``. In a region, tensors that are part of a larger one come back as copies, so that the
        larger one need not be kept with them.

    Raises:
        TypeError: ``name`` is not a string.

    Example:
        >>> import torch, functx
        >>> def f(x):
        ...     return torch.sin(functx.checkpoint_name(torch.sin(x), "inner")).sum()
        >>> policy = functx.checkpoint_policies.save_only_these_names("inner")
        >>> functx.grad(functx.remat(f, policy=policy))(torch.zeros(2))
        tensor([1., 1.])

    Source:
        ``jax.ad_checkpoint.checkpoint_name``.
    """
    if not isinstance(name, str):
        raise TypeError(f"checkpoint_name: expected a string for a name, got {name!r}.")
    if isinstance(x, Tensor):
        return _named(x, name)
    if (backend := backend_of("checkpoint_name", (x,), {})) is not None:
        return backend.checkpoint_name(x, name)
    return _tree.map_(lambda leaf: _named(leaf, name) if isinstance(leaf, Tensor) else leaf, x)


def _copy(t: Tensor) -> Tensor:
    """Stands in a trace where a part of a larger tensor was named."""
    return t.clone()


def _named(t: Tensor, name: str) -> Tensor:
    _torch.name_in_graph(base_of(t), name)
    tracker = active_tracker()
    if tracker is not None and _copies(t, name, tracker):
        t = tracker.run(_copy, (t,), {})
        _tell(t, name)
    with _torch.without_function_modes():
        notify_name(base_of(t), name)
    return t


def _copies(t: Tensor, name: str, tracker: Tracker) -> bool:
    if isinstance(tracker, Replay):
        return tracker.comes_next(_copy)
    first = isinstance(tracker, FirstRun) and tracker.ledger is not None
    return not _tell(t, name) and first


def _tell(t: Tensor, name: str) -> bool:
    """Tell the regions around; whether the innermost one can keep the value as it is."""
    base, kept = base_of(t), True
    for i in range(_torch.dispatch_mode_depth()):
        mode = _torch.get_dispatch_mode_at(i)
        if isinstance(mode, Ledger) and not mode.paused:
            with _torch.without_function_modes():
                kept = mode.named(base, name)
    return kept
