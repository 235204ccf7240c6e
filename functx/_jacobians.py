"""Jacobians: a pullback for each number of the output, or a pushforward for each of the input.

In reverse mode, outputs of ``m_1, m_2, ...`` numbers have the ``m_1 + m_2 + ...`` rows of an
identity matrix as cotangents, cut into one block of columns an output. A chunk of rows is one
``vmap`` of the pullback; only the last chunk may free the residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.func import vmap

from functx import _norms, _remat, _tree, _validate
from functx._arrays import by_arguments
from functx._pullback import Pullback, record
from functx._torch import compiler
from functx._transforms import named_after
from functx._validate import Argnums, Randomness

P = ParamSpec("P")


@by_arguments
@compiler.told
def jacrev(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable[P, Any]:
    """The Jacobian of a function, by reverse mode: one pullback for each number of the output.

    As :func:`torch.func.jacrev`; the last pullback frees the residuals as it goes.

    Args:
        func: Takes pytrees, and returns a pytree of real floating point tensors (with ``has_aux``,
            a pair of that and a pytree).
        argnums: As for :func:`functx.grad`.
        has_aux: Whether ``func`` returns ``(output, aux)``.
        chunk_size: How many rows to compute at a time; by default all in one. With 1 the rows are
            computed in a loop without ``vmap``, and are free of its limitations.

    Returns:
        A function that returns, for each output of shape ``m`` and each differentiated leaf of
        shape ``n``, a tensor of shape ``m + n``, in a pytree like the output whose leaves are
        pytrees like the argument; with ``has_aux``, the pair of that and ``aux``.

    Raises:
        TypeError: ``func`` can't be called.
        ValueError: ``chunk_size`` is not positive; or, at the call, a leaf to differentiate is not
            a tensor.
        RuntimeError: As :func:`functx.grad`, or an argument or output is complex.

    Example:
        >>> import torch, functx
        >>> functx.jacrev(lambda x: x**2)(torch.tensor([1.0, 2.0]))
        tensor([[2., 0.],
                [0., 4.]])
    """
    _validate.check_callable(func, "jacrev")
    _validate.check_argnums(argnums, "jacrev")
    if chunk_size is not None and chunk_size <= 0:
        raise ValueError(f"jacrev: `chunk_size` should be greater than 0, got {chunk_size}")

    @named_after(func)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        _validate.check_real(args, "jacrev", "inputs")
        output, aux, pullback = record(
            func,
            args,
            kwargs,
            _validate.resolve_argnums(argnums, len(args), "jacrev"),
            has_aux=has_aux,
            check_output=_check_output,
            api="jacrev(f)(*args)",
        )
        wrt = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
        leaves, inputs = _tree.flatten(wrt)
        outs, outputs = _tree.flatten(output)
        blocks = _pull_back_basis(
            pullback, outs, outputs, leaves, chunk_size, _preallocate_and_copy
        )
        sizes = [out.numel() for out in outs]
        rows = zip(*(block.split(sizes) for block in blocks)) if blocks else ([] for _ in outs)
        made = [
            _tree.unflatten(inputs, [r.view(out.shape + x.shape) for r, x in zip(row, leaves)])
            for out, row in zip(outs, rows)
        ]
        jacobian = _tree.unflatten(outputs, made)
        return (jacobian, aux) if has_aux else jacobian

    return transformed


def _check_output(output: Any) -> None:
    _validate.check_outputs(output, "jacrev(f)(*args)")
    _validate.check_real(output, "jacrev", "outputs")


def _pull_back_basis(
    pullback: Pullback,
    outs: Sequence[Tensor],
    spec: _tree.TreeSpec,
    leaves: Sequence[Tensor],
    chunk_size: int | None,
    preallocate: bool,
) -> list[Tensor]:
    """All rows of the Jacobian, one tensor for each input, of shape ``(rows, *leaf.shape)``.

    To ``preallocate`` them and copy each chunk at once, so that chunks and result are not alive
    together, is not possible where ``vmap`` maps the Jacobian and not the input.
    """
    total = sum(out.numel() for out in outs)
    if total == 0:
        return [leaf.new_zeros(0, *leaf.shape) for leaf in leaves]
    # One chunk is spelled out, so that a symbolic number of rows stays symbolic.
    size = total if chunk_size is None else chunk_size
    starts: Sequence[int] = [0] if chunk_size is None else range(0, total, size)
    whole: list[Tensor] = []
    if preallocate and len(starts) > 1:
        whole = [leaf.new_zeros(total, *leaf.shape) for leaf in leaves]
    chunks: list[list[Tensor]] = []
    for start in starts:
        stop = total if start == starts[-1] else start + size
        pull = functools.partial(pullback, retain_graph=start != starts[-1])
        basis = _tree.unflatten(spec, list(_identity(outs, start, stop)))
        chunks.append(_rows(pull, basis, chunk_size == 1 or total == 1))
        del basis
        if whole:
            for place, part in zip(whole, chunks.pop()):
                place[start:stop].copy_(part)
    return whole or [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*chunks)]


def _rows(pull: Callable[..., Any], basis: Any, is_one: bool) -> list[Tensor]:
    """Rows of the Jacobian for rows of the identity; one alone is computed without ``vmap``."""
    if not is_one:
        return _tree.leaves(vmap(pull)(basis))
    row = pull(_tree.map_(lambda block: block.squeeze(0), basis))
    return [leaf.unsqueeze(0) for leaf in _tree.leaves(row)]


def _identity(outs: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Rows ``start`` to ``stop`` of the identity, cut into blocks shaped like ``outs``."""
    first_column = 0
    for out in outs:
        block = out.new_zeros(stop - start, out.numel())
        block.diagonal(start - first_column).fill_(1)
        yield block.view(stop - start, *out.shape)
        first_column += out.numel()


