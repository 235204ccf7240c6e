"""Where each piece of memory comes from: the operation that wrote it, its line, its cost.

A dispatch mode below all transforms follows *values*: what an operation wrote to a piece of memory
is one until the next one writes there. Each knows its operation, the line of the user's code that
called it, the modules that were running, its FLOPs, and the values that were read for it. So it is
known for every value what has to run again to have it, given which others are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_operators
from functx._places import ModulePaths, Place, line_of, where
from functx._policy_kinds import flops_of
from functx._remat._step import kind_of
from functx._remat._tapes import tensors_of


@dataclass(eq=False)
class Made:
    """What one operation wrote to one piece of memory.

    Attributes:
        operation: ``aten.mm``.
        place: the line outside of torch and functx that called it.
        module: the path of modules that were running, from the outermost.
        shape: of the result.
        dtype: likewise.
        device: likewise.
        step: the number of the operation; several results of one share it.
        flops: of the operation.
        reads: the values that it read.
        names: what `checkpoint_name` called it.
        parts: what `checkpoint_name` called parts of it.
        moved: the value that this is a copy of, in host memory.
    """

    operation: str
    place: Place
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    step: int
    flops: int
    reads: tuple[Made, ...]
    names: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    moved: Made | None = None

    def line(self) -> tuple[str, int, str]:
        """File, line and function."""
        return described(self.place)


class Memory:
    """One piece of memory: whose it is, and whether it lives.

    Attributes:
        key: its address.
        nbytes: how large it was when it was last seen.
        value: what was written to it last; ``None`` if that was before.
        outside: whether it was there before.
        place: the line that read it first.
    """

    __slots__ = ("_ref", "key", "nbytes", "outside", "place", "tensors", "value")

    def __init__(self, t: Tensor, *, outside: bool) -> None:
        storage = t.untyped_storage()
        self._ref = _torch.StorageWeakRef(storage)
        self.key = _torch.storage_key(t)
        self.nbytes = storage.nbytes()
        self.outside = outside
        self.place: Place | None = None
        self.value: Made | None = None
        self.tensors: dict[int, weakref.ref[Tensor]] = {}  # that were seen over it

    def see(self, t: Tensor) -> None:
        """Remember a tensor over it."""
        known = self.tensors.get(id(t))
        if known is None or known() is not t:
            self.tensors[id(t)] = weakref.ref(t)

    def seen(self) -> list[Tensor]:
        """The tensors over it that are known, and live."""
        return [t for ref in self.tensors.values() if (t := ref()) is not None]

    def holders(self) -> int:
        """How many hold it, and tensors over it: fewer when a tape that does is gone."""
        count = int(_torch.storage_use_count(self.key))
        for ref in self.tensors.values():
            t = ref()
            count += 0 if t is None else int(_torch.use_count(t))
        return count

    @property
    def alive(self) -> bool:
        """Whether it still exists."""
        return not self._ref.expired()


class Origins(_torch.TorchDispatchMode):
    """Follows what is written to which memory while it is active.

    Attributes:
        memory: by address; what was freed stays until the address is used again.
    """

    supports_higher_order_operators = True
    only_observes = True

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, Memory] = {}
        self._steps = 0
        self._modules = ModulePaths()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note what it wrote."""
        kwargs = kwargs or {}
        inputs = tensors_of(args, kwargs)
        if any(_torch.is_traceable_wrapper_subclass(t) for t in inputs):
            return NotImplemented  # the subclass first: the mode then sees its inner tensors
        read = [self.meet(t) for t in inputs if has_address(t)]
        for memory in read:
            if memory.outside and memory.place is None:
                memory.place = where()
        out = func(*args, **kwargs)
        if isinstance(func, _torch.OpOverload):
            self._wrote(func, args, kwargs, out, read)
        return out

    def of(self, t: Tensor) -> Memory | None:
        """The memory of a plain tensor, if it is known."""
        if not has_address(t):
            return None
        memory = self.memory.get(_torch.storage_key(t))
        return memory if memory is not None and memory.alive else None

    def meet(self, t: Tensor) -> Memory:
        """The memory of a plain tensor; from outside, if it was not known."""
        key = _torch.storage_key(t)
        memory = self.memory.get(key)
        if memory is None or not memory.alive:
            memory = self.memory[key] = Memory(t, outside=True)
        memory.nbytes = t.untyped_storage().nbytes()
        memory.see(t)
        return memory

    def named(self, t: Tensor, name: str) -> None:
        """A value was given a name."""
        memory = self.of(t)
        if memory is not None and memory.value is not None:
            whole = t.numel() * t.element_size() >= memory.nbytes
            (memory.value.names if whole else memory.value.parts).append(name)

    def offloaded(self, t: Tensor, host: Tensor) -> None:
        """A value was copied to host memory, to be kept."""
        source, copy = self.of(t), self.of(host)
        if source is not None and copy is not None and copy.value is not None:
            copy.value.moved = source.value

    def _wrote(self, func: Any, args: Any, kwargs: Any, out: Any, read: list[Memory]) -> None:
        if _torch_operators.is_view(func):
            for t in filter(has_address, tensors_of(out)):
                self.meet(t)
            return
        known = {memory.key for memory in read}
        written = []
        for t in filter(has_address, tensors_of(out)):
            if (key := _torch.storage_key(t)) not in known:
                self.memory[key] = memory = Memory(t, outside=False)
                memory.see(t)
                written.append(t)
        if kind_of(func).writes:
            targets = tensors_of(*_torch_operators.arguments_written(func, args, kwargs))
            written += filter(has_address, targets)
        if not written:
            return
        reads = {id(m.value): m.value for m in read if m.value is not None}
        step, self._steps = self._steps, self._steps + 1
        free = kind_of(func).unwritten
        flops = 0 if free else flops_of(func, args, kwargs, out)
        place, module = where(), self._modules.here()
        for t in written:
            memory = self.memory[_torch.storage_key(t)]
            old = memory.value
            part = old is not None and t.numel() * t.element_size() < memory.nbytes
            memory.value = Made(
                operation=str(func.overloadpacket),
                place=place,
                module=module,
                shape=old.shape if old is not None and part else tuple(t.shape),
                dtype=t.dtype,
                device=t.device,
                step=step,
                flops=flops,
                reads=tuple(reads.values()),
            )


def described(place: Place) -> tuple[str, int, str]:
    """File, line and function of a place."""
    return place[0].co_filename, line_of(place), place[0].co_qualname


def has_address(t: Tensor) -> bool:
    """Whether ``t`` is over memory that has an address to know it by."""
    return t.layout is torch.strided and not _torch_operators.is_zero_tensor(t)


def cost(value: Made, there: Callable[[Made], bool]) -> int:
    """The FLOPs that it takes to have ``value`` again.

    Args:
        value: which is lost.
        there: whether another value need not be computed.
    """
    steps: dict[int, int] = {}
    seen = {id(value)}
    stack = [value]
    while stack:
        one = stack.pop()
        steps[one.step] = one.flops
        for read in one.reads:
            if id(read) not in seen and not there(read):
                seen.add(id(read))
                stack.append(read)
    return sum(steps.values())
