"""What the blocks of a chain cost, measured: bytes on a tape, bytes while they run, work.

Every block is run forward and pulled back once, on its own, on plain autograd; the whole chain is
run to see what its blocks hand on. Random generators, buffers and attributes of modules are put
back as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from functx import _torch, _torch_globals, _tree, memory
from functx._chain import Block, Chain, Tree
from functx._policy_kinds import flops_of
from functx._remat._function import run
from functx._remat._options import Options
from functx._remat._tapes import leaves_below, tensors_of
from functx._remat._within_reach import reachable

Blocks = Sequence[Callable[[Any], Any]]


class Work(_torch.TorchDispatchMode):
    """Counts FLOPs: by torch's formulas where there are any, else one for an element of a result.

    Attributes:
        flops: so far; views are free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

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


def walk(tree: Tree, *blocks_and_x: Any, options: Options | None = None) -> Any:
    """Run a chain as a tree says: blocks by number, lists as regions."""
    *blocks, x = blocks_and_x
    del blocks_and_x
    options = Options() if options is None else options
    for part in tree:
        if not isinstance(part, list):
            x = blocks[part](x)
            continue
        numbers = sorted(flat(part))
        name = f"blocks {numbers[0]} to {numbers[-1]} of {options.name}"
        o = replace(options, name=name, budget=None)
        needed = read_by(blocks[numbers[0] : numbers[-1] + 1], x)
        made = run(_Walk(part, options), (*blocks, needed), {}, o)
        if needed is not x:  # what the region does not read passes it by
            made = {
                n: made.get(n, x.get(n)) for n in blocks[numbers[-1]].gives if n in made or n in x
            }
        x = made
    return x


def read_by(blocks: Blocks, state: Any) -> Any:
    """What some blocks read of a state, where they say so."""
    if not all(hasattr(block, "reads") for block in blocks):
        return state
    reads = set().union(*(block.reads for block in blocks))  # type: ignore[attr-defined]
    return {n: t for n, t in state.items() if n in reads}


class _Walk:
    """`walk` of one region, with its blocks as arguments, so that replays know what they reach."""

    def __init__(self, tree: Tree, options: Options) -> None:
        self._tree = tree
        self._options = options

    def __call__(self, *blocks_and_x: Any) -> Any:
        return walk(self._tree, *blocks_and_x, options=self._options)


def flat(tree: Tree) -> Iterator[int]:
    """The blocks of a tree."""
    for part in tree:
        if isinstance(part, list):
            yield from flat(part)
        else:
            yield part


def pullback_peak(f: Callable[[Any], Any], x: Any) -> int:
    """The most bytes live while ``f(x)`` runs and is pulled back, beside what was there before.

    Gradients of all floating point tensors in ``x`` and of all leaves that ``f`` reaches are
    computed, and counted.
    """

    def there_and_back() -> Any:
        inputs = fresh_leaves(x)
        return pull_back(f(inputs), inputs)

    return memory.peak(there_and_back)


def pull_back(
    out: Any, inputs: Any, *, rows: int = 1, keeps: bool = False, records: bool = False
) -> Any:
    """Gradients of everything ``out`` depends on.

    Args:
        out: results, on plain autograd.
        inputs: what they were made of.
        rows: how many cotangents at once.
        keeps: whether the tape stays.
        records: whether what runs is on a tape.
    """
    outs = [t for t in _tensors(_tree.leaves(out)) if t.grad_fn is not None]
    if not outs:
        return ()
    wanted = {id(t): t for t in _tensors(_tree.leaves(inputs)) if t.requires_grad}
    wanted |= {id(t): t for t in leaves_below(*(o.grad_fn for o in outs))}
    batched = rows > 1
    cotangents = [o.new_ones(rows, *o.shape) if batched else torch.ones_like(o) for o in outs]
    return torch.autograd.grad(
        outs,
        list(wanted.values()),
        cotangents,
        retain_graph=keeps or records,
        create_graph=records,
        allow_unused=True,
        is_grads_batched=batched,
    )


def fresh_leaves(tree: Any) -> Any:
    """The same values, as leaves of a tape of their own.

    Those require grad that did; where none did, all that can.
    """
    some = any(isinstance(t, Tensor) and t.requires_grad for t in _tree.leaves(tree))

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.detach().requires_grad_(
            t.requires_grad if some else t.is_floating_point() or t.is_complex()
        )

    return _tree.map_(leaf, tree)


class _Births(_torch.TorchDispatchMode):
    """Which block made which storage."""

    def __init__(self) -> None:
        super().__init__()
        self.block = 0
        self.made: dict[int, tuple[Any, int, int]] = {}
        self._foreign: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tensors_of(*args, kwargs or {}):
            key = _torch.storage_key(t)
            if key not in self.made:
                self._foreign.add(key)
        out = func(*args, **(kwargs or {}))
        for t in tensors_of(out):
            storage = t.untyped_storage()
            key = _torch.storage_key(t)
            known = self.made.get(key)
            if key not in self._foreign and (known is None or known[0].expired()):
                self.made[key] = (_torch.StorageWeakRef(storage), self.block, storage.nbytes())
        return out

    def alive(self) -> dict[int, tuple[int, int]]:
        """The storages that exist: who made them, and their bytes."""
        return {k: (i, n) for k, (ref, i, n) in self.made.items() if not ref.expired()}


