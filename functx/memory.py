"""Measure the peak bytes, the timeline and the operations of a call. Results repeat exactly.

On CPU, bytes are those of the storages that the call creates (`functx._core.memory_tracker` says
how they are followed, and what can't be seen). On CUDA the peak is that of the allocator, from
:func:`torch.cuda.max_memory_allocated`. If the function, its arguments or the variables that it
reads contain code compiled by `functx.jit` or ``torch.compile``, bytes are those that torch's
allocator hands out. Call such a function once before measuring, since the first call compiles.

The cyclic garbage collector is off during a call, so a reference cycle shows as a leak in every
run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from functx._compile import State, is_compiled
from functx._core import Event, Held, LiveStorages, check_callable, memory_tracker, tree
from functx._insight import plots

__all__ = ["Event", "Held", "LiveStorages", "Profile", "count", "peak", "plot", "profile"]

SHOWN = 12  # how many rows are printed for the storages that are live at the peak


@dataclass(frozen=True)
class Profile(plots.Printed):
    """The memory use of one call. Prints as a table; all sizes are in bytes.

    ``holders``, ``phases`` and ``history`` are empty for compiled code.

    Attributes:
        result: The result of the call.
        peak: The most bytes that were live at once, above those live at entry: on CPU, bytes of
            storages that the call created; on CUDA, bytes that the allocator handed out, with its
            rounding.
        kept: Bytes of storages that the call created, that are not part of the result, and that are
            still alive. After a forward pass these are what autograd saved for the backward pass.
        returned: Bytes of storages that the call created and the result uses.
        timeline: One `Event` per operation; for compiled code, one per request to the allocator.
        holders: The storages that were live at the peak, largest first, each as a `Held`.
        phases: For each event of the timeline, ``"forward"``, ``"backward"``, or ``"replay"`` for a
            region that runs again in a backward pass.
        history: Every change of the live bytes: the number of operations before it, its bytes, and
            the line of code that made the storage.
    """

    result: Any
    peak: int
    kept: int
    returned: int
    timeline: tuple[Event, ...]
    holders: tuple[Held, ...]
    phases: tuple[str, ...]
    history: tuple[tuple[int, int, str], ...]

    @property
    def operations(self) -> Counter[str]:
        """How often each operation ran, by name."""
        return Counter(event.operation for event in self.timeline)

    def plot(self, path: str | Path) -> Path:
        """Draw the live bytes over the operations, in layers by the lines that made them.

        Backward passes are shaded, replays of regions are shaded darker, and the peak is marked.
        The suffix of ``path`` selects the format. This needs matplotlib.
        """
        live = [event.live for event in self.timeline]
        return plots.layers(live, self.history, self.phases, path)

    def __str__(self) -> str:
        lines = [("peak", self.peak), ("kept", self.kept), ("returned", self.returned)]
        sums = Counter[str]()
        for one in self.holders:
            sums[f"at peak, {one}"] += one.nbytes
        held = sums.most_common()
        lines += held[:SHOWN]
        if others := [nbytes for _, nbytes in held[SHOWN:]]:
            lines.append((f"at peak, {len(others)} others", sum(others)))
        width = max(len(name) for name, _ in lines)
        what = "operations" if self.phases or not self.timeline else "requests to the allocator"
        table = [f"{name:<{width}} {nbytes:>15,} bytes" for name, nbytes in lines]
        return "\n".join([f"{len(self.timeline)} {what}", *table])


def profile(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Profile:
    """Call ``f`` and follow its memory, operation by operation.

    Args:
        f: Any callable. It may use transforms and run backward passes.
        *args: Passed to ``f``.
        **kwargs: Passed to ``f``.

    Returns:
        A `Profile`, with the result of ``f`` as ``result``.

    Raises:
        TypeError: ``f`` is not callable. Errors of ``f`` itself are raised unchanged.

    Example:
        >>> import torch, functx.memory
        >>> w = torch.ones(1000, requires_grad=True)
        >>> forward = functx.memory.profile(lambda: w.sin().exp())
        >>> forward.peak, forward.kept, forward.returned  # sin's output is dropped: 4000 bytes each
        (8000, 0, 4000)
        >>> print(functx.memory.profile(lambda: w.sin().tanh().sum()))  # doctest: +ELLIPSIS
        4 operations
        peak ... 8,000 bytes
        kept ... 4,000 bytes
        returned ... 4 bytes
        at peak, sin, float32[1000], ...:1 in <lambda> ... 4,000 bytes
        at peak, tanh, float32[1000], ...:1 in <lambda> ... 4,000 bytes
    """
    result, followed, peak = _follow("profile", f, args, kwargs)
    returned = followed.bytes_of(tree.partition(result)[0])
    return Profile(
        *(result, peak, followed.live - returned, returned, tuple(followed.timeline)),
        *(tuple(followed.at_the_peak()), tuple(followed.phases), tuple(followed.history())),
    )


def peak(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> int:
    """The most bytes that are live at once during a call, above those live at entry.

    Args and errors are those of `profile`.

    Returns:
        Bytes. On CPU, the exact bytes of the storages that the call creates. If the call allocates
        on CUDA, the peak of torch's CUDA allocator, summed over all devices.

    Example:
        >>> import torch, functx.memory
        >>> functx.memory.peak(lambda x: x.sin().sin().sin(), torch.ones(1000))
        8000
    """
    return _follow("peak", f, args, kwargs)[-1]


def count(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Counter[str]:
    """How often a call runs each operation, below autograd and functorch.

    Args are those of `profile`.

    Raises:
        TypeError: ``f`` is not callable, or runs compiled code, whose operations can't be seen.

    Returns:
        Counts by name: ATen operations without namespace (``"mm"``), others with it.

    Example:
        >>> import torch, functx.memory
        >>> df = torch.func.grad(lambda x: x.sin().sum())
        >>> functx.memory.count(df, torch.ones(3))["cos"]
        1
    """
    return _follow("count", f, args, kwargs)[1].operations


def plot(profiles: Mapping[str, Profile], path: str | Path) -> Path:
    """Draw live bytes over operations, one line per profile, with the peaks in the legend.

    Args:
        profiles: The profiles, by label.
        path: The file to write; its suffix selects the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    curves = {
        f"{label}: peak {one.peak / 2**20:.1f} MiB": [event.live for event in one.timeline]
        for label, one in profiles.items()
    }
    return plots.lines(curves, path)


def _follow(api: str, f: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, int]:
    """Call a function; returns its result, the tracker of its memory, and the peak in bytes."""
    check_callable(f, f"functx.memory.{api}")
    if any(map(is_compiled, State((f, args, kwargs)).held)):
        if api == "count":
            raise TypeError(
                "functx.memory.count: the function runs compiled code, whose operations can't be "
                "counted. Count the operations of the original function instead."
            )
        followed: LiveStorages = memory_tracker.Allocations()
    else:
        followed = LiveStorages(lines=api == "profile")
    before = {}
    for index in memory_tracker.cuda_devices():
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
        before[index] = torch.cuda.memory_allocated(index)
    with memory_tracker.no_collection(), followed:
        result = f(*args, **kwargs)
    highest = torch.cuda.max_memory_allocated
    on_cuda = sum(highest(i) - before.get(i, 0) for i in memory_tracker.cuda_devices())
    return result, followed, on_cuda or followed.peak
