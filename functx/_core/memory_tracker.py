"""Follow every storage that a program allocates, from the operation that made it until it is freed.

``LiveStorages.live`` is, at any moment, the bytes of the storages that were created under the mode
and still exist. Three things are seen exactly:

- *births*, in a dispatch mode, which sits below autograd and functorch;
- *frees*, by a weak reference to the storage (not to a tensor: views share their storage and
  outlive each other), so that a free between two operations counts at once;
- *resizes*, by reading the size again whenever an operation touches the storage.

Not seen: workspace that a kernel allocates and frees within one operation, and memory that torch
shares with another library (a NumPy array), until something copies it.

NOTE [lines of nodes]
When the autograd engine runs an operation, no line of user code is running. The tracker reports the
line of the forward operation instead. Autograd numbers the nodes of each thread in order, and a
forward operation runs right after its node was made, so the tracker notes, at each operation, the
line for all nodes that are new.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from functx import _torch
from functx._core import tree
from functx._core.source_location import ModulePaths, Place, line_of, module_now, where
from functx._torch import compiler

# The name of a region's node. Operations that run directly in that node are the region's replay.
REGION = "RegionNodeBackward"


@dataclass(frozen=True)
class Held:
    """A storage that held memory, and the operation that made it.

    Attributes:
        operation: the name of the operation, as in ``Profile.timeline``.
        shape: the shape of the operation's result, below all transforms.
        dtype: its dtype.
        device: its device.
        nbytes: the bytes that the storage held at the peak.
        file: the file of the user code that called the operation. For an operation of a backward
            pass, the file of the forward operation that it differentiates, where that is known.
        line: the line number in ``file``.
        function: the name of the function around that line.
        module: the path of the ``nn.Module`` that was running, from the outermost one.
        phase: ``"forward"``, ``"backward"``, or ``"replay"`` for a region that is run again in a
            backward pass.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    file: str
    line: int
    function: str
    module: str
    phase: str

    @property
    def place(self) -> str:
        """``"net.py:12 in attention"``, ``"backward of net.py:12 in attention"``."""
        of = "" if self.phase == "forward" else f"{self.phase} of "
        return f"{of}{os.path.basename(self.file)}:{self.line} in {self.function}"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        module = f" ({self.module})" if self.module else ""
        return f"{self.operation}, {dtype}{list(self.shape)}, {self.place}{module}"


def _phase() -> str:
    """The phase of the operation that runs now, as in `Held`."""
    node = _torch.current_node()
    if node is None:
        return "forward"
    return "replay" if type(node).__name__ == REGION else "backward"


class Event(NamedTuple):
    """One operation: its position in the order, its name, and the bytes live after it ran."""

    position: int
    operation: str
    live: int


class _Block(weakref.ref[torch.UntypedStorage]):
    """A weak reference to one storage, with the bytes that are counted for it."""

    __slots__ = ("base", "counted", "key", "made")

    key: int  # id of the storage object, which torch keeps as long as the storage lives
    made: Held  # the operation that made the storage, or the first one that used it
    base: int  # bytes of the storage before the context was entered
    counted: int  # bytes of the storage that are included in `live`


