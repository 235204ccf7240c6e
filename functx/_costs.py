"""What the blocks of a chain cost, measured: bytes on a tape, bytes while they run, work.

The chain runs forward and is pulled back once, where it is called: inside of the same transforms.
Autograd numbers its nodes as they are made, and pulls the youngest back first, so the number of the
node that runs tells which block is being pulled back.
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

from functx import _torch, _tree
from functx._aten import flops_of
from functx._chain import BlockCosts, ChainCosts, Tree, numbers_in
from functx._recording import OperationBlock
from functx._remat import Options, run, tape_of
from functx._storages import LiveStorages, no_collection, storages_of
from functx._transforms import grad

Blocks = Sequence[Callable[[Any], Any]]


def walk(tree: Tree, blocks: Blocks, x: Any, options: Options | None = None) -> Any:
    """Run a chain as a tree says: blocks by number, tuples or lists as regions."""
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
    passed = {n: t for n, t in x.items() if n not in reads}  # it is no input of the region
    return {**passed, **run(lambda x: walk(tree, blocks, x, own), (needed,), {}, own)}


def there_and_back(
    body: Callable[..., Any], tensors: Sequence[Tensor], wanted: Sequence[bool]
) -> Any:
    """Run ``body`` and pull back once, where this is called: on plain autograd, or by `grad`.

    Returns the gradients of the ``wanted`` tensors, and of leaves that ``body`` reaches otherwise.
    """
    given = [t for t, w in zip(tensors, wanted) if w]

    def forward(given: Sequence[Tensor]) -> list[Tensor]:
        it = iter(given)
        out = body(*(next(it) if w else t for t, w in zip(tensors, wanted)))
        return [t for t in _tree.parted(out)[0] if t.grad_fn is not None]

    if _torch.peek_interpreter() is None:
        leaves = [t.detach().requires_grad_() for t in given]
        outs = forward(leaves)
        below = [node.variable for node in tape_of(outs, 0) if hasattr(node, "variable")]
        asked = {id(t): t for t in (*leaves, *below)}
        if not outs or not asked:
            return ()
        ones = [torch.ones_like(o) for o in outs]
        return torch.autograd.grad(outs, [*asked.values()], ones, allow_unused=True)

    def number(given: list[Tensor]) -> Tensor:
        parts = [(torch.view_as_real(o) if o.is_complex() else o).sum() for o in forward(given)]
        return torch.stack(parts).sum() if parts else given[0].new_zeros(())

    return grad(number)(given) if given else forward(given)[:0]


def peak_of(body: Callable[..., Any], tensors: Sequence[Tensor], wanted: Sequence[bool]) -> int:
    """The most bytes live while ``body`` runs and is pulled back, beside what was there before."""
    with no_collection(), LiveStorages() as storages:
        there_and_back(body, tensors, wanted)
    return storages.peak


class MeasuredChain(LiveStorages):
    """Follows some blocks forward and back, called on a pytree of tensors off all tapes.

    ``required`` says which of the tensors are differentiated.
    """

    def __init__(self, blocks: Blocks, x: Any, required: Sequence[bool]) -> None:
        super().__init__()
        n = len(blocks)
        self._forward, self._backward, self._work = ([0] * n for _ in range(3))
        self._pulled = n  # the number of the block that is pulled back, or was last
        # Of each cut between blocks: the number of the first node that autograd makes after it,
        # bytes live in the forward and in the backward, and of what goes from one block to the
        # next the storages, their sizes, and which block made them.
        self._first_nodes: list[int] = []
        self._live: list[int] = []
        self._back = [0] * (n + 1)
        self._states: list[list[tuple[weakref.ref[Any], int, int]]] = []
        self._given, self._unsaved = ([[0] * (n + 1) for _ in range(n + 1)] for _ in range(2))
        tensors, how = _tree.parted(x)

        def chain(*leaves: Tensor) -> Any:
            state = _tree.joined(leaves, how)
            for block in blocks:
                self._cross(state)
                state = block(state)
            self._cross(state)
            return state

        with no_collection(), self:
            there_and_back(chain, tensors, required)

    def _cross(self, state: Any) -> None:
        """The forward goes from one block to the next."""
        at = len(self._states)
        known = {id(s()): made for s, _, made in self._states[-1]} if at else {}
        storages = {id(s): s for t in _tree.parted(state)[0] for s in storages_of(t)}
        refs = [(weakref.ref(s), s.nbytes(), known.get(k, at)) for k, s in storages.items()]
        self._states.append(refs)
        self._first_nodes.append(_torch.next_sequence_number())
        self._live.append(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it for its block."""
        n, at, node = len(self._work), len(self._states) - 1, _torch.current_node()
        is_backward = node is not None and at == n
        if is_backward:
            number = _torch.sequence_number(node)
            self._pull_back(bisect.bisect_right(self._first_nodes, number) - 1)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        peaks, block = (self._backward, self._pulled) if is_backward else (self._forward, at)
        if block < n:
            peaks[block] = max(peaks[block], self.live)
            if not (is_backward or func.is_view or out is NotImplemented):
                self._work[block] += flops_of(func, args, kwargs or {}, out)
        return out

    def _pull_back(self, block: int) -> None:
        """A block is pulled back: of later ones nothing is, from now on."""
        for j in range(block + 1, self._pulled + 1):
            self._back[j] = self.live
            given = [(made, nbytes) for s, nbytes, made in self._states[j] if s() is not None]
            for i, state in enumerate(self._states[: j + 1]):
                self._given[i][j] = sum(nbytes for made, nbytes in given if made > i)
                self._unsaved[i][j] = sum(nbytes for s, nbytes, _ in state if s() is None)
        self._pulled = min(self._pulled, block)

    def costs(self) -> ChainCosts:
        """What each block costs."""
        self._pull_back(0)
        saved = [live - self._unsaved[i][i] for i, live in enumerate(self._live)]
        later = [*(back - s for back, s in zip(self._back[1:-1], saved[1:])), 0]
        tapes = [after - s for s, after in itertools.pairwise(saved)]
        forward, backward = (
            [most - s for most, s in zip(peaks, saved)] for peaks in (self._forward, self._backward)
        )
        blocks = [*map(BlockCosts, forward, tapes, backward, later, self._work)]
        leaving = [
            [*(sum(nbytes for _, nbytes, made in s if made > i) for s in self._states[:-1]), 0]
            for i in range(len(self._states))
        ]
        return ChainCosts(blocks, leaving, self._given, self._unsaved)