@by_arguments
def jacfwd(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    randomness: Randomness = "error",
) -> Callable[P, Any]:
    """The Jacobian of a function, by forward mode: :func:`torch.func.jacfwd`."""
    _validate.check_argnums(argnums, "jacfwd")
    of_torch = torch.func.jacfwd(func, argnums, has_aux, randomness=randomness)
    if torch.compiler.is_dynamo_compiling():
        return of_torch

    @functools.wraps(of_torch)
    def transformed(*args: Any) -> Any:
        positions = _validate.resolve_argnums(argnums, len(args), "jacfwd")
        _validate.check_inputs(args, positions, "jacfwd(f)(*args)")
        _validate.check_derivatives_exist("jacfwd")
        with _norms.around(args):
            return of_torch(*args)

    return _remat.by_primals(transformed, "jacfwd")


@compiler.told
def hessian(func: Callable[P, Any], argnums: Argnums = 0) -> Callable[P, Any]:
    """The Hessian of a function, forward over reverse: ``jacfwd(jacrev(func))``.

    As :func:`torch.func.hessian`, with the lean :func:`functx.jacrev`.

    Args:
        func: Takes pytrees of real tensors, and returns a pytree of them.
        argnums: As for :func:`functx.grad`.

    Returns:
        A function that returns, for an output of shape ``m`` and two leaves of shapes ``n`` and
        ``k``, a tensor of shape ``m + n + k``, in the nested pytrees of two Jacobians.

    Raises:
        TypeError: As :func:`functx.jacrev`.
        RuntimeError: As :func:`functx.jacrev`.
        ValueError: As :func:`functx.jacrev`.

    Example:
        >>> import torch, functx
        >>> functx.hessian(lambda x: x[0] * x[1])(torch.tensor([3.0, 5.0]))
        tensor([[0., 1.],
                [1., 0.]])
    """
    _validate.check_callable(func, "hessian")
    _validate.check_argnums(argnums, "hessian")
    of_gradient = jacfwd(jacrev(func, argnums), argnums)

    @named_after(func)
    def transformed(*args: Any) -> Any:
        return of_gradient(*args)

    return transformed
