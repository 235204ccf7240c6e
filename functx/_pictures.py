"""Pictures of memory: live bytes over operations, as lines or in layers. matplotlib is optional."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIB = 2**20

SHADES = {"backward": "0.95", "replay": "0.88"}

LAYERS = 8
"""So many lines of code have a layer of their own; the others share one."""


def lines(curves: Sequence[tuple[str, Sequence[float]]], path: str | Path) -> Path:
    """Draw curves of live bytes over operations, one for each label.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = _figure()
    for label, live in curves:
        axes.plot([n / MIB for n in live], label=label, linewidth=1.2)
    return _finished(figure, axes, path)


def layers(
    live: Sequence[int],
    history: Sequence[tuple[int, int, str]],
    phases: Sequence[str],
    path: str | Path,
) -> Path:
    """Draw live bytes over operations, in layers by what holds them.

    Args:
        live: bytes live after each operation.
        history: after how many operations, by how many bytes, and of what they changed.
        phases: what each operation is a part of: backward passes are shaded, and replays more so.
        path: the file to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = _figure()
    start = 0
    for phase, run in itertools.groupby(phases):
        end = start + len(list(run))
        if phase in SHADES:
            axes.axvspan(start - 0.5, end - 0.5, color=SHADES[phase], linewidth=0, zorder=0)
        start = end
    areas = layers_of(history, len(live))
    if areas and live:
        axes.stackplot(
            range(len(live)),
            *[[n / MIB for n in area] for area in areas.values()],
            labels=list(areas),
            step="post",
            linewidth=0,
        )
        peak = max(range(len(live)), key=live.__getitem__)
        axes.plot(peak, live[peak] / MIB, "kv", markersize=5)
        text = f"{live[peak] / MIB:.1f} MiB"
        axes.annotate(text, (peak, live[peak] / MIB), xytext=(0, 6), textcoords="offset points")
    return _finished(figure, axes, path)


def layers_of(history: Sequence[tuple[int, int, str]], events: int) -> dict[str, list[int]]:
    """Bytes after each event, for the lines that hold most, over all events, and for the others."""
    live: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for at, nbytes, label in history:
        live[label] += nbytes
        most[label] += nbytes * (events - at)
    own = {label for label, nbytes in most.most_common(LAYERS) if nbytes > 0}
    names = [label for label in dict.fromkeys(label for *_, label in history) if label in own]
    others = len([nbytes for nbytes in most.values() if nbytes > 0]) - len(own)
    rest = f"{others} other lines"
    areas = {name: [0] * events for name in [*names, *([rest] if others else [])]}
    for at, nbytes, label in history:
        # What changed while an operation ran is there after it.
        if (name := label if label in own else rest) in areas and at < events:
            areas[name][at] += nbytes
    return {name: list(itertools.accumulate(changes)) for name, changes in areas.items()}


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "functx.memory.plot needs matplotlib: pip install matplotlib, or 'functx[demo]'"
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def _finished(figure: Any, axes: Any, path: str | Path) -> Path:
    axes.set_xlabel("operations run")
    axes.set_ylabel("live, MiB")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[0]) > 3:
        figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")
    path = Path(path)
    figure.savefig(path, dpi=150)
    return path
