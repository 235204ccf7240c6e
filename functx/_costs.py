"""What the blocks of a chain cost, measured: bytes on a tape, bytes while they run, work.

The chain runs forward once, on a tape, where it is called: inside of the same transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _tree
from functx._aten import flops_of
from functx._chain import BlockCosts, Tree, numbers_in
from functx._recording import OperationBlock
from functx._remat import Options, run, tape_of
from functx._residuals import held
from functx._storages import LiveStorages, no_collection, storages_of
from functx._transforms import grad

Blocks = Sequence[Callable[[Any], Any]]


class Work(_torch.TorchDispatchMode):
    """Counts FLOPs: by torch's formulas where there are any, else one for an element of a result.

    Views are free.
    """

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view:
            self.flops += flops_of(func, args, kwargs, out)
        return out


def work(f: Callable[..., Any], *args: Any) -> int:
    """The FLOPs of a call."""
    with Work() as counter:
        f(*args)
    return counter.flops


def walk(tree: Tree, blocks: Blocks, x: Any, options: Options | None = None) -> Any:
    """Run a chain as a tree says: blocks by number, tuples or lists as regions."""
    options = Options(name="a chain") if options is None else options
    for part in tree:
        if isinstance(part, int):
            x = blocks[part](x)
            continue
        numbers = numbers_in(part)
        name = f"blocks {numbers[0]} to {numbers[-1]} of {options.name}"
        needed = read_by([blocks[n] for n in numbers], x)
        own = replace(options, name=name, budget=None)
        made = run(lambda x, part=part, own=own: walk(part, blocks, x, own), (needed,), {}, own)
        # What the region does not read passes it by.
        passed = {} if needed is x else {n: t for n, t in x.items() if n not in needed}
        x = {**passed, **made} if passed else made
    return x


def read_by(blocks: Blocks, state: Any) -> Any:
    """What some blocks read of a state, where they say so."""
    reads = set().union(*(b.reads for b in blocks if isinstance(b, OperationBlock)))
    is_recorded = isinstance(blocks[0], OperationBlock)
    return {n: t for n, t in state.items() if n in reads} if is_recorded else state


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


def measured(
    blocks: Blocks, x: Any, required: Sequence[bool]
) -> tuple[list[BlockCosts], list[list[int]]]:
    """What some blocks called on ``x`` cost, and what leaves them, as `frontier` takes it.

    Tensors in ``x`` are off all tapes; ``required`` says which are differentiated.
    """
    tensors, how = _tree.parted(x)
    states, flops = [x], []
    with torch.no_grad():
        for block in blocks:
            with Work() as counter:
                states.append(block(states[-1]))
            flops.append(counter.flops)
    born: dict[int, int] = {}
    leaving = [[0] * len(states) for _ in states]
    for j, state in enumerate(states):
        storages = {id(s): s for t in _tree.parted(state)[0] for s in storages_of(t)}
        for key, storage in storages.items():
            for i in range(born.setdefault(key, j)):
                leaving[i][j] += storage.nbytes()
    costs: list[BlockCosts] = []
    seen: set[int] = set()

    def body(*leaves: Tensor) -> Any:
        state = _tree.joined(leaves, how)
        for i, block in enumerate(blocks):
            before, ran = live.live, len(live.timeline)
            start = _torch.next_sequence_number()
            state = block(state)
            kept = live.live - before
            forward = max((e.live for e in live.timeline[ran:]), default=before) - before - kept
            # Cotangents of what the block gives and takes.
            cotangents = leaving[i][i + 1] + (leaving[i - 1][i] if i else 0)
            outs = [t for t in _tree.parted(state)[0] if t.grad_fn is not None]
            new = [n.variable for n in tape_of(outs, start) if hasattr(n, "variable")]
            new = [t for t in new if id(t) not in seen]
            seen.update(map(id, new))
            gradients = sum(t.nbytes for t in new)
            saved = {id(s) for t in held([t.grad_fn for t in outs], start) for s in storages_of(t)}
            unsaved = sum(s.nbytes() for t in outs for s in storages_of(t) if id(s) not in saved)
            passing = max(forward, 0) + cotangents
            costs.append(BlockCosts(kept, kept - unsaved, passing, gradients, flops[i]))
        return state

    with no_collection(), LiveStorages() as live:
        there_and_back(body, tensors, required)
    return costs, leaving
