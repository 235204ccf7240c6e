"""Forward mode of normalisation layers, where it is going to be differentiated once more.

torch's formula for the tangent of layer_norm and batch_norm reads the saved mean and deviation of
the input, which carry no derivative: ``grad(jvp(f))`` and ``jacfwd(jacfwd(f))`` are silently wrong
(torch 2.11 to 2.13; reverse over reverse and forward over reverse are right). In functx's forward
mode such a layer keeps its value, bit by bit, and takes its derivatives from its definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from functx import _torch, _torch_edges, _torch_globals


class Statistics(TorchFunctionMode):
    """While it is active, mean and deviation in a layer are functions of its input."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The operation; a normalisation that an outer level differentiates, by its definition."""
        out = func(*args, **(kwargs or {}))
        if func in _DEFINITIONS:
            exact = _DEFINITIONS[func](*args, **(kwargs or {}))
            if exact is not None:
                exact = exact.to(out.dtype)
                return out.detach() + (exact - exact.detach())
        return out


def forward_mode(transform: Callable[..., Any]) -> Callable[..., Any]:
    """A transform of forward mode, with `Statistics` while the function it is given runs."""

    @functools.wraps(transform)
    def chosen(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not callable(func):
            return transform(func, *args, **kwargs)

        @functools.wraps(func)
        def observed(*inputs: Any, **named: Any) -> Any:
            _torch_globals.check_derivatives_exist(transform.__name__)
            with Statistics():
                return func(*inputs, **named)

        return transform(observed, *args, **kwargs)

    return chosen


def _differentiated_outside(x: Tensor) -> bool:
    """Whether another level than the innermost forward mode differentiates with respect to it."""
    levels = [level.key() for level in _torch.interpreters()]
    if levels.count(_torch.TransformType.Jvp) > 1:
        return True
    return _torch_edges.requires_grad_anywhere(x)


def _normalized(
    x: Tensor,
    over: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shape: Sequence[int],
) -> Tensor | None:
    if not _differentiated_outside(x):
        return None
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
) -> Tensor | None:
    over = list(range(-len(normalized_shape), 0))
    return _normalized(input, over, weight, bias, eps, list(normalized_shape))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not training:
        return None
    over = [d for d in range(input.dim()) if d != 1]
    return _normalized(input, over, weight, bias, eps, _channels(input))


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not use_input_stats:
        return None
    over = list(range(2, input.dim()))
    return _normalized(input, over, weight, bias, eps, _channels(input))


def _channels(x: Tensor) -> list[int]:
    return [1, -1] + [1] * (x.dim() - 2)


def _of_kernel(definition: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """The same for the kernel, which takes the weight first."""

    def found(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor | None:
        return definition(input, running_mean, running_var, weight, bias, training, momentum, eps)

    return found


_DEFINITIONS: dict[Any, Callable[..., Tensor | None]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _of_kernel(_batch_norm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _of_kernel(_instance_norm),
}
