"""Jacobians from pullbacks: feed a pullback the standard basis of its outputs, sort what comes out.

With outputs of ``m_1, m_2, ...`` numbers, the cotangents are the ``m_1 + m_2 + ...`` rows of an
identity matrix, cut into one block of columns an output. Pulling back a chunk of rows is one
``vmap`` of the pullback; only the last chunk may free the residuals.

One row needs no ``vmap``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.func import vmap

from functx import _tree
from functx._pullback import Pullback


def pull_back_basis(
    pullback: Pullback,
    output: Any,
    inputs: Any,
    chunk_size: int | None,
    *,
    preallocate: bool,
) -> list[torch.Tensor]:
    """All rows of the Jacobian, one tensor an input leaf, of shape ``(rows, *leaf.shape)``.

    Args:
        pullback: Of the function to differentiate; its residuals are freed.
        output: What the function returned.
        inputs: What it was differentiated with respect to.
        chunk_size: How many rows to pull back at a time; all if ``None``.
        preallocate: Copy each chunk to its place at once, so that chunks and result are not alive
            together; not possible where an input is the same for a whole batch and the Jacobian
            is not.

    Returns:
        The rows, in the order of the flattened inputs.
    """
    outputs, spec = _tree.flatten(output)
    leaves = _tree.leaves(inputs)
    total = sum(leaf.numel() for leaf in outputs)
    if total == 0:
        return [leaf.new_zeros(0, *leaf.shape) for leaf in leaves]
    # One chunk is spelled out, so that a symbolic number of rows stays symbolic.
    size = total if chunk_size is None else min(chunk_size, total)
    starts = [0] if chunk_size is None else list(range(0, total, size))
    if preallocate and len(starts) > 1:
        result = [leaf.new_zeros(total, *leaf.shape) for leaf in leaves]
    else:
        result, preallocate = [], False

    chunks: list[list[torch.Tensor]] = []
    for start in starts:
        stop = total if start == starts[-1] else start + size
        pull = functools.partial(pullback, retain_graph=start != starts[-1])
        if chunk_size == 1 or total == 1:
            row = [block.squeeze(0) for block in _identity_rows(outputs, start, stop)]
            rows = [leaf.unsqueeze(0) for leaf in _tree.leaves(pull(_tree.unflatten(spec, row)))]
            del row
        else:
            basis = _tree.unflatten(spec, _identity_rows(outputs, start, stop))
            rows = _tree.leaves(vmap(pull)(basis))
            del basis
        if preallocate:
            for whole, part in zip(result, rows, strict=True):
                whole[start:stop].copy_(part)
        else:
            chunks.append(rows)
        del rows
    if preallocate:
        return result
    if len(chunks) == 1:
        return chunks[0]
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def assemble(rows: Sequence[torch.Tensor], output: Any, inputs: Any, *, single: bool) -> Any:
    """The Jacobian as users see it: a pytree like ``output`` of pytrees like ``inputs``.

    Args:
        rows: What `pull_back_basis` returned.
        output: What the function returned.
        inputs: The tuple of arguments it was differentiated with respect to.
        single: Whether the tuple stands for its only element.

    Returns:
        The pytree, with a tensor of shape ``(*output_leaf.shape, *input_leaf.shape)`` for each
        pair of leaves.
    """
    outputs, output_spec = _tree.flatten(output)
    leaves, input_spec = _tree.flatten(inputs)
    numels = [leaf.numel() for leaf in outputs]
    by_input = [torch.split(block, numels, dim=0) for block in rows]
    blocks = []
    for index, out in enumerate(outputs):
        tree = _tree.unflatten(
            input_spec,
            (
                split[index].view(out.shape + leaf.shape)
                for split, leaf in zip(by_input, leaves, strict=True)
            ),
        )
        blocks.append(tree[0] if single else tree)
    return _tree.unflatten(output_spec, blocks)


def _identity_rows(
    outputs: Sequence[torch.Tensor], start: int, stop: int
) -> Iterator[torch.Tensor]:
    """Rows ``start`` to ``stop`` of the identity, cut into blocks shaped like ``outputs``."""
    first_column = 0
    for out in outputs:
        block = out.new_zeros(stop - start, out.numel())
        block.diagonal(start - first_column).fill_(1)
        yield block.view(stop - start, *out.shape)
        first_column += out.numel()
