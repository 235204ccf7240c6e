"""Functions of torch's that are no calls of a region, or special ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functx import _torch

# Looks at a tensor, which need no stand-in: a pullback looks at the results of its own tape.
_GETTERS = "requires_grad grad_fn is_leaf shape dtype device ndim layout grad _base output_nr"
_GRAD: Any = Tensor.grad
LOOKS = {
    *(getattr(Tensor, name).__get__ for name in [*_GETTERS.split(), "_version"]),
    *(_GRAD.__set__, _GRAD.__delete__, Tensor.size, Tensor.dim, Tensor.numel),
    *(Tensor.stride, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__hash__, Tensor.__len__),
    *(Tensor.element_size, Tensor.nelement, Tensor.storage_offset, torch.ops.prim.device.default),
    *(_torch.set_grad_enabled, torch.is_grad_enabled),
}
# Hangs something on a tensor, where it requires grad, say; nothing is computed.
HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad}
# What makes a tensor of Python's or NumPy's data: kept, not made again (rule 3).
MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.frombuffer}
MAKERS |= {Tensor.new_tensor}
# What reads memory behind torch's back.
READERS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}
READERS |= {Tensor.untyped_storage}
