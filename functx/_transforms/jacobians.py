"""Jacobians, by a pullback for each element of the output or a pushforward for each of the input.

In reverse mode the cotangents are the rows of an identity matrix, which is cut into one block of
columns for each output. ``vmap`` of the pullback computes a chunk of rows at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.func import vmap

from functx import _remat, _torch
from functx._core import (
    Argnums,
    Randomness,
    dispatches_on_arguments,
    norm_derivatives,
    told,
    tree,
    validate,
)
from functx._remat import sharding
from functx._transforms.reverse_mode import Pullback, adding_remedies, record

P = ParamSpec("P")


@dispatches_on_arguments
@told
def jacrev(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable[P, Any]:
    """The Jacobian of a function, by reverse mode: one pullback for each element of the output.

    This is :func:`torch.func.jacrev`. Without chunks, the pullback frees residuals as it runs.

    Args:
        func: Takes pytrees, and returns a pytree of real floating point tensors (with ``has_aux``,
            a pair of that and a pytree).
        argnums: As for :func:`functx.grad`.
        has_aux: Whether ``func`` returns ``(output, aux)``.
        chunk_size: How many rows to compute at a time; by default all. With 1, rows are computed in
            a loop without ``vmap`` and its limitations.
        _preallocate_and_copy: An undocumented option of torch, which has no effect here.

    Returns:
        A function that returns, for each output of shape ``m`` and each differentiated leaf of
        shape ``n``, a tensor of shape ``m + n``, in a pytree like the output whose leaves are
        pytrees like the argument; with ``has_aux``, the pair of that and ``aux``.

    Raises:
        TypeError: ``func`` is not callable.
        ValueError: ``chunk_size`` is not positive; or, at the call, a leaf is not a tensor.
        RuntimeError: As :func:`functx.grad`; or an argument or output is complex.

    Example:
        >>> import torch, functx
        >>> functx.jacrev(lambda x: x**2)(torch.tensor([1.0, 2.0]))
        tensor([[2., 0.],
                [0., 4.]])
    """
    validate.check_argnums(argnums, "jacrev")
    if chunk_size is not None and chunk_size <= 0:
        raise ValueError(f"jacrev: `chunk_size` should be greater than 0, got {chunk_size}")

    def transformed(*args: Any, **kwargs: Any) -> Any:
        validate.check_real(args, "jacrev", "inputs")
        api = "jacrev(f)(*args)"
        output, aux, pullback = record(func, args, kwargs, argnums, has_aux=has_aux, api=api)
        validate.check_real(output, "jacrev", "outputs")
        outs, outputs = tree.flatten(output)
        sizes = [out.numel() for out in outs]
        blocks = [rows.split(sizes) for rows in _rows(pullback, outs, outputs, chunk_size)]

        def of_output(i: int) -> Any:
            parts = [b[i].view(outs[i].shape + b[i].shape[1:]) for b in blocks]
            return tree.unflatten(pullback.inputs_spec, parts)

        jacobian = tree.unflatten(outputs, map(of_output, range(len(outs))))
        return (jacobian, aux) if has_aux else jacobian

    return told(transformed, like=func)


def _rows(
    pullback: Pullback, outs: list[Tensor], spec: Any, chunk_size: int | None
) -> list[Tensor]:
    """All rows of the Jacobian, one tensor for each input, of shape ``(rows, *leaf.shape)``."""
    sizes = [out.numel() for out in outs]
    total = sum(sizes)
    if total == 0:
        return [leaf.new_zeros(0, *leaf.shape) for leaf in pullback.inputs]

    def pull(units: list[Tensor], keep: bool) -> list[Tensor]:
        return tree.leaves(pullback(tree.unflatten(spec, units), retain_graph=keep))

    def row(index: Tensor, keep: bool) -> list[Tensor]:
        units = zip(every.split(sizes), outs)
        ones = [(i == index).to(out.device, out.dtype).view(out.shape) for i, out in units]
        return pull(ones, keep)

    if total == 1:
        return [leaf.unsqueeze(0) for leaf in pull([torch.ones_like(out) for out in outs], False)]
    every = torch.arange(total, device=outs[0].device)
    chunks = every.split(chunk_size or total)
    parts = []
    for n, chunk in enumerate(chunks, 1):
        one = functools.partial(row, keep=n < len(chunks))  # the last chunk frees the residuals
        if chunk_size == 1:
            parts.append([t.unsqueeze(0) for t in one(chunk[0])])
        else:
            parts.append(vmap(one)(chunk))
    return parts[0] if len(parts) == 1 else [torch.cat(rows) for rows in zip(*parts)]


@dispatches_on_arguments
def jacfwd(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    randomness: Randomness = "error",
) -> Callable[P, Any]:
    """The Jacobian of a function, by forward mode: :func:`torch.func.jacfwd`."""
    validate.check_argnums(argnums, "jacfwd")
    of_torch = torch.func.jacfwd(func, argnums, has_aux, randomness=randomness)
    if torch.compiler.is_dynamo_compiling():
        return of_torch

    @functools.wraps(of_torch)
    def transformed(*args: Any) -> Any:
        positions = validate.resolve_argnums(argnums, len(args), "jacfwd")
        validate.check_inputs(args, positions, "jacfwd(f)(*args)")
        sharding.check_forward_mode([args[n] for n in positions], "jacfwd(f)(*args)")
        with adding_remedies(), norm_derivatives.around(args), _torch.RequiresGradAllowed():
            return of_torch(*args)

    return _remat.reported(transformed, "jacfwd")


@dispatches_on_arguments
@told
def hessian(func: Callable[P, Any], argnums: Argnums = 0) -> Callable[P, Any]:
    """The Hessian of a function, forward over reverse: ``jacfwd(jacrev(func))``.

    This is :func:`torch.func.hessian`. Arguments and errors are those of :func:`functx.jacrev`.

    Returns:
        A function that returns, for an output of shape ``m`` and two leaves of shapes ``n`` and
        ``k``, a tensor of shape ``m + n + k``, in the nested pytrees of two Jacobians.

    Example:
        >>> import torch, functx
        >>> functx.hessian(lambda x: x[0] * x[1])(torch.tensor([3.0, 5.0]))
        tensor([[0., 1.],
                [1., 0.]])
    """
    validate.check_argnums(argnums, "hessian")
    of_gradient: Callable[..., Any] = jacfwd(jacrev(func, argnums), argnums)
    return told(lambda *args, **kwargs: of_gradient(*args, **kwargs), like=func)
