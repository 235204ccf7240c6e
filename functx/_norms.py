"""Nested derivatives of normalisation layers, taken from their definition.

torch's formulas for the derivatives of layer_norm, batch_norm and instance_norm read the saved mean
and deviation, which carry no derivative. So after the first derivative many are silently wrong
(torch 2.11 to 2.13): forward mode differentiated again, ``grad(vmap(grad))`` and ``jacrev(jacrev)``
with respect to weights, and the third order in reverse mode. Where derivatives nest inside of a
functx transform, a layer keeps its value and takes its derivatives from its definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from functx import _torch, _tree


def around(tree: Any, *, once: bool = False) -> AbstractContextManager[Any]:
    """The mode for a transform of these arguments, where another derivative may follow.

    What its function reads beside them is unknown, so plain autograd may always follow. (After it
    has pulled back ``once``, without ``vmap``, torch's second order is right: the mode is spared.)
    """
    follows = _levels() > 0
    if not follows and torch.is_grad_enabled():
        follows = not once or _torch.functorch_depth() > 0 or _any_requires_grad(_tree.leaves(tree))
    return NormsByDefinition() if follows else nullcontext()


def are_defined() -> bool:
    """Whether the mode is active, or a region stands in for it."""
    modes = map(_torch.function_mode_at, range(_torch.function_depth()))
    return any(getattr(mode, "norms", False) for mode in modes)


class NormsByDefinition(TorchFunctionMode):
    """Takes the derivatives of normalisations from their definition, where they nest."""

    norms = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DEFINITIONS:
            return normalized(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def normalized(func: Any, args: Any, kwargs: Any) -> Any:
    """What a normalisation returns, where derivatives nest with those of its definition."""
    out = func(*args, **kwargs)
    nests = _nest((out, *args, *kwargs.values()))
    if not nests or (exact := DEFINITIONS[func](*args, **kwargs)) is None:
        return out
    exact = exact.to(out.dtype)
    return out.detach() + (exact - exact.detach())


def _levels() -> int:
    """How many transforms that take derivatives are active; plain forward mode is one."""
    grad, jvp = _torch.TransformType.Grad, _torch.TransformType.Jvp
    active = [level.key() for level in _torch.interpreter_stack() or ()]
    plain = _torch.dual_level() >= 0 and jvp not in active
    return sum(key in (grad, jvp) for key in active) + plain


def _nest(values: Sequence[Any]) -> bool:
    """Whether a second derivative may be taken: the same in a region and its replays."""
    return (n := _levels()) > 1 or (n == 1 and _any_requires_grad(values))


def _any_requires_grad(values: Sequence[Any]) -> bool:
    """Whether plain autograd knows one of some values, below all transforms."""
    for t in values:
        while isinstance(t, Tensor) and _torch.level_of(t) > 0:
            t = _torch.inner_of(t)
        if isinstance(t, Tensor) and t.requires_grad:
            return True
    return False


def _normalized(x: Tensor, over: Any, weight: Any, bias: Any, eps: float, shape: Any) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    deviation = (x.var(tuple(over), correction=0, keepdim=True) + eps).sqrt()
    x = (x - x.mean(tuple(over), keepdim=True)) / deviation
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    over = range(-len(normalized_shape), 0)
    return _normalized(input, over, weight, bias, eps, normalized_shape)


def _by_channel(first: int, default: bool) -> Callable[..., Tensor | None]:
    """batch_norm, with statistics over all dimensions but 1, and instance_norm, from 2 on."""

    def definition(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = default,
        momentum: float = 0.1,
        eps: float = 1e-5,
        **named: Any,
    ) -> Tensor | None:
        if not named.get("use_input_stats", training):
            return None  # constants, as torch takes them
        over = [d for d in range(first, input.dim()) if d != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        return _normalized(input, over, weight, bias, eps, shape)

    return definition


def _of_kernel(definition: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """The same for the kernel, which takes the weight first."""
    return lambda x, w, b, mean, var, *rest, **k: definition(x, mean, var, w, b, *rest[:3], **k)


_batch_norm, _instance_norm = _by_channel(0, False), _by_channel(2, True)
DEFINITIONS: dict[Any, Callable[..., Tensor | None]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _of_kernel(_batch_norm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _of_kernel(_instance_norm),
}
