"""ATen operations: which are matrix products, and how many FLOPs they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functx._core import tree

# Products of matrices and vectors that can't have a batch dimension.
_UNBATCHED = "mm mv dot vdot addmm addmv addr linear _addmm_activation _scaled_mm _int_mm"
# Products that have one, with the positions of the operands. If an operand is expanded along the
# batch, the product has no true batch dimension.
_BATCHED = {"aten.bmm": (0, 1), "aten.baddbmm": (1, 2)}
# All other operations that consist of products.
_OTHERS = (
    "addbmm matmul einsum _trilinear _grouped_mm mkldnn_rnn_layer _cudnn_rnn convolution "
    "mkldnn_convolution cudnn_convolution _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
)
_UNBATCHED_DOTS = frozenset(f"aten.{name}" for name in _UNBATCHED.split())
_DOTS = _UNBATCHED_DOTS.union(_BATCHED, (f"aten.{name}" for name in _OTHERS.split()))


def is_dot(func: Any, args: Sequence[Any] | None = None) -> bool:
    """Whether an operator consists of matrix products.

    With ``args``, only products without batch dimensions count.
    """
    name = str(getattr(func, "overloadpacket", func))
    if args is None:
        return name in _DOTS
    # A stride of 0 in the batch dimension means that all examples use the same matrix.
    return name in _UNBATCHED_DOTS or any(args[i].stride(0) == 0 for i in _BATCHED.get(name, ()))


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of an operation: by torch's formula if there is one, else one per result element."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    return sum(t.numel() for t in tree.partition(out)[0])