class LiveStorages(_torch.TorchDispatchMode):
    """A context that counts live bytes and operations below autograd and functorch.

    For a storage that existed before the context was entered, only growth is counted. After the
    context is left, ``live`` still decreases when a storage is freed, and never increases.

    Args:
        lines: whether to find the line of user code that makes each storage. This takes time.

    Attributes:
        live: bytes of the storages created in the context that exist now.
        peak: the highest ``live`` so far.
        operations: how often each operation ran; ATen operations under their bare name
            (``"mm"``, ``"add_"``), others with their namespace (``"prims::sum"``).
        timeline: one `Event` per operation.
        phases: the phase of each event, as in `Held`.

    Example:
        >>> x = torch.ones(100, dtype=torch.float64)
        >>> with LiveStorages() as storages:
        ...     y = x + 1
        >>> storages.live, storages.operations["add"]
        (800, 1)
        >>> del y
        >>> storages.live, storages.peak
        (0, 800)
    """

    # Run higher-order operators unchanged: the mode sees the operations that they run inside.
    supports_higher_order_operators = True

    def __init__(self, lines: bool = False) -> None:
        super().__init__()
        compiler.load()
        self._lines = lines
        self.live = self.peak = 0
        self.operations: Counter[str] = Counter()
        self.timeline: list[Event] = []
        self.phases: list[str] = []
        self._modules: ModulePaths = {}
        # The line and the module of each node, by thread and sequence number.
        self._sites: dict[tuple[int, int], tuple[Place, str]] = {}
        self._thread = threading.get_ident()
        # The first sequence number in each thread that may be noted in `_sites`.
        self._first = {self._thread: _torch.next_sequence_number()}
        self._blocks: dict[int, _Block] = {}
        # Changes of `live`: the number of events before it, the bytes, and the storage.
        self._changes: list[tuple[int, int, Held]] = []
        self._until_peak = 0  # how many of these changes led to the peak
        # The callback must not keep the mode alive: blocks -> callback -> mode would be a cycle.
        me = weakref.ref(self)

        def forget(block: Any) -> None:
            if (mode := me()) is not None:
                mode._blocks.pop(block.key, None)
                mode._add(block.made, -block.counted)

        self._forget = forget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the storages of its arguments and results."""
        kwargs = kwargs or {}
        inputs = tree.partition((args, kwargs))[0]
        if any(map(_torch.is_traceable_wrapper_subclass, inputs)):
            return NotImplemented  # the subclass runs first, and the mode sees its inner tensors
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            # In inference mode torch does not decompose composite operations above this mode.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if self._lines:
            self._note_nodes()
        name = operation_name(func)
        # torch.tensor allocates without dispatching an operation, and then calls `lift_fresh`.
        self._count(inputs, name, fresh=name == "lift_fresh")
        out = func(*args, **kwargs)
        self._count(tree.partition(out)[0], name, fresh=True)
        self.operations[name] += 1
        self.timeline.append(Event(len(self.timeline), name, self.live))
        self.phases.append(_phase())
        return out

    def _count(self, tensors: list[torch.Tensor], name: str, *, fresh: bool) -> None:
        """Count the bytes of storages that are new if ``fresh``; of all others, only growth."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                key, nbytes = id(storage), storage.nbytes()
                if (block := self._blocks.get(key)) is None:
                    block = self._blocks[key] = _Block(storage, self._forget)
                    block.key, block.made = key, self._made(tensor, name)
                    block.base, block.counted = 0 if fresh else nbytes, 0
                counted = max(0, nbytes - block.base)
                self._add(block.made, counted - block.counted)
                block.counted = counted

    def _note_nodes(self) -> None:
        """Note the line that runs for nodes made since the last call; NOTE [lines of nodes]."""
        thread, number, site = threading.get_ident(), _torch.next_sequence_number(), None
        for node in range(number - 1, self._first.setdefault(thread, number) - 1, -1):
            if (thread, node) in self._sites:
                break
            site = self._sites[thread, node] = site or self._site()

    def _site(self) -> tuple[Place, str]:
        return where(), module_now(self._modules)

    def _made(self, tensor: torch.Tensor, operation: str) -> Held:
        node, site = _torch.current_node(), None
        if node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
            # The node was made in a replay on this thread, or in the forward pass.
            number = _torch.sequence_number(node)
            threads = threading.get_ident(), self._thread
            site = next(filter(None, (self._sites.get((t, number)) for t in threads)), None)
        what = operation, tuple(tensor.shape), tensor.dtype, tensor.device, 0
        if not self._lines:
            return Held(*what, "", 0, "", "", "")
        place, module = site or self._site()
        return Held(*what, *line_of(place), module, _phase())

    def _add(self, made: Held, nbytes: int) -> None:
        if nbytes:
            self.live += nbytes
            self._changes.append((len(self.timeline), nbytes, made))
            if self.live > self.peak:
                self.peak, self._until_peak = self.live, len(self._changes)

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes counted for the storages that ``tensors`` use, each storage once."""
        keys = {id(storage) for tensor in tensors for storage in storages_of(tensor)}
        return sum(self._blocks[key].counted for key in keys & self._blocks.keys())

    def first_use(self, storage: torch.UntypedStorage) -> tuple[Held | None, bool]:
        """The operation that made or first used a storage, and whether it ran in the context."""
        block = self._blocks.get(id(storage))
        return (None, False) if block is None else (block.made, block.base == 0)

    def at_the_peak(self) -> list[Held]:
        """The storages that were live at the peak, largest first."""
        made, live = dict[int, Held](), Counter[int]()
        for _, nbytes, one in self._changes[: self._until_peak]:
            made[id(one)] = one
            live[id(one)] += nbytes
        return [replace(made[key], nbytes=n) for key, n in live.most_common() if n > 0]

    def history(self) -> list[tuple[int, int, str]]:
        """Each change of ``live``: the operations before it, the bytes, and the place."""
        return [(at, nbytes, made.place) for at, nbytes, made in self._changes]


class Allocations(LiveStorages):
    """Counts what torch's CPU allocator hands out, instead of storages; for compiled code.

    Workspace that a kernel allocates is counted too. The timeline has one `Event` per allocation
    and is filled when the context is left. The operation behind an allocation is not known.
    """

    def __enter__(self) -> Allocations:
        compiler.begin_allocations()
        return self

    def __exit__(self, *raised: object) -> None:
        for nbytes in compiler.end_allocations():
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            name = "allocation" if nbytes > 0 else "release"
            self.timeline.append(Event(len(self.timeline), name, self.live))

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the storages that ``tensors`` use, each storage once."""
        return sum({id(s): s.nbytes() for t in tensors for s in storages_of(t)}.values())


def operation_name(func: Any) -> str:
    """``"mm"`` for ``aten.mm.default``; outside ATen the namespace stays: ``"prims::sum"``."""
    name: str = func.name()
    return name.partition(".")[0].removeprefix("aten::")


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: several for sparse and wrapped ones, none on ``meta``."""
    layout = tensor.layout
    parts: list[torch.Tensor] = []  # the inner tensors, if `tensor` wraps others
    if _torch.is_traceable_wrapper_subclass(tensor):
        # Since torch 2.13 the names include the mesh of a DTensor, which is not a tensor.
        named = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        parts = [part for part in named if isinstance(part, torch.Tensor)]
    elif _torch.is_wrapped(tensor):
        parts = [_torch.inner_of(tensor)]
    elif layout == torch.sparse_coo:
        parts = _torch.sparse_coo_parts(tensor)
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif layout == torch.strided:
        storage = tensor.untyped_storage()
        # A FakeTensor's storage is on "meta" too, but has the size of the memory it represents.
        if storage.device.type != "meta" or isinstance(tensor, _torch.FakeTensor):
            yield storage
    for part in parts:
        yield from storages_of(part)


def cuda_devices() -> range:
    """All CUDA devices if this process uses CUDA, else none."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector, so that a peak does not depend on when it runs."""
    restore = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    try:
        yield
    finally:
        restore()
