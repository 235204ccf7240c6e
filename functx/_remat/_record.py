"""Writing down what runs: which operation read what, and which memory it gave or wrote to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_globals, _torch_memory, _torch_operators
from functx._policies import Everything
from functx._remat._arguments import NUMBERS, SIMPLE
from functx._remat._computed import Computed
from functx._remat._saving import (
    IN_PLACE,
    Saver,
    StoodIn,
    alias,
    handed_out,
    key_of,
    now,
    stood_in,
)
from functx._remat._step import Kind, Layout, Step, fills, has_memory, kind_of, kinds, layout_of
from functx._remat._tapes import PLAIN, tensors_of
from functx._torch import current_node, sequence_number
from functx._torch_globals import hooks_on_saved
from functx._torch_memory import key_of_storage, weak_reference
from functx._torch_operators import is_zero_tensor

_STRIDED, _NOTHING = torch.strided, StoodIn.NOTHING
_FEW = 8


class Record(Computed):
    """Runs operations, and writes them down.

    Args:
        operations: those of the body, so far.
        saver: asks the policy of the region what to keep; ``None`` where it keeps nothing.

    Attributes:
        steps: what ran, in order.
        writes: whether anything wrote to memory.
        packed: whether hooks saw what the tape saved.
    """

    packed = False
    writes = False

    def __init__(self, operations: Sequence[Any], saver: Saver | None = None) -> None:
        super().__init__()
        self._operations = operations
        self.saver = saver
        self.steps: list[Step] = []
        self._roots: set[int] = set()  # keys of what must come about
        self._statistics: set[int] = set()  # and of what must if it is read: running statistics
        self._exported: set[int] = set()  # storages that something else has, too
        self._laid_out: dict[int, Layout | None] = {}  # how memory was made that is written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and write down what it read and made."""
        kind = kinds.get(id(func)) or kind_of(func)
        run = kind.run
        if kind.view:
            if kind.opaque:
                self.opaque(func)
            elif not self.paused:
                try:
                    self.viewed.add(key_of_storage(args[0].untyped_storage()))
                except (AttributeError, RuntimeError, NotImplementedError):
                    self.take_view(args[0])
            if args and type(args[0]) is not Tensor:
                # A number, as a composite of C++ shows a tensor of its own.
                args, kwargs = _torch_operators.callable_arguments(func, args, kwargs or {})
            return run(*args, **kwargs) if kwargs else run(*args)
        if kind.scalar or (args and type(args[0]) is not Tensor):
            args, kwargs = _torch_operators.callable_arguments(func, args, kwargs or {})
        if self.paused:
            return run(*args, **kwargs) if kwargs else run(*args)
        if not (kind.plain and self.reliable):
            return self._run(kind, func, args, kwargs or {})
        out = run(*args, **kwargs) if kwargs else run(*args)
        if (kwargs and not SIMPLE.issuperset(map(type, kwargs.values()))) or (
            not self._write_down_plain(kind, func, args, kwargs, out)
        ):
            self._after(kind, func, args, kwargs or {}, out)
        return out

    def _write_down_plain(self, kind: Kind, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Record an operation as nearly all are: of tensors and numbers, to tensors of its own.

        Returns:
            Whether it is one; if not, nothing is on the record.
        """
        if hooks_on_saved(True) is not None:
            return False
        writers, external = self._writers, self._external
        read: list[int] = []
        reads: list[int] = []
        externals: list[int] = []
        try:
            for a in args:
                if a.__class__ is Tensor:
                    read.append(storage := key_of_storage(a.untyped_storage()))
                    if storage not in writers:
                        externals.append(external.setdefault(storage, storage))
                    else:
                        reads.append(writers[storage])
                        if storage in external:
                            externals.append(external[storage])
                elif a.__class__ not in NUMBERS and not (
                    a.__class__ is list and a and a[0].__class__ is int  # sizes
                ):
                    return False
            made = _in_memory_of_its_own(out, read)
        except (RuntimeError, NotImplementedError):  # no storage: sparse, opaque, ...
            return False
        if made is None:
            return False
        steps = self.steps
        key = len(steps) << 6
        refs = self._made.refs
        for memory, storage in made:
            writers[storage] = key
            key += 1
            if storage in external:
                del external[storage]
            refs.append((weak_reference(memory), storage))
        node = current_node()
        outs = (out,) if out.__class__ is Tensor else out
        steps.append(
            Step(
                kind,
                reads,
                externals,
                (len(self._operations), -1 if node is None else sequence_number(node)),
                [(t.shape, t.stride(), t.dtype, t.device) for t in outs],
            )
        )
        if now.stood_in is not _NOTHING or self.saver is not None:
            places = enumerate(zip(outs, made))
            those = [(place, t, storage) for place, (t, (_, storage)) in places]
            self._may_be_kept(kind, func, args, kwargs or {}, out, those)
        return True

    def _run(self, kind: Kind, func: Any, args: Any, kwargs: Any) -> Any:
        """Run any operation, and write it down."""
        if self.saver is not None and kind.writes:
            written = _torch_operators.arguments_written(func, args, kwargs)
            self.saver.about_to_write(written)
        out = kind.run(*args, **kwargs)
        self._after(kind, func, args, kwargs, out)
        return out

    def _after(self, kind: Kind, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Write any operation down, which has run."""
        if made := self._note(kind, args, kwargs, out):
            self._may_be_kept(kind, func, args, kwargs, out, made)

    def _may_be_kept(
        self, kind: Kind, func: Any, args: Any, kwargs: Any, out: Any, made: list[Any]
    ) -> None:
        """The policy is asked about what the newest step made."""
        number = len(self.steps) - 1
        if stood_in() is not StoodIn.NOTHING:
            self._offer_again(number, made)
        elif self.saver is not None and not kind.unwritten:
            self.saver.ran(number, func, args, kwargs, out, made)

    def skipped(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """NOTE [what inner regions leave out] in `_watch`."""
        before = len(self.steps)
        self._note(kind_of(func), args, kwargs, out)
        if stood_in() is StoodIn.KEPT and len(self.steps) > before:
            self.steps[-1].handed_out = True

    def _offer_again(self, number: int, made: list[Any]) -> None:
        """A replay around this region did not run the operation: whether it keeps the result."""
        if stood_in() is StoodIn.KEPT:
            self.saver = self.saver or Saver(Everything(False))
            for place, _, storage in made:
                if (t := handed_out(place)) is not None:
                    self.saver.given(key_of(number, place), t.detach(), storage)
            made = [one for one in made if handed_out(one[0]) is None]
        if self.saver is not None:
            self.saver.left_out(number, made)

    def _note(self, kind: Kind, args: Any, kwargs: Any, out: Any) -> list[Any]:
        if self.reliable:
            try:
                made = self._write_down(kind, args, kwargs, out)
            except (RuntimeError, NotImplementedError):  # no storage: sparse, opaque, ...
                self.reliable = False
            if self.reliable:
                return made
        self.ran_unrecorded(args, kwargs, out)
        return []

    def _write_down(self, kind: Kind, args: Any, kwargs: Any, out: Any) -> list[Any]:
        """Record an operation; place, tensor and storage of each result that could be kept."""
        steps = self.steps
        number = len(steps)
        if hooks_on_saved(True) is not None:
            self.packed = True
            if _torch_globals.foreign_saved_tensors_hooks():
                self.reliable = False
                return []
        given = []
        for a in (*args, *kwargs.values()) if kwargs else args:
            if a.__class__ is Tensor:
                given.append(a)
            elif a.__class__ not in NUMBERS:
                if a.__class__ is list and a and a[0].__class__ is int:
                    continue  # sizes
                for t in tensors_of(a):
                    if type(t) not in PLAIN:
                        self.reliable = False
                        return []
                    given.append(t)
        writers, external = self._writers, self._external
        read = _torch_memory.storage_keys(given)
        reads: list[int] = []
        externals: list[int] = []
        for storage in read:
            if storage in writers:
                reads.append(writers[storage])
                if storage in external:
                    externals.append(external[storage])
            else:
                externals.append(external.setdefault(storage, storage))
        node = _torch.current_node_number()
        step = Step(kind, reads, externals, (len(self._operations), node))
        steps.append(step)
        return self._write_results(number, read, args, kwargs, out)

    def _write_results(
        self, number: int, read: Collection[int], args: Any, kwargs: Any, out: Any
    ) -> list[Any]:
        """Record what an operation gave, and wrote to."""
        step = self.steps[number]
        kind, writers, external = step.kind, self._writers, self._external
        parts = out if isinstance(out, (tuple, list)) else (out,)
        dense = all(part is None or isinstance(part, Tensor) for part in parts)
        read = set(read)
        made = []
        views = False  # of what it reads, or written in place
        for place, t in enumerate(parts if dense else tensors_of(out)):
            if t is None:
                continue
            memory, storage = _torch_memory.storage_and_key(t)
            if storage in read:
                views = True
                continue
            dense = dense and type(t) is Tensor and has_memory(t) and place < IN_PLACE
            made.append((place, t, storage))
            writers[storage] = key_of(number, min(place, IN_PLACE))
            external.pop(storage, None)
            self._made.add(memory, storage)
        alone = kind.writes and kind.in_place and bool(args) and out is args[0]
        whole = self._whole(out) if alone else []
        if kind.writes:
            self.writes = True
            func = kind.func
            targets = tensors_of(*_torch_operators.arguments_written(func, args, kwargs or {}))
            # By what is written silently, nobody knows.
            for storage in {*_torch_memory.storage_keys(targets)} or read:
                self._wrote(number, storage, step.reads, alone=alone)
        if kind.changes_view:
            return []
        if alone:
            step.writes = True
            return [(IN_PLACE, *one) for one in whole]
        if (kind.writes and not kind.statistics) or not (
            dense and kind.skippable and (made or views)
        ):
            self._roots.add(key_of(number, IN_PLACE))
        elif made:
            step.layouts = [None if t is None else layout_of(t) for t in parts]
            return made
        return []

    def _whole(self, t: Tensor) -> list[tuple[Tensor, int]]:
        """All of the memory of what is written to, as it was made; if that could be kept."""
        storage = _torch_memory.storage_and_key(t)[1]
        key, laid_out = self._writers.get(storage), self._laid_out
        if key is None or storage in self._external or storage in self._exported:
            return []
        if self.saver is None:
            return [(t, storage)] if stood_in() is StoodIn.KEPT else []
        if key & IN_PLACE != IN_PLACE:
            layouts = self.steps[key >> 6].layouts
            laid_out[storage] = None if layouts is None else layouts[key & IN_PLACE]
        layout = laid_out.get(storage)
        if layout is None or type(t) is not Tensor or not fills(t, layout):
            return []
        return [(alias(t, layout), storage)]

    def _wrote(self, number: int, storage: int, before: Sequence[int], *, alone: bool) -> None:
        """An operation wrote to some memory: it read what was there before."""
        for key in before:
            self.steps[key >> 6].rewritten = True
        if storage in self._external or storage in self._exported:
            only_these = self.steps[number].kind.statistics and storage not in self._exported
            (self._statistics if only_these else self._roots).add(key_of(number, IN_PLACE))
        self._writers[storage] = key_of(number, IN_PLACE)
        if self.saver is not None:
            known = alone and stood_in() is StoodIn.NOTHING
            self.saver.wrote(number, storage) if known else self.saver.lost(storage)
        if not alone:
            self._laid_out.pop(storage, None)


Memory = tuple[torch.UntypedStorage, int]


def _in_memory_of_its_own(out: Any, read: Collection[int]) -> Sequence[Memory] | None:
    """The memory of each tensor that an operation gave, if all have some that it did not read."""
    if out.__class__ is Tensor:
        memory = out.untyped_storage()
        storage = key_of_storage(memory)
        if storage in read or out.layout is not _STRIDED or is_zero_tensor(out):
            return None
        return ((memory, storage),)
    if out.__class__ is not tuple or len(out) > _FEW:
        return None
    made: list[Memory] = []
    seen = {*read}
    for t in out:
        if t.__class__ is not Tensor or t.layout is not _STRIDED or is_zero_tensor(t):
            return None
        memory = t.untyped_storage()
        if (storage := key_of_storage(memory)) in seen:
            return None
        seen.add(storage)
        made.append((memory, storage))
    return made
