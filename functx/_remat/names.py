"""`checkpoint_name`: a value that policies can see by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functx._core import backend_of, tree
from functx._remat.saving import named


def checkpoint_name(x: Any, name: str) -> Any:
    """Return ``x``, and give it a name under which a policy of an enclosing region may save it.

    Args:
        x: A pytree of tensors and other objects. A value may have several names.
        name: The name for `functx.checkpoint_policies`.

    Returns:
        ``x``. A tensor that a policy saves is a copy, which shares no memory with the original.

    Raises:
        TypeError: ``name`` is not a string.

    Example:
        >>> import torch, functx
        >>> policy = functx.checkpoint_policies.save_only_these_names("sine")
        >>> f = functx.remat(lambda x: functx.checkpoint_name(x.sin(), "sine").exp(), policy=policy)
        >>> functx.grad(f)(torch.tensor(0.0))
        tensor(1.)

    Source:
        ``jax.ad_checkpoint.checkpoint_name``.
    """
    if not isinstance(name, str):
        kind = type(name).__name__
        raise TypeError(f"checkpoint_name(x, name): expected a name, a string, got a {kind}.")
    if torch.compiler.is_dynamo_compiling():
        return x
    if (backend := backend_of("checkpoint_name", (x,), {})) is not None:
        return backend.checkpoint_name(x, name)
    return tree.map_(lambda t: named(t, name) if isinstance(t, Tensor) else t, x)
