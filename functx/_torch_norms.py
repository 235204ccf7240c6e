"""Batching rules of torch that take statistics for constants, replaced by rules that do not.

``vmap`` of the backward of layer_norm and batch_norm computes the gradient of the weight from the
saved mean and deviation of the input, which carry no derivative. So a derivative of it with respect
to the input is silently wrong: ``grad(vmap(grad(f)))``, ``jacrev(jacrev(f))`` (torch 2.11 to 2.13).

NOTE [statistics are functions]
The rules here add to mean and deviation what is zero in value and right in all its derivatives.
They take the place of torch's in the whole process, from the first ``vmap`` of functx on, since a
rule belongs to the dispatcher: ``torch.func`` is mended with them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._torch_edges import requires_grad_anywhere

_LOCK = threading.Lock()
_RULES: list[torch.library.Library] = []
_aten = torch.ops.aten

# How a batching rule calls an operator on what is inside its tensors.
below_vmap = torch._C._ExcludeDispatchKeyGuard
BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)


@contextmanager
def unseen() -> Iterator[None]:
    """A rule is no code of the user's: neither function modes nor subclasses see what it runs.

    Modes are taken off: while one is there but disabled, ``torch.sym_max``, which decompositions
    call, finds nobody to handle it, and fails.
    """
    modes = []
    try:
        while torch._C._len_torch_function_stack():
            modes.append(torch._C._pop_torch_function_stack())
        with torch._C.DisableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def mend_batching_rules() -> None:
    """NOTE [statistics are functions]. Does nothing the second time."""
    if _RULES:
        return
    with _LOCK:
        if _RULES:
            return
        library = torch.library.Library("aten", "IMPL", "FuncTorchBatched")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="[^a-z]*Overriding|Warning only once")
            library.impl("native_layer_norm_backward", _layer_norm_backward)
            library.impl("native_batch_norm_backward", _batch_norm_backward)
        _RULES.append(library)


def _layer_norm_backward(
    cotangent: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    with unseen():
        rows = list(range(cotangent.dim() - len(normalized_shape)))
        gradients: list[Tensor | None] = [None, None, None]
        if bias is not None and mask[2]:
            gradients[2] = cotangent.sum(rows) if rows else cotangent
        if weight is not None and mask[1]:
            columns = list(range(len(rows), x.dim()))
            normalized = _normalized(x, mean, rstd, columns)
            each = normalized * cotangent
            gradients[1] = each.sum(rows) if rows else each
        if mask[0]:
            scaled = cotangent if weight is None else cotangent * weight
            gradients[0] = _each_example(
                lambda c, x, mean, rstd: _aten.native_layer_norm_backward(
                    *(c, x, normalized_shape, mean, rstd, None, None, [True, False, False])
                )[0],
                [scaled, x, mean, rstd],
            )
        return tuple(gradients)


def _batch_norm_backward(
    cotangent: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    saved_mean: Tensor | None,
    saved_rstd: Tensor | None,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    with unseen():
        rows = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        gradients: list[Tensor | None] = [None, None, None]
        if mask[2]:
            gradients[2] = cotangent.sum(rows)
        if weight is not None and mask[1]:
            if training:
                mean, rstd = (_given(s).reshape(shape) for s in (saved_mean, saved_rstd))
                normalized = _normalized(x, mean, rstd, rows)
            else:
                rstd = (_given(running_var) + eps).sqrt().reciprocal().reshape(shape)
                normalized = (x - _given(running_mean).reshape(shape)) * rstd
            gradients[1] = (normalized * cotangent).sum(rows)
        if mask[0]:
            scaled = cotangent if weight is None else cotangent * weight.reshape(shape)

            def lowered(c: Tensor, x: Tensor, *statistics: Tensor | None) -> Tensor:
                # Examples become channels, of which each has its own statistics.
                sizes = x.shape
                c, x = (t.movedim(0, 1).flatten(1, 2) for t in (c, x))
                flat = [None if s is None else s.flatten(0, 1) for s in statistics]
                options = (training, eps, [True, False, False])
                found = _aten.native_batch_norm_backward(c, x, None, *flat, *options)[0]
                return found.unflatten(1, (sizes[0], sizes[2])).movedim(1, 0)

            statistics = [running_mean, running_var, saved_mean, saved_rstd]
            gradients[0] = _each_example(lowered, [scaled, x, *statistics], always=True)
        return tuple(gradients)


def _given(t: Tensor | None) -> Tensor:
    assert t is not None
    return t


def _normalized(x: Tensor, mean: Tensor, rstd: Tensor, columns: Sequence[int]) -> Tensor:
    """``(x - mean) * rstd``, with the derivatives that the statistics have."""
    mean, rstd, columns = mean.detach(), rstd.detach(), tuple(columns)
    if _differentiated(x):
        now = x.mean(columns, keepdim=True)
        mean = mean + (now - now.detach())
        var = x.var(columns, correction=0, keepdim=True)
        rstd = rstd * (1 + rstd.square() * (var - var.detach())).rsqrt()
    return (x - mean) * rstd


def _differentiated(t: Tensor) -> bool:
    """Whether a derivative can be taken of it, at any level."""
    return requires_grad_anywhere(t) or _torch.forward_ad_level() >= 0


def _each_example(f: Any, tensors: Sequence[Tensor | None], *, always: bool = False) -> Any:
    """``f`` below the ``vmap`` that is running, on tensors with all examples in dimension 0."""
    level = _torch.interpreter_depth()
    values = [None if t is None else _torch.unwrap_batched(t, level) for t in tensors]
    sizes = [v[0].shape[v[1]] for v in values if v is not None and v[1] is not None]
    with below_vmap(BATCHED):
        if not sizes and not always:
            return f(*(None if v is None else v[0] for v in values))
        size = sizes[0] if sizes else 1
        found = f(*(None if v is None else _in_front(*v, size) for v in values))
    return _torch.add_batch_dim(found, 0, level) if sizes else found.squeeze(0)


def _in_front(t: Tensor, dim: int | None, size: int) -> Tensor:
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.contiguous()
