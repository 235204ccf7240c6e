"""Peak bytes, timelines and operation counts of a call: exact, and the same at every run.

On CPU the bytes are those of the storages that the call creates (``functx/_storages.py`` says how
they are followed, and what can't be seen): no allocator, no rounding, no clock. On CUDA the peak is
the allocator's, from :func:`torch.cuda.max_memory_allocated`.

The collector of reference cycles is off during a measured call. A cycle that holds activations then
shows in every run, as the leak it is, and not only in those where the collector came late.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from functx import _tree
from functx._storages import Event, LiveStorages
from functx._validate import check_callable

__all__ = ["Event", "LiveStorages", "Profile", "count", "peak", "plot", "profile"]


@dataclass(frozen=True)
class Profile:
    """What one call did to memory. Prints as a table; all sizes are in bytes.

    Attributes:
        result: What the call returned.
        peak: Most bytes live at once, above those live at entry: on CPU those of the storages the
            call created, on CUDA what the allocator had handed out, rounded up its way.
        kept: Bytes of storages created by the call that lived on when it had returned, other than
            those of the result: after a forward pass what autograd saved for the backward pass.
        returned: Bytes of storages created by the call that the result uses.
        timeline: One `Event` an operation: its position, its name, the bytes live when it had run.
        at_peak: Bytes live at the peak, by the operation that created them; largest first.
    """

    result: Any
    peak: int
    kept: int
    returned: int
    timeline: tuple[Event, ...]
    at_peak: tuple[tuple[str, int], ...]

    @property
    def operations(self) -> Counter[str]:
        """How often each operation ran, by name."""
        return Counter(event.operation for event in self.timeline)

    def plot(self, path: str | Path) -> Path:
        """Draw the live bytes over the operations, as `plot` does for several profiles.

        Args:
            path: The file to write; its suffix says the format.

        Returns:
            ``path``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return plot({"live bytes": self}, path)

    def __str__(self) -> str:
        lines = [("peak", self.peak), ("kept", self.kept), ("returned", self.returned)]
        lines += [(f"at peak, from {name}", nbytes) for name, nbytes in self.at_peak]
        width = max(len(name) for name, _ in lines)
        head = f"{len(self.timeline)} operations"
        return "\n".join([head] + [f"{name:<{width}} {n:>15,} bytes" for name, n in lines])


def profile(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Profile:
    """Call ``f`` and follow its memory, operation by operation.

    Args:
        f: Any callable, with any stack of transforms, backward passes included.
        *args: Passed to ``f``.
        **kwargs: Passed to ``f``.

    Returns:
        A `Profile`; its ``result`` is what ``f`` returned.

    Raises:
        TypeError: ``f`` can't be called. What ``f`` raises passes through.

    Example:
        >>> import torch, functx.memory
        >>> w = torch.ones(1000, requires_grad=True)
        >>> forward = functx.memory.profile(lambda: w.sin().exp())
        >>> forward.peak, forward.kept, forward.returned  # sin's output is dropped: 4000 bytes each
        (8000, 0, 4000)
        >>> print(functx.memory.profile(lambda: w.sin().tanh().sum()))
        4 operations
        peak                         8,000 bytes
        kept                         4,000 bytes
        returned                         4 bytes
        at peak, from sin            4,000 bytes
        at peak, from tanh           4,000 bytes
    """
    check_callable(f, "functx.memory.profile")
    storages = LiveStorages()
    with _no_collection(), _DevicePeak() as device, storages:
        result = f(*args, **kwargs)
    returned = storages.bytes_of(x for x in _tree.leaves(result) if isinstance(x, torch.Tensor))
    return Profile(
        result=result,
        peak=device.bytes or storages.peak,
        kept=storages.live - returned,
        returned=returned,
        timeline=tuple(storages.timeline),
        at_peak=tuple(storages.at_peak.most_common()),
    )


def peak(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> int:
    """The most bytes that a call has live at once, above those live at entry.

    Args:
        f: Any callable, with any stack of transforms, backward passes included.
        *args: Passed to ``f``.
        **kwargs: Passed to ``f``.

    Returns:
        Bytes. On CPU exactly those of the storages that the call creates; if the call allocates on
        CUDA, the peak of torch's allocator there, all devices together.

    Raises:
        TypeError: ``f`` can't be called. What ``f`` raises passes through.

    Example:
        >>> import torch, functx.memory
        >>> functx.memory.peak(lambda x: x.sin().sin().sin(), torch.ones(1000))
        8000
    """
    check_callable(f, "functx.memory.peak")
    return profile(f, *args, **kwargs).peak


def count(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Counter[str]:
    """How often a call runs each operation, below autograd and functorch.

    Args:
        f: Any callable, with any stack of transforms, backward passes included.
        *args: Passed to ``f``.
        **kwargs: Passed to ``f``.

    Returns:
        Counts by name: ATen operations by their bare one (``"mm"``), others with their namespace.

    Raises:
        TypeError: ``f`` can't be called. What ``f`` raises passes through.

    Example:
        >>> import torch, functx.memory
        >>> df = torch.func.grad(lambda x: x.sin().sum())
        >>> functx.memory.count(df, torch.ones(3))["cos"]
        1
    """
    check_callable(f, "functx.memory.count")
    with LiveStorages() as storages:
        f(*args, **kwargs)
    return storages.operations


def plot(profiles: Mapping[str, Profile], path: str | Path) -> Path:
    """Draw live bytes over operations, one line a profile, its peak in the legend.

    Args:
        profiles: What to draw, by label.
        path: The file to write; its suffix says the format.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is nothing to draw.
    """
    if not profiles:
        raise ValueError("functx.memory.plot: no profile to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "functx.memory.plot needs matplotlib: pip install matplotlib, or 'functx[demo]'"
        ) from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, one in profiles.items():
        live = [event.live / 2**20 for event in one.timeline]
        axes.plot(live, label=f"{label}: peak {one.peak / 2**20:.1f} MiB", linewidth=1.2)
    axes.set_xlabel("operations run")
    axes.set_ylabel("live, MiB")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = Path(path)
    figure.savefig(path, dpi=150)
    return path


class _DevicePeak:
    """The peak of the CUDA allocator within a context, all devices together; 0 if not used."""

    bytes = 0

    def __enter__(self) -> _DevicePeak:
        self._before: dict[int, int] = {}
        if torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
                torch.cuda.reset_peak_memory_stats(index)
                self._before[index] = torch.cuda.memory_allocated(index)
        return self

    def __exit__(self, *exc: object) -> None:
        if torch.cuda.is_initialized():
            self.bytes = sum(
                torch.cuda.max_memory_allocated(index) - self._before.get(index, 0)
                for index in range(torch.cuda.device_count())
            )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the collector of cycles from making a peak depend on when it last ran."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
