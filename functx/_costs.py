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
from dataclasses import dataclass, replace
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


@dataclass
class _Boundary:
    """Between two blocks; sizes in bytes."""

    first_node: int  # the number of the first node that autograd makes after it
    live: int  # when the forward is here
    state: list[tuple[weakref.ref[Any], int, int]]  # storages, their sizes, which block made them
    back: int = 0  # live when the backward is here


class MeasuredChain(LiveStorages):
    """Follows a chain through its blocks, forward and back."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks
        self._cuts: list[_Boundary] = []
        n = len(blocks)
        self._given, self._unsaved = ([[0] * (n + 1) for _ in range(n + 1)] for _ in range(2))
        self._forward, self._backward, self._work = ([0] * n for _ in range(3))
        self._pulled = n  # the number of the block that is pulled back, or was last

    def run(self, state: Any) -> Any:
        """The chain, on a tape."""
        for block in self.blocks:
            self._cross(state)
            state = block(state)
        self._cross(state)
        return state

    def _cross(self, state: Any) -> None:
        at = len(self._cuts)
        known = {id(s()): made for s, _, made in self._cuts[-1].state} if at else {}
        storages = {id(s): s for t in _tree.parted(state)[0] for s in storages_of(t)}
        refs = [(weakref.ref(s), s.nbytes(), known.get(k, at)) for k, s in storages.items()]
        self._cuts.append(_Boundary(_torch.next_sequence_number(), self.live, refs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it for its block."""
        at, node = len(self._cuts) - 1, _torch.current_node()
        is_backward = node is not None and at == len(self.blocks)
        if is_backward:
            numbers = [cut.first_node for cut in self._cuts]
            self._pull_back(bisect.bisect_right(numbers, _torch.sequence_number(node)) - 1)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        peaks, block = (self._backward, self._pulled) if is_backward else (self._forward, at)
        if block < len(self.blocks):
            peaks[block] = max(peaks[block], self.live)
            if not is_backward and not func.is_view:
                self._work[block] += flops_of(func, args, kwargs or {}, out)
        return out

    def _pull_back(self, block: int) -> None:
        """A block is pulled back: of later ones nothing is, from now on."""
        for j in range(block + 1, self._pulled + 1):
            self._cuts[j].back = self.live
            given = [(made, nbytes) for s, nbytes, made in self._cuts[j].state if s() is not None]
            for i, cut in enumerate(self._cuts[: j + 1]):
                self._given[i][j] = sum(nbytes for made, nbytes in given if made > i)
                self._unsaved[i][j] = sum(nbytes for s, nbytes, _ in cut.state if s() is None)
        self._pulled = min(self._pulled, block)

    def costs(self) -> ChainCosts:
        """What each block costs."""
        self._pull_back(0)
        saved = [cut.live - self._unsaved[i][i] for i, cut in enumerate(self._cuts)]
        later = [*(cut.back - s for cut, s in zip(self._cuts[1:-1], saved[1:])), 0]
        tapes = [after - s for s, after in itertools.pairwise(saved)]
        forward, backward = (
            [most - s for most, s in zip(peaks, saved)] for peaks in (self._forward, self._backward)
        )
        blocks = [*map(BlockCosts, forward, tapes, backward, later, self._work)]
        return ChainCosts(blocks, self._given, self._unsaved)


def measured(blocks: Blocks, x: Any, required: Sequence[bool]) -> MeasuredChain:
    """What some blocks called on ``x`` cost.

    Tensors in ``x`` are off all tapes; ``required`` says which are differentiated.
    """
    tensors, how = _tree.parted(x)
    with no_collection(), MeasuredChain(blocks) as chain:
        there_and_back(lambda *leaves: chain.run(_tree.joined(leaves, how)), tensors, required)
    return chain
