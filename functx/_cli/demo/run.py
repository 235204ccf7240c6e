"""The demo from start to end: train, cross-check, measure, write the results."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

import functx
from functx import memory
from functx._cli.demo import measurement, training

FULL = {"depth": 6, "width": 32, "hidden": 64}
TOY = {"depth": 2, "width": 8, "hidden": 16}
CLIP = 1.0


class DemoError(Exception):
    """The demo can't run with these options. The message says why, and what to do."""


def run(out: Path, device: str = "cpu", epochs: int | None = None, quick: bool = False) -> None:
    """Run the demo and print its progress.

    Args:
        out: Folder for the picture, the JSON and the printout.
        device: The device for torch.
        epochs: Passes over the training images; 15 by default, 1 if ``quick``.
        quick: Whether to use a toy size, which takes seconds.

    Raises:
        DemoError: The device is not available, or the folder can't be created.
    """
    epochs = (1 if quick else 15) if epochs is None else epochs
    size, batch, repeats = (TOY, 16, 1) if quick else (FULL, 48, 5)
    if epochs < 1:
        raise DemoError(f"--epochs {epochs} is not a positive number")
    try:
        torch.zeros(1, device=device).item()
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out {out}: {error.strerror}") from error
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch built without CUDA
        reason = str(error).partition("\n")[0]
        raise DemoError(f"--device {device}: {reason}; the demo runs on cpu and cuda") from error
    console = Console(record=True, highlight=False, width=110)
    started = time.perf_counter()
    images, labels = (x.to(device) for x in training.load(160 if quick else None))
    params = {name: param.to(device) for name, param in training.init(**size).items()}
    on_cuda = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if on_cuda else platform.machine()
    versions = {"functx": functx.__version__, "torch": torch.__version__}
    figures: dict[str, Any] = {"environment": versions | {"device": f"{device} ({name})"}}
    figures["training"] = {"size": size} | _train((params, images, labels), epochs, batch, console)

    one = (params, images[:batch], labels[:batch])
    rows = measurement.torch_rows(one, repeats)
    profiles = {
        f"{row['library']}, {'no remat' if row['remat'] == 'no' else 'remat'}": row.pop("profile")
        for row in rows
        if row["error"] is None
    }
    ratio = rows[0]["peak_bytes"] / rows[-1]["peak_bytes"]
    figures["crosscheck"] = None
    if importlib.util.find_spec("jax") is None:
        install = "pip install 'functx[jax]' (on CUDA: pip install 'functx[cuda]')"
        console.print(f"\nJAX is not installed; to check against it: {install}", markup=False)
    else:
        found = measurement.crosscheck(one)
        console.print(f"\n{found}", markup=False)
        figures["crosscheck"] = asdict(found) | {"kept_equal": found.kept_equal}
        rows += measurement.jax_rows(one, repeats)
    console.print("", measurement.table(rows), sep="\n")
    for row in rows:
        if row["error"] is not None:
            console.print(
                f"error, {row['library']} with {row['remat']}: {row['error']}", markup=False
            )
    console.print(f"\nvmap(grad(remat)) peaks at 1/{ratio:.1f} of torch.func's vmap(grad)")
    memory.plot(profiles, out / "memory.png")
    figures |= {"rows": rows, "peak_ratio": ratio, "seconds": time.perf_counter() - started}
    console.print(f"{figures['seconds']:.0f} s; picture, figures and printout: {out}/")
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    # Keep only the last state of the progress bar.
    text = re.sub("training .*training ", "training ", console.export_text())
    (out / "printout.txt").write_text(text)


def _train(data: Any, epochs: int, batch: int, console: Console) -> dict[str, Any]:
    """Train on four fifths of the images, and test on the others."""
    params, images, labels = data
    count = len(images) * 4 // 5
    numbers = sum(param.numel() for param in params.values())
    depth, (tokens, width) = sum("qkv" in name for name in params), params["position"].shape
    console.print(
        f"{count} digits to train on, {len(images) - count} held out\n"
        f"vision transformer: {depth} blocks, {tokens} tokens of width {width}, "
        f"{numbers:,} parameters, on {images.device}\n"
        "gradients: vmap(grad(loss)), every block a remat region, each image's clipped to norm "
        f"{CLIP:g}\na minute or two on an idle machine; functx demo --quick takes seconds"
    )
    started, total = time.perf_counter(), epochs * (count // batch)
    steps = training.train(params, images[:count], labels[:count], epochs, batch, CLIP)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.description}"
    with Progress("training", *columns, console=console) as progress:
        for step, _ in enumerate(progress.track(steps, total, description=""), 1):
            if step * epochs % total == 0 and not console.is_terminal:  # there is no bar
                console.print(f"pass {step * epochs // total} of {epochs}")
        held_out = training.accuracy(params, images[count:], labels[count:])
        progress.update(progress.task_ids[0], description=f"held out: {held_out:.1%} right")
    counts = {"steps": total, "batch": batch, "epochs": epochs, "parameters": numbers}
    return {"accuracy": held_out, "seconds": time.perf_counter() - started, **counts}
