"""What a body ran below all transforms, and what of it a pullback reads.

A dispatch mode under the first run writes down every ATen operation but views, of which torch makes
more or fewer depending on what requires grad: which earlier ones wrote what it reads. When the body
has returned, the results of operations that are still alive, results of the body aside, are what
some tape has saved. These are what a pullback reads, and the operations they come from are *live*;
so are those whose results Python looked at. Nothing has to be traced or cached for that, so it
can't be stale: it is known anew for each call.

NOTE [alive]
A saved tensor may be the tensor itself, an alias that shares its storage, or a wrapper of some
transform around it. So what counts is storages, by weak references, and, for tensors that the
engine itself holds (results and inputs), how many more holders each has than it should.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_operators
from functx._remat._holders import base_of, held_by_a_tape
from functx._remat._tapes import tensors_of
from functx._remat._watch import Watcher

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


_aten = torch.ops.aten
# Draws that take only a shape from what they are given; dropout multiplies by it, as it is.
_DRAWS_BLINDLY = {
    *(_aten.rand_like, _aten.randn_like, _aten.randint_like, _aten.native_dropout),
    *(_aten.uniform_, _aten.normal_, _aten.random_, _aten.exponential_, _aten.cauchy_),
    *(_aten.log_normal_, _aten.geometric_),
}
# What writes running statistics, though its schema does not say so.
_WRITES_SILENTLY = {
    *(_aten.native_batch_norm, _aten.cudnn_batch_norm, _aten.miopen_batch_norm),
    *(_aten.batch_norm_update_stats),
}


class Step:
    """One ATen operation.

    NOTE [what runs has its inputs]
    An operation that a replay can't do without (it draws, say) reads values too: on memory nobody
    wrote to, it may refuse its arguments or crash. So it is a root like any other. The exceptions
    look at no value: views, and draws that take only a shape from what they are given.

    Attributes:
        func: the overload.
        reads: the steps that wrote what it reads.
        externals: storages it reads that the body did not make.
        layouts: of its results, if they could be handed out empty where it is dead.
        writes: whether it writes to its first argument and gives that; where it is dead, nothing
            has to be written.
        part_of: what it is a part of: an operation of the body, a node of a tape.
    """

    __slots__ = ("externals", "func", "layouts", "part_of", "reads", "writes")

    def __init__(self, func: Any, reads: set[int], externals: set[int], part_of: Any) -> None:
        self.func = func
        self.reads = reads
        self.externals = externals
        self.layouts: list[Layout | None] | None = None
        self.writes = False
        self.part_of = part_of


class Ledger(Watcher):
    """Writes down what runs. Afterwards, `settle` says which steps are live.

    NOTE [siblings]
    Where only some results are pulled back, what the tape saved for the others is dead. A node
    reads what its operation read, and what else the operation made: a batched operator may be a
    loop over examples and one stack for each result, none of which comes after another. Python
    (a custom Function, a hook) may read anything that it can reach; where there is any, all
    results count as read, and so do all inputs.

    Args:
        operations: those of the body, so far.

    Attributes:
        steps: what ran, in order.
        reliable: whether the record is complete; if not, nothing may be left out of a replay.
    """

    def __init__(self, operations: Sequence[Any]) -> None:
        super().__init__()
        self._operations = operations
        self.steps: list[Step] = []
        self.reliable = True
        self._writers: dict[int, list[int]] = {}
        self._external: set[int] = set()
        self._made: list[tuple[Any, int]] = []  # weak reference, storage
        self._roots: set[int] = set()
        self._live: set[int] = set()
        self._sources: list[set[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and write down what it read and made."""
        args, kwargs = _torch_operators.callable_arguments(func, args, kwargs or {})
        out = func(*args, **kwargs)
        if not self.paused and not _torch_operators.is_view(func):
            self._note(func, args, kwargs, out)
        return out

    def skipped(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """NOTE [what inner regions leave out] in `_watch`."""
        self._note(func, args, kwargs, out)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self.reliable:
            try:
                self._write_down(func, args, kwargs, out)
            except (RuntimeError, NotImplementedError):  # no storage: sparse, opaque, ...
                self.reliable = False

    def _write_down(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        number = len(self.steps)
        read: set[int] = set()
        for t in tensors_of(*args, kwargs):
            if type(t) not in _PLAIN:
                self.reliable = False
                return
            read.add(_torch.storage_key(t))
        reads: set[int] = set()
        externals: set[int] = set()
        for storage in read:
            writers = self._writers.get(storage)
            if writers is None:
                self._external.add(storage)
            else:
                reads.update(writers)
            if storage in self._external:
                externals.add(storage)
        step = Step(func, reads, externals, (len(self._operations), _torch.current_node_number()))
        self.steps.append(step)
        parts = out if isinstance(out, (tuple, list)) else [out]
        results = tensors_of(out)
        views = bool(results)
        dense = all(part is None or isinstance(part, Tensor) for part in parts)
        for t in results:
            key = _torch.storage_key(t)
            if key in read:
                continue  # a view, or written in place
            views = False
            dense = dense and type(t) is Tensor and _dense(t)
            self._writers[key] = [number]
            self._external.discard(key)
            self._made.append((_torch.StorageWeakRef(t.untyped_storage()), key))
        written = _written(func)
        if written:
            if externals:
                self._roots.add(number)
            for storage in read:
                self._writers[storage] = [*self._writers.get(storage, ()), number]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if (draws and func.overloadpacket in _DRAWS_BLINDLY) or torch.Tag.inplace_view in func.tags:
            return
        if written and not draws and _in_place(func, args, out):
            step.writes = True
        elif draws or written or not _skippable(func, results, dense):
            self._roots.add(number)
        elif not views:
            step.layouts = [None if t is None else layout_of(t) for t in parts]

    def settle(self, results: Sequence[Tensor | None]) -> bool:
        """Decide which steps are live.

        Args:
            results: of the body; the engine holds them, which makes them alive, but not live.

        Returns:
            Whether that could be decided.
        """
        if self.reliable:
            try:
                self._decide(results)
            except (RuntimeError, NotImplementedError):  # a result without storage
                self.reliable = False
        return self.reliable

    def _decide(self, results: Sequence[Tensor | None]) -> None:
        spared = set()
        for t in results:
            if t is None:
                self._sources.append(set())
                continue
            storage = _torch.storage_key(base_of(t))
            self._sources.append(set(self._writers.get(storage, ())))
            if not (self.python_on_tape or held_by_a_tape(t)):
                spared.add(storage)
        live = set(self._roots)
        for ref, key in self._made:
            if key not in spared and not ref.expired():
                live.update(self._writers[key])  # whoever made it, and whoever wrote to it since
        self._made.clear()
        self._writers.clear()
        self._live = self._closed(live)

    def _closed(self, numbers: set[int]) -> set[int]:
        """Steps, and the steps they read from."""
        closed = set(numbers)
        for number in range(len(self.steps) - 1, -1, -1):
            if number in closed:
                closed |= self.steps[number].reads
        return closed

    def _with_siblings(self, numbers: Iterable[int]) -> set[int]:
        """Steps, what they read from, and what is part of the same. ``NOTE [siblings]``."""
        siblings: dict[Any, list[int]] = {}
        for number in self._live:
            siblings.setdefault(self.steps[number].part_of, []).append(number)
        stack = list(numbers)
        closed: set[int] = set()
        while stack:
            number = stack.pop()
            if number not in closed:
                closed.add(number)
                step = self.steps[number]
                stack += step.reads
                stack += siblings.pop(step.part_of, ())
        return closed

    def replay_of(self, wanted: Sequence[int] | None) -> list[tuple[Step, bool]]:
        """Every step, and whether a replay runs it.

        Args:
            wanted: the results that are pulled back; ``None`` for all.
        """
        live = self._live
        known = len(self._sources)  # tensors that left otherwise than by return come after
        some = wanted is not None and len(wanted) < known and all(i < known for i in wanted)
        if some and not self.python_on_tape:
            # What a tape saved belongs to the results that come after it. What none comes after
            # was made for the tape alone (the value before an in-place operation, say).
            for_some = self._closed(set().union(*self._sources))
            for_these = self._with_siblings(n for i in wanted or () for n in self._sources[i])
            live = self._closed(self._roots | (live - (for_some - for_these)))
        return [
            (s, n in live or (s.layouts is None and not s.writes)) for n, s in enumerate(self.steps)
        ]

    def needs(self, storage: int) -> bool:
        """Whether a live step reads a storage that the body did not make."""
        return self.python_on_tape or any(
            storage in self.steps[number].externals for number in self._live
        )


def _written(func: Any) -> bool:
    """Whether an operation writes to an argument, by its schema or, silently, without."""
    return _torch_operators.is_mutable(func) or func.overloadpacket in _WRITES_SILENTLY


def _in_place(func: Any, args: Any, out: Any) -> bool:
    """Whether all that an operation does is to write to its first argument, shape as it was."""
    return func.overloadpacket.__name__.endswith("_") and bool(args) and out is args[0]


def _skippable(func: Any, results: Sequence[Tensor], dense: bool) -> bool:
    """Whether memory can be handed out in place of the results, whatever values it would read."""
    if not results or not dense:
        return False  # Python looks at the result; or it is no tensor like others
    tags = func.tags
    return not (torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags)


def _dense(t: Tensor) -> bool:
    """Whether ``t`` has memory that could be handed out empty: forward mode's zeros have none."""
    return t.layout is torch.strided and not _torch_operators.is_zero_tensor(t)


def layout_of(t: Tensor) -> Layout:
    """What it takes to make a tensor like ``t``."""
    return t.shape, t.stride(), t.dtype, t.device


def empty(layout: Layout) -> Tensor:
    """Memory nobody wrote to."""
    shape, stride, dtype, device = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
