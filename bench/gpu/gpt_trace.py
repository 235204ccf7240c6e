"""Claim: at the size of the GPT, what a region costs the CPU is hidden behind the kernels.

One step of training under torch's profiler: how long it takes from the first operation to the last
kernel, how much of that the device computes, and how far the CPU is ahead of it at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench._common import Column, Result, environment, ratios
from bench.gpu import _torch_gpt
from bench.gpu._torch_gpt import WAYS
from bench.gpu._variants import Arguments, Runner, Setting, Variant, arguments, errors

NAME = "gpt_trace"
CLAIM = "A step of training of the GPT under the profiler: how busy the device is"
SECONDS = 60.0
BATCH, TOY_BATCH = 16, 2
TRACED = ["plain", "torch.utils.checkpoint", "functx.remat"]
DRAWN = "functx.remat"

Span = tuple[float, float]  # microseconds


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time, as spans that do not overlap, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def total(spans: Iterable[Span]) -> float:
    """How long they are together."""
    return sum(end - start for start, end in union(spans))


def spans_of(events: Iterable[Any], device: str) -> tuple[list[Span], list[Span]]:
    """When the device computes, and when the CPU is at work.

    On the CPU, operations stand for what a device would compute.
    """
    kernels, calls = [], []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.device_type == DeviceType.CUDA:
            kernels.append(span)
        else:
            calls.append(span)
            if device == "cpu" and event.name.startswith("aten::"):
                kernels.append(span)
    return kernels, calls


def traced(setting: Setting, way: str) -> dict[str, Any]:
    """A step that has warmed up, profiled."""
    model = _torch_gpt.model_of(setting.toy, setting.device)
    size = TOY_BATCH if setting.toy else BATCH
    x, y = _torch_gpt.batch_of(size, setting.toy, setting.device)
    WAYS[way](model, x)
    step = _torch_gpt.step_of(model, x, y)
    for _ in range(3):
        step()
    cuda = setting.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    if cuda:
        torch.cuda.synchronize()
    with profile(activities=activities, acc_events=True) as found:
        step()
        if cuda:
            torch.cuda.synchronize()
    # Waiting for the device is no work.
    events = [e for e in found.events() if "Synchronize" not in e.name and "Profiler" not in e.name]
    kernels, calls = spans_of(events, setting.device)
    start, last_call = min(s for s, _ in calls), max(e for _, e in calls)
    end = max(e for _, e in kernels)
    if way == DRAWN and setting.given.get("picture"):
        draw(Path(setting.given["picture"]), {"kernels": kernels, "CPU": calls}, start)
    return {
        "seconds": (end - start) / 1e6,
        "busy": total(kernels) / (end - start),
        "kernels": len(kernels),
        "ahead": max(0.0, end - last_call) / 1e6,
    }


def draw(path: Path, lanes: Mapping[str, Sequence[Span]], start: float) -> None:
    """A picture of the step, a lane above another."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.add_subplot()
    for lane, spans in enumerate(lanes.values()):
        bars = [((s - start) / 1e3, (e - s) / 1e3) for s, e in union(spans)]
        axes.broken_barh(bars, (lane - 0.35, 0.7))
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


VARIANTS: dict[str, Variant] = {way: functools.partial(traced, way=way) for way in TRACED}

COLUMNS = [
    Column("way", "blocks"),
    Column("seconds", "step, ms", ".1f", 1e-3),
    Column("seconds_ratio", "to plain", ".2f"),
    Column("busy", "device busy", ".0%"),
    Column("kernels", "kernels", ".0f"),
    Column("ahead", "CPU ahead at the end, ms", ".1f", 1e-3),
]


def run(found: Arguments) -> Result:
    """Trace all ways, and write each down as it comes."""
    runner = Runner("bench.gpu.gpt_trace", VARIANTS, found)
    picture = None if found.out is None else str(found.out.absolute() / f"{NAME}.png")
    rows: list[dict[str, Any]] = []
    for way in VARIANTS:
        rows.append({"way": way, **runner.run(way, picture=picture)})
        ratios(rows, "seconds", rows[0])
        result = Result(
            NAME, CLAIM + ".", COLUMNS, rows, errors(rows, "way"), environment(runner.device)
        )
        found.write(result)
    return result


if __name__ == "__main__":
    parsed = arguments(NAME, CLAIM, SECONDS)
    run(parsed).show()
