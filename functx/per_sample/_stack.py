"""Results of all examples, from those of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functx import _torch, _tree
from functx.per_sample._batch import Batch, Counted


def followed(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether something differentiates or traces what is made of tensors."""
    return _torch.transforming() or any(leaf.requires_grad for leaf in leaves)


class Stack:
    """Pytrees of tensors with leading dimension ``c``, one a chunk, made one of ``B``.

    Rows are copied to their place at once, so that chunks and result are not alive together; unless
    something differentiates or traces the result, which could not follow the copies. The place
    follows from the chunk alone: a chunk that is put twice is there once.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[torch.Tensor]] = {}  # by the position of their first example
        self._reserved: set[int] = set()  # positions of parts with a place for a whole batch
        self._spec: _tree.TreeSpec = None

    def put(self, batch: Batch, tree: Any) -> None:
        """Put the rows of a chunk in their place."""
        leaves, self._spec = _tree.flatten(tree)
        begin, size = batch.whole
        if begin not in self._reserved:
            if batch.start > begin or batch.size == size or followed(leaves):
                self._parts[batch.start] = leaves
                return
            self._parts[begin] = [part.new_empty(size, *part.shape[1:]) for part in leaves]
            self._reserved.add(begin)
        first = batch.start - begin
        for whole, part in zip(self._parts[begin], leaves):
            whole[first : first + batch.size] = part

    def before(self, batch: Batch) -> torch.Tensor:
        """The rows of the only leaf that come before those of a chunk."""
        found = [self._parts[start][0] for start in sorted(self._parts) if start < batch.start]
        return (torch.cat(found) if len(found) > 1 else found[0])[: batch.start]

    def close(self, counted: Counted) -> Any:
        """All rows, zeros where an example does not count."""
        columns = zip(*(self._parts[start] for start in sorted(self._parts)))
        whole = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in columns]
        self._parts = {}
        return _tree.unflatten(self._spec, [counted.rows(leaf) for leaf in whole])
