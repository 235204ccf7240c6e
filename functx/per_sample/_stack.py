"""Results with one entry an example, put together from chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functx import _torch, _tree


class Stack:
    """Pytrees of tensors with leading dimension ``c``, one a chunk, made one of ``B``.

    Rows are copied to their place at once, so that chunks and result are not alive together; unless
    something differentiates or traces the result, which could not follow the copies.
    """

    def __init__(self) -> None:
        self._parts: list[list[torch.Tensor]] = []
        self._spec: _tree.TreeSpec = None
        self._reserved = self._filled = 0

    def reserve(self, size: int) -> None:
        """So many rows will come in several chunks, from those on that have come."""
        self._reserved = size

    def add(self, tree: Any) -> None:
        """Add the rows of a chunk."""
        self.adding(tree)()

    def adding(self, tree: Any) -> Callable[[], None]:
        """Put the rows of a chunk in their place; they count when what is returned is called."""
        leaves, spec = _tree.flatten(tree)
        rows = len(leaves[0]) if leaves else 0
        begun: list[list[torch.Tensor]] = []
        filled = self._filled
        if filled:
            for whole, part in zip(self._parts[-1], leaves):
                whole[filled : filled + rows] = part
            filled += rows
        elif rows < self._reserved and leaves and not followed(leaves):
            begun = [[part.new_empty(self._reserved, *part.shape[1:]) for part in leaves]]
            for whole, part in zip(begun[0], leaves):
                whole[:rows] = part
            filled = rows
        elif leaves:
            begun = [leaves]

        def count() -> None:
            self._spec = spec
            self._parts += begun
            self._filled = filled
            if leaves and filled == self._reserved:
                self._filled = self._reserved = 0

        return count

    def so_far(self) -> list[torch.Tensor]:
        """The rows that have come, of the only leaf."""
        found = [leaf for (leaf,) in self._parts]
        if self._filled:
            found[-1] = found[-1][: self._filled]
        return found

    def close(self, kept: torch.Tensor | None, size: int, empty: bool) -> Any:
        """All rows; the arguments are those of ``Job.result``.

        Returns:
            The pytree, with zeros where an example does not count.
        """
        columns = list(zip(*self._parts))
        whole = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in columns]
        self._parts = []
        if empty:
            whole = [leaf[:0] for leaf in whole]
        if kept is not None:
            whole = [
                leaf.new_zeros(size, *leaf.shape[1:]).index_copy(0, kept.to(leaf.device), leaf)
                for leaf in whole
            ]
        return _tree.unflatten(self._spec, whole)


def followed(leaves: list[torch.Tensor]) -> bool:
    """Whether something differentiates or traces what is made of tensors."""
    return _torch.transforming() or any(leaf.requires_grad for leaf in leaves)
