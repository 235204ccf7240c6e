"""Run embeddings without writes to their weights and without sparse gradients.

NOTE [embeddings]
``nn.Embedding(max_norm=)`` shrinks, in place, the rows that it looks up. This write to the weight
would affect the next example, and ``vmap`` refuses it. Here the weight is not changed: rows are
looked up in a shrunk copy. The gradient is that of the copy, as in torch, which takes no derivative
of the shrinking.

The gradient of ``nn.Embedding(sparse=True)`` is a sparse tensor, for which ``vmap`` has no rules.
Per-example gradients are stacked as dense tensors in any case, so they are computed as dense ones.

What could be improved: the whole weight is copied, not only the rows that are looked up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from functx import _torch

_LOOKUPS: dict[Any, tuple[str, ...]] = {
    F.embedding: (
        *("input", "weight", "padding_idx", "max_norm", "norm_type"),
        *("scale_grad_by_freq", "sparse"),
    ),
    F.embedding_bag: (
        *("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq"),
        *("mode", "sparse", "per_sample_weights", "include_last_offset", "padding_idx"),
    ),
    torch.embedding: ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
}
RENORM = torch.ops.aten.embedding_renorm_.default
# Texts in the errors that vmap raises for such embeddings: for the write, and for sparse gradients.
_SIGNS = ("embedding_renorm_", "arguments from the 'SparseC")


class PlainEmbeddings(TorchFunctionMode):
    """Runs embeddings without writes to the weight, with dense gradients; NOTE [embeddings]."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and not kwargs.get("is_grads_batched"):
            return self._pulled_back(*args, **kwargs)
        if func not in _LOOKUPS:
            return func(*args, **kwargs)
        named = dict(zip(_LOOKUPS[func], args)) | kwargs
        named.pop("sparse", None)
        max_norm, norm_type = named.pop("max_norm", None), named.pop("norm_type", 2.0)
        if max_norm is not None:
            named["weight"] = _shrunk(named["weight"], float(max_norm), float(norm_type))
        return func(**named)

    def _pulled_back(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        **options: Any,
    ) -> Any:
        """``torch.autograd.grad`` with this mode active in it, for replays of regions.

        The engine is called directly, because ``torch.autograd.grad`` would call the mode again.
        """
        outputs, inputs = _listed(outputs), _listed(inputs)
        cotangents = _listed(grad_outputs) or (None,) * len(outputs)
        ones = [torch.ones_like(t) if c is None else c for t, c in zip(outputs, cotangents)]
        retain_graph = create_graph if retain_graph is None else retain_graph
        zeros = bool(options.get("materialize_grads"))
        with self:
            found: Any = _torch.run_backward(
                *(outputs, tuple(ones), retain_graph, create_graph, inputs),
                allow_unreachable=zeros or options.get("allow_unused") is True,
                accumulate_grad=False,
            )
        if zeros:
            found = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found)]
        return tuple(found)


def _listed(values: Any) -> tuple[Any, ...]:
    """One tensor or several, as a tuple."""
    if values is None or isinstance(values, torch.Tensor):
        return () if values is None else (values,)
    return tuple(values)


def needs_plain_embeddings(error: BaseException) -> bool:
    """Whether an error was raised by an embedding that `PlainEmbeddings` can run."""
    return any(sign in str(error) for sign in _SIGNS)


def has_special_embeddings(module: nn.Module) -> bool:
    """Whether a module has embeddings that need `PlainEmbeddings`."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = (part for part in module.modules() if isinstance(part, kinds))
    return any(part.max_norm is not None or part.sparse for part in found)


def _shrunk(weight: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """A weight whose rows are shrunk to ``max_norm``, with the derivative of the weight itself."""
    rows = weight.detach()
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    norms = torch.linalg.vector_norm(wide, norm_type, -1, keepdim=True)
    # torch's kernel uses 1e-7, too.
    factors = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0)
    return (wide * factors).to(rows.dtype) + (weight - rows)
