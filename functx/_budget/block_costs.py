"""Measure the cost of each block of a chain: bytes on the tape, bytes in the backward, FLOPs.

The chain runs forward and is pulled back once, inside the transforms that surround the call.
Autograd numbers nodes in the order in which they are made, and runs the newest first. So the number
of the running node shows which block is being pulled back.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._budget.op_trace import OperationBlock
from functx._budget.solver import BlockCosts, Handed, Tree, numbers_in
from functx._core import LiveStorages, no_collection, standing_in, storages_of
from functx._core import tree as _tree
from functx._policies import flops_of
from functx._remat import Options, run, tape_of
from functx._transforms import grad

Blocks = Sequence[Callable[[Any], Any]]


def walk(tree: Tree, blocks: Blocks, x: Any, options: Options | None = None) -> Any:
    """Run a chain with the regions of ``tree``: its tuples and lists of block numbers."""
    options = Options(name="a chain") if options is None else options
    for part in tree:
        x = blocks[part](x) if isinstance(part, int) else _region(part, blocks, x, options)
    return x


def _region(tree: Tree, blocks: Blocks, x: Any, options: Options) -> Any:
    """Run a part of a chain as a region."""
    numbers = numbers_in(tree)
    name = f"blocks {numbers[0]} to {numbers[-1]} of {options.name}"
    own = replace(options, name=name, budget=None)
    if not isinstance(blocks[numbers[0]], OperationBlock):
        return run(lambda x: walk(tree, blocks, x, own), (x,), {}, own)
    reads = set().union(*(blocks[n].reads for n in numbers))
    needed = {n: t for n, t in x.items() if n in reads}
    # Values that no block of the region reads go around it, so the region does not save them.
    around = {n: t for n, t in x.items() if n not in reads}
    return {**around, **run(lambda x: walk(tree, blocks, x, own), (needed,), {}, own)}


def there_and_back(f: Callable[[Any], Any], x: Any, wanted: Sequence[bool]) -> Any:
    """Run ``f(x)`` and pull back once: with plain autograd, or inside a transform with `grad`.

    Returns the gradients of the ``wanted`` tensors in ``x``, and of leaves that ``f`` closes over.
    """
    tensors, how = _tree.partition(x)
    chosen = [t for t, w in zip(tensors, wanted) if w]

    def forward(chosen: Sequence[Tensor]) -> list[Tensor]:
        it = iter(chosen)
        out = f(_tree.combine([next(it) if w else t for t, w in zip(tensors, wanted)], how))
        return [t for t in _tree.partition(out)[0] if t.grad_fn is not None]

    if _torch.peek_interpreter() is None:
        leaves = [t.detach().requires_grad_() for t in chosen]
        outs = forward(leaves)
        captured = [node.variable for node in tape_of(outs, 0) if hasattr(node, "variable")]
        inputs = {id(t): t for t in (*leaves, *captured)}
        if not outs or not inputs:
            return ()
        ones = [torch.ones_like(o) for o in outs]
        return torch.autograd.grad(outs, [*inputs.values()], ones, allow_unused=True)

    def number(chosen: list[Tensor]) -> Tensor:
        parts = [(torch.view_as_real(o) if o.is_complex() else o).sum() for o in forward(chosen)]
        return torch.stack(parts).sum() if parts else chosen[0].new_zeros(())

    # This `grad` replaces the derivative that the transforms around the call take.
    with standing_in():
        return grad(number)(chosen) if chosen else forward(chosen)[:0]


def peak_of(f: Callable[[Any], Any], x: Any, wanted: Sequence[bool]) -> int:
    """The most bytes that ``f(x)`` and its pullback allocate at once."""
    with no_collection(), LiveStorages() as storages:
        there_and_back(f, x, wanted)
    return storages.peak


class MeasuredChain(LiveStorages):
    """Runs a chain forward and back, and records the bytes and FLOPs of each block.

    Args:
        blocks: the chain.
        x: a pytree of tensors that are on no tape.
        required: which of these tensors are differentiated.
    """

    def __init__(self, blocks: Blocks, x: Any, required: Sequence[bool]) -> None:
        super().__init__()
        # For each boundary between blocks: the storages that cross it, the bytes that are live
        # there in the forward, and the sequence number of the next node that autograd makes.
        self.states: list[list[Handed]] = []
        self._live: list[int] = []
        self._first_nodes: list[int] = []
        # For each block: the most bytes live in its backward, and the FLOPs of its forward.
        self._backward = [0] * len(blocks)
        self._work = [0] * len(blocks)
        self._pulled = len(blocks)  # the block that is pulled back now, or was last

        def chain(state: Any) -> Any:
            for block in blocks:
                self._cross(state)
                state = block(state)
            self._cross(state)
            return state

        with no_collection(), self:
            there_and_back(chain, x, required)
        self._pull_back(0)

    def _cross(self, state: Any) -> None:
        """Record the boundary that the forward has reached, with the values that cross it."""
        earlier = {id(h.storage()): h for h in self.states[-1]} if self.states else {}
        storages = {id(s): s for t in _tree.partition(state)[0] for s in storages_of(t)}
        at = len(self.states)
        self.states.append(
            [
                earlier.get(key) or Handed(weakref.ref(s), s.nbytes(), made=at)
                for key, s in storages.items()
            ]
        )
        self._first_nodes.append(_torch.next_sequence_number())
        self._live.append(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it for its block."""
        at, node = len(self.states) - 1, _torch.current_node()
        is_backward = node is not None and at == len(self._work)
        if is_backward:
            number = _torch.sequence_number(node)
            self._pull_back(bisect.bisect_right(self._first_nodes, number) - 1)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if is_backward and self._pulled < len(self._work):
            self._backward[self._pulled] = max(self._backward[self._pulled], self.live)
        elif at < len(self._work) and not func.is_view and out is not NotImplemented:
            self._work[at] += flops_of(func, args, kwargs or {}, out)
        return out

    def _pull_back(self, block: int) -> None:
        """Note that ``block`` is pulled back, so all later blocks are done."""
        if block < self._pulled:
            # A storage that was freed since the last block began was on that block's tape.
            for h in itertools.chain.from_iterable(self.states):
                if h.kept < 0 and h.storage() is None:
                    h.kept = self._pulled
            self._pulled = block

    def costs(self) -> list[BlockCosts]:
        """The cost of each block."""
        # At each boundary, leave out storages that no block before it has on its tape.
        unsaved = [sum(h.nbytes for h in s if h.kept >= i) for i, s in enumerate(self.states)]
        saved = [live - nbytes for live, nbytes in zip(self._live, unsaved)]
        tapes = [after - before for before, after in itertools.pairwise(saved)]
        backward = [most - before for most, before in zip(self._backward, saved)]
        return [*map(BlockCosts, tapes, backward, self._work)]
