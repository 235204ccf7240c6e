"""Private names of torch's older vmap, beside those in `_torch`.

torch.autograd runs it for ``is_grads_batched`` and ``vectorize=True``. It is no level of functorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._C import _functorch
from torch._functorch import vmap as _vmap

# Levels entered and left; tensors of one, put together and taken apart.
enter_legacy_vmap = torch._C._vmapmode_increment_nesting
exit_legacy_vmap = torch._C._vmapmode_decrement_nesting
is_legacy_batched = _functorch.is_legacy_batchedtensor
add_legacy_batch_dim = torch._add_batch_dim
remove_legacy_batch_dim = torch._remove_batch_dim


def legacy_vmap_level() -> int:
    """How many of torch's older vmaps are active."""
    level = int(enter_legacy_vmap()) - 1
    exit_legacy_vmap()
    return level


def legacy_batch_size(t: torch.Tensor, level: int) -> int:
    """How many examples a tensor of some level of the older vmap holds."""
    return int(remove_legacy_batch_dim(t, level, 0, 0).shape[0])


@contextmanager
def outside_legacy_vmap() -> Iterator[None]:
    """Run as outside of torch's older vmap, which refuses random operations."""
    levels = range(legacy_vmap_level())
    for _ in levels:
        exit_legacy_vmap()
    try:
        yield
    finally:
        for _ in levels:
            enter_legacy_vmap()


_remove_batch_dim = _vmap._remove_batch_dim


def observe_results(
    observed: Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor],
) -> None:
    """From now on, vmap's results come of ``observed``: of a value, and what takes its level off.

    What is no batch of that level is expanded. It is done in C++, where no mode sees it.
    """
    if _vmap._remove_batch_dim is not _remove_batch_dim:
        return

    def remove(t: torch.Tensor, level: int, size: int, dim: int) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():  # which traces this, and breaks at any region
            return _remove_batch_dim(t, level, size, dim)
        return observed(t, lambda t: _remove_batch_dim(t, level, size, dim))

    _vmap._remove_batch_dim = remove  # type: ignore[assignment]