def measured(blocks: Blocks, x: Any) -> Chain:
    """The chain of some blocks, called on ``x``."""
    states = [x]
    with torch.no_grad():
        for block in blocks:
            states.append(block(states[-1]))
    first = {_torch.storage_key(t) for t in _tensors(_tree.leaves(x))}
    costs = [_cost(block, state, first) for block, state in zip(blocks, states)]
    leaving = _leaving(states)
    del states
    kept = [0] * len(blocks)
    boundaries = []
    with torch.enable_grad(), _Births() as births:
        state = fresh_leaves(x)
        for births.block, block in enumerate(blocks):
            state = block(state)
            boundaries.append([_torch.storage_key(t) for t in _tensors(_tree.leaves(state))])
    alive = births.alive()
    for maker, nbytes in alive.values():
        kept[maker] += nbytes
    unsaved = [0]
    for keys in boundaries[:-1]:
        lost = {k: births.made[k][2] for k in keys if k in births.made and k not in alive}
        unsaved.append(sum(lost.values()))
    costs = [replace(cost, kept=k) for cost, k in zip(costs, kept)]
    return Chain(costs, leaving, unsaved)


def _cost(block: Callable[[Any], Any], x: Any, first: set[int]) -> Block:
    x = read_by([block], x)
    inputs = fresh_leaves(x)
    with torch.enable_grad(), memory.LiveStorages() as storages:
        out = block(inputs)
        live, forward = storages.live, storages.peak
        ran = len(storages.timeline)
        gradients = pull_back(out, inputs)
    backward = max((event.live for event in storages.timeline[ran:]), default=live) - live
    cotangents = sum(
        t.numel() * t.element_size() for t in _tensors(_tree.leaves(out)) if t.grad_fn is not None
    )
    own = [t for t in _tensors(_tree.leaves(inputs)) if t.requires_grad]
    # Gradients of parameters, and of what went into the chain, are live from then on.
    of_parameters = storages.bytes_of(
        g
        for i, g in enumerate(gradients)
        if g is not None and (i >= len(own) or _torch.storage_key(own[i]) in first)
    )
    del own
    del out, gradients
    with torch.enable_grad(), _Births() as births:
        out = block(inputs)
        tape = [t.grad_fn for t in _tensors(_tree.leaves(out))]
        del out
        saved = sum(nbytes for _, nbytes in births.alive().values())
        del tape
    with torch.no_grad():
        flops = work(block, x)
    return Block(
        kept=saved,
        saved=saved,
        forward=forward,
        backward=max(backward - of_parameters, cotangents),
        cotangents=cotangents,
        gradients=of_parameters,
        work=flops,
    )


def _leaving(boundaries: Sequence[Any]) -> list[list[int]]:
    """``leaving[i][j]``: bytes of storages at boundary ``j`` that were not there at ``i``."""
    n = len(boundaries)
    born: dict[int, int] = {}
    leaving = [[0] * n for _ in range(n)]
    for j, state in enumerate(boundaries):
        storages = {_torch.storage_key(t): t for t in _tensors(_tree.leaves(state))}
        for key, t in storages.items():
            birth = born.setdefault(key, j)
            for i in range(birth):
                leaving[i][j] += t.untyped_storage().nbytes()
    return leaving


@contextmanager
def undisturbed(f: Any) -> Iterator[None]:
    """Put generators back, and the buffers of modules that ``f`` (or a list of them) reaches."""
    modules = reachable(None, f if isinstance(f, (list, tuple)) else [f])
    buffers = {id(b): b for m in modules for b in m.buffers(recurse=False)}
    before = [(b, b.detach().clone()) for b in buffers.values()]
    attributes = [(m, dict(m.__dict__)) for m in modules]
    with ExitStack() as stack:
        stack.enter_context(_torch.cleared_interpreter_stack())
        stack.enter_context(_torch_globals.fork_generators())
        try:
            yield
        finally:
            for m, d in attributes:
                m.__dict__.clear()
                m.__dict__.update(d)
            with torch.no_grad():
                for b, value in before:
                    if not torch.equal(b, value):
                        b.copy_(value)


def _tensors(tree: Any) -> list[Tensor]:
    parts = tree if isinstance(tree, (list, tuple)) else [tree]
    return [t for t in parts if isinstance(t, Tensor)]


def as_blocks(f: Any) -> list[Callable[[Any], Any]] | None:
    """The blocks of a chain, if that is what ``f`` is."""
    if isinstance(f, nn.Sequential):
        return list(f.children())
    if isinstance(f, (list, tuple, nn.ModuleList)):
        return list(f)
    return None
