"""Convert a module and a criterion to a function of parameters and one example.

Most modules expect a batch dimension. So inputs and targets get one back inside ``vmap``, and the
module sees a batch of one. A criterion that averages over the batch then gives the loss of the
example.

NOTE [batch norm]
Batch normalisation in training mode reads statistics of the whole batch. The loss of one example
then depends on all others, its gradient is not a per-example gradient, and clipping it gives no
privacy. The same holds in evaluation mode without running statistics. Both raise an error before
anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from functx import _torch
from functx._core import contents, is_of, tree
from functx._transforms import functional_call

Params = dict[str, torch.Tensor]


def functional(
    module: nn.Module, criterion: Callable[..., torch.Tensor]
) -> tuple[Callable[..., torch.Tensor], Params]:
    """A module and a criterion as a loss of one example, and the parameters to differentiate.

    Every function of ``per_sample`` converts a pair ``(module, criterion)`` this way.

    Args:
        module: Any module without batch statistics. It is called with a batch of one example, in
            its current mode (training or evaluation). Buffers and frozen parameters are read from
            it at each call.
        criterion: Takes the module's output and the targets for that batch of one, and returns a
            tensor with one element. An example is ``torch.nn.functional.cross_entropy``.

    Returns:
        ``(loss, params)``. ``loss(params, inputs, *targets)`` takes one example without batch
        dimension; ``inputs`` may be a tensor, a tuple of positional or a dict of keyword arguments
        of the module. ``params`` are the parameters that require grad, by name, detached: they
        share memory with the module's. A tied parameter appears once.

    Raises:
        TypeError: The arguments are not a module and a callable.
        ValueError: The module has no parameter that requires grad, or normalises over the batch.

    Example:
        >>> import torch, functx
        >>> model = torch.nn.Linear(3, 2)
        >>> cross_entropy = torch.nn.functional.cross_entropy
        >>> loss, params = functx.per_sample.functional(model, cross_entropy)
        >>> loss(params, torch.ones(3), torch.tensor(1)).shape
        torch.Size([])
    """
    return module_loss(module, criterion), trainable(module)


def module_loss(
    module: nn.Module, criterion: Callable[..., Any], outputs: bool = False
) -> Callable[..., Any]:
    """Like the first result of `functional`; with ``outputs``, the result may be any tensors.

    The batch dimension of size one is removed from the result.
    """
    if not isinstance(module, nn.Module) or not callable(criterion):
        raise TypeError(
            "per_sample: expected a pair (module, criterion), got "
            f"({type(module).__name__}, {type(criterion).__name__})"
        )

    def loss(params: Params, inputs: Any, *targets: Any) -> Any:
        if not torch.compiler.is_compiling():
            check_module(module)
        leaves, spec = tree.flatten((inputs, targets), tree.is_tensor_dict)
        inputs, targets = tree.unflatten(spec, [_as_batch(leaf) for leaf in leaves])
        args = contents(inputs) if is_of(inputs, (tuple, list)) else (inputs,)
        kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping) and not tree.is_tensor_dict(inputs):
            args, kwargs = (), dict(inputs)
        value = criterion(functional_call(module, params, args, kwargs), *targets)
        if outputs:
            leaves, spec = tree.flatten(value, tree.is_tensor_dict)
            return tree.unflatten(spec, [_first_row(leaf) for leaf in leaves])
        is_number = isinstance(value, torch.Tensor) and value.numel() == 1
        return value.reshape(()) if is_number else value

    check_module(module)
    trainable(module)
    return loss


def _as_batch(leaf: Any) -> Any:
    return leaf.unsqueeze(0) if _has_shape(leaf) else leaf


def _first_row(leaf: Any) -> Any:
    return leaf.squeeze(0) if _has_shape(leaf) and leaf.dim() else leaf


def _has_shape(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or tree.is_tensor_dict(leaf)


def trainable(module: nn.Module) -> Params:
    """The parameters of a module that require grad, by name, detached."""
    params = {
        name: param.detach() for name, param in module.named_parameters() if param.requires_grad
    }
    if not params:
        raise ValueError(
            f"per_sample: no parameter of {type(module).__name__} requires grad, so there is "
            "nothing to differentiate"
        )
    return params


@contextmanager
def own_buffers(module: nn.Module, api: str) -> Iterator[None]:
    """A context after which no buffer is a wrapper of a transform.

    A forward may assign to a buffer, ``self.count = self.count + 1``. Under transforms the new
    buffer is then a wrapper, which can't be used after the transform has ended. It is replaced by
    the value inside. If that has a value for each example, the old buffer is restored, and an error
    is raised.

    Raises:
        ValueError: The forward assigned a value that depends on the example to a buffer.
    """
    before = [(part, _buffers_of(part)) for part in module.modules()]
    try:
        yield
    finally:
        mixed = [name for part, old in before for name in _replace_wrappers(part, old)]
    if mixed:
        raise ValueError(
            f"{api}: the forward assigns the values of an example to buffer {mixed[0]!r}, which "
            "all examples share. If it does so only in training mode, put the module in evaluation "
            "mode. Otherwise return the values as aux, with has_aux=True"
        )


def _buffers_of(part: nn.Module) -> dict[str, torch.Tensor]:
    return dict(part.named_buffers(recurse=False, remove_duplicate=False))


def _replace_wrappers(part: nn.Module, old: dict[str, torch.Tensor]) -> list[str]:
    """Replace wrappers by their values; returns the names of buffers with a value per example."""
    mixed = []
    for name, buffer in _buffers_of(part).items():
        value = buffer if buffer is old.get(name) else _torch.alive(buffer)
        if _torch.is_batched(value) and _torch.level_of(value) > _torch.functorch_depth():
            mixed.append(name)
            setattr(part, name, old.get(name))
        elif value is not buffer:
            setattr(part, name, value)
    return mixed


def check_module(module: nn.Module) -> None:
    """Raises ``ValueError`` if a module mixes examples, see NOTE [batch norm], or is sharded."""
    for name, part in module.named_modules():
        kinds = {cls.__name__ for cls in type(part).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise ValueError(
                f"per_sample: {name or 'the module'!r} is sharded by FSDP, which sums the "
                "gradients of all processes, so per-example gradients are not available. Keep the "
                "whole module in every process, and pass process_group to sum over processes"
            )
        # This includes synchronised and lazy ones. Instance normalisation is not a subclass.
        is_batch_norm = isinstance(part, _torch.BatchNorm)
        if is_batch_norm and (part.training or part.running_mean is None):
            mode = "in training mode" if part.training else "without running statistics"
            raise ValueError(
                f"per_sample: {type(part).__name__} {name!r} {mode} normalises with statistics of "
                "the whole batch, so the gradient of one example is not defined. Put it in "
                "evaluation mode (with running statistics), or use GroupNorm, LayerNorm or "
                "InstanceNorm instead"
            )
