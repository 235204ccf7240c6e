"""Plot live bytes over operations, as lines or in layers. This needs matplotlib."""

from __future__ import annotations

import html
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Change = tuple[int, int, str]  # the number of operations before it, its bytes, and a line of code

MIB = 2**20
SHADES = {"backward": "0.95", "replay": "0.88"}
LAYERS = 8  # how many lines of code get a separate layer; all others share one


class Printed:
    """A base class for objects that notebooks show as they print."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def lines(curves: Mapping[str, Sequence[float]], path: str | Path) -> Path:
    """Draw curves of live bytes over operations, one for each label."""
    with _picture(path) as axes:
        for label, live in curves.items():
            axes.plot([n / MIB for n in live], label=label, linewidth=1.2)
    return Path(path)


def layers(
    live: Sequence[int], history: Sequence[Change], phases: Sequence[str], path: str | Path
) -> Path:
    """Draw a profile: live bytes in layers by line of code, phases shaded, the peak marked."""
    areas = layers_of(history, len(live))
    labels = {"backward": "shaded: the backward pass", "replay": "darker: a region runs again"}
    with _picture(path) as axes:
        axes.set(title="live bytes, by the line that made them", ymargin=0.1)
        for phase, run in itertools.groupby(enumerate(phases), key=lambda one: one[1]):
            at = [i for i, _ in run]
            if phase in SHADES:
                how = {"color": SHADES[phase], "label": labels.pop(phase, "_"), "linewidth": 0}
                axes.axvspan(at[0] - 0.5, at[-1] + 0.5, zorder=0, **how)
        if areas and live:
            heights = [[n / MIB for n in area] for area in areas.values()]
            axes.stackplot(range(len(live)), *heights, labels=[*areas], step="post", linewidth=0)
            top = max(range(len(live)), key=live.__getitem__), max(live) / MIB
            axes.plot(*top, "kv", markersize=5, label=f"peak, {top[1]:.3g} MiB")
    return Path(path)


def layers_of(history: Sequence[Change], events: int) -> dict[str, list[int]]:
    """Bytes after each event: for the lines that hold the most in total, and for all others."""
    most: Counter[str] = Counter()
    for at, nbytes, label in history:
        most[label] += nbytes * (events - at)
    own = {label for label, nbytes in most.most_common(LAYERS) if nbytes > 0}
    others = sum(nbytes > 0 for nbytes in most.values()) - len(own)
    areas: dict[str, list[int]] = {}
    for at, nbytes, label in history:
        if label in own or others:
            name = label if label in own else f"{others} other lines"
            area = areas.setdefault(name, [0] * events)
            if at < events:  # a change while an operation runs is visible after the operation
                area[at] += nbytes
    return {name: list(itertools.accumulate(changes)) for name, changes in areas.items()}


@contextmanager
def _picture(path: str | Path) -> Iterator[Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "functx.memory.plot needs matplotlib: pip install matplotlib, or 'functx[demo]'"
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    yield axes
    axes.set(xlabel="operations run", ylabel="live, MiB")
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
