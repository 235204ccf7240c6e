"""The demo from start to end: train, cross-check, measure, write down."""

from __future__ import annotations

import importlib.util
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import functx
from functx._demo import data, measure, model, training
from functx._demo.model import Size


class DemoError(Exception):
    """The demo can't run as asked; the message says why, and what to do."""


@dataclass(frozen=True)
class DemoSettings:
    """What a run of the demo does.

    Attributes:
        out: Folder for the picture, the JSON and the printout.
        device: Where torch computes.
        size: The network.
        epochs: Passes over the training images.
        batch: Images a step, and in every measurement.
        rate: The highest learning rate.
        clip: The largest norm of one image's gradient.
        limit: How many images to use; None for all.
        repeats: Timed calls of each way in the comparison.
        seed: Of the parameters, the split and the order.
    """

    out: Path = Path("functx-demo")
    device: str = "cpu"
    size: Size = field(default_factory=Size)
    epochs: int = 15
    batch: int = 48
    rate: float = 4e-3
    clip: float = 1.0
    limit: int | None = None
    repeats: int = 5
    seed: int = 0

    def quick(self) -> DemoSettings:
        """The same at toy size, for trying the program out."""
        size = Size(depth=2, width=8, heads=2, hidden=16)
        return replace(self, size=size, epochs=1, batch=16, limit=160, repeats=1)


def run(settings: DemoSettings) -> dict[str, Any]:
    """Run the demo, printing as it goes.

    Args:
        settings: What to do.

    Returns:
        All figures, as written to ``figures.json``.

    Raises:
        DemoError: A package or the device is missing, or the folder can't be made.
    """
    _require_packages()
    device = _device(settings.device)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out {settings.out}: {error.strerror}") from error
    from rich.console import Console

    from functx._demo import report

    console = Console(record=True, highlight=False, width=110)
    started = time.perf_counter()
    digits = data.load(device, settings.limit, settings.seed)
    params = {k: v.to(device) for k, v in model.init(settings.size, settings.seed).items()}
    figures: dict[str, Any] = {"environment": _environment(device)}
    figures["training"] = _train(settings, params, digits, console)

    batch = (params, digits.train_images[: settings.batch], digits.train_labels[: settings.batch])
    rows = measure.torch_rows(settings.size, batch, settings.repeats)
    if importlib.util.find_spec("jax") is None:
        figures["crosscheck"] = None
        console.print(
            "\nJAX is not installed, so nothing is checked against it. To have it: "
            "pip install 'functx[jax]' (on CUDA: pip install 'functx[cuda]')",
            markup=False,
        )
    else:
        figures["crosscheck"] = _crosscheck(settings.size, batch, console)
        rows += measure.jax_rows(settings.size, batch, settings.repeats)

    console.print()
    console.print(report.memory_table(rows))
    for row in rows:
        if row.error is not None:
            console.print(f"error, {row.library} with {row.remat}: {row.error}", markup=False)
    figures["rows"] = [report.row_figures(row) for row in rows]
    ratio = _peak(rows, "torch.func", "no") / _peak(rows, "functx", "functx.remat")
    figures["peak_ratio"] = ratio
    console.print(f"\nvmap(grad(remat)) peaks at 1/{ratio:.1f} of torch.func's vmap(grad)")

    report.picture(rows, settings.out / "memory.png")
    figures["seconds"] = time.perf_counter() - started
    console.print(f"{figures['seconds']:.0f} s; picture, figures and printout: {settings.out}/")
    report.write_json(figures, settings.out / "figures.json")
    (settings.out / "printout.txt").write_text(console.export_text())
    return figures


def _train(
    settings: DemoSettings, params: model.Params, digits: data.Digits, console: Any
) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    size = settings.size
    numbers = sum(p.numel() for p in params.values())
    console.print(
        f"{len(digits.train_images)} digits to train on, {len(digits.test_images)} held out\n"
        f"vision transformer: {size.depth} blocks, {model.TOKENS} tokens of width {size.width}, "
        f"{numbers:,} parameters, on {settings.device}"
    )
    console.print(
        "gradients: vmap(grad(loss)), every block a remat region, each image's clipped to norm "
        f"{settings.clip:g}"
    )
    per_example = training.per_example_gradients(size, functx.remat(model.block))
    total = training.steps(digits, settings.epochs, settings.batch)
    started = time.perf_counter()
    with Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    ) as progress:
        task = progress.add_task("training", total=total, note="")
        for done in training.train(
            params,
            digits,
            per_example,
            epochs=settings.epochs,
            batch=settings.batch,
            rate=settings.rate,
            clip=settings.clip,
            seed=settings.seed,
        ):
            note = ""
            if done % (total // settings.epochs) == 0:
                held_out = training.accuracy(params, size, digits.test_images, digits.test_labels)
                note = f"held out: {held_out:.1%} right"
                progress.update(task, note=note)
            progress.advance(task)
    return {
        "accuracy": held_out,
        "seconds": time.perf_counter() - started,
        "steps": total,
        "batch": settings.batch,
        "epochs": settings.epochs,
        "parameters": numbers,
        "size": vars(size) | {"tokens": model.TOKENS},
    }


def _crosscheck(size: Size, batch: measure.Batch, console: Any) -> dict[str, Any]:
    """Compare one batch with JAX, on the CPU, and print the table."""
    from functx.compat import crosscheck

    params, images, labels = batch
    block = functx.remat(model.block)

    def loss(p: model.Params, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return model.loss(p, image, label, size, block)

    found = crosscheck(
        loss,
        {name: param.detach().cpu() for name, param in params.items()},
        images.cpu(),
        labels.cpu(),
        in_dims=(None, 0, 0),
        name="the loss of the digits' transformer",
    )
    console.print()
    console.print(str(found), markup=False)
    return asdict(found) | {"kept_equal": found.kept_equal}


def _peak(rows: list[measure.Row], library: str, remat: str) -> int:
    (peak,) = [row.peak for row in rows if (row.library, row.remat) == (library, remat)]
    assert peak is not None
    return peak


def _environment(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "functx": functx.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device} ({name})",
        "threads": str(torch.get_num_threads()),
    }


def _require_packages() -> None:
    packages = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}
    missing = [pip for module, pip in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise DemoError(f"needs {', '.join(missing)}: pip install 'functx[demo]'")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DemoError(f"--device {name}: {str(error).partition(chr(10))[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f"--device {name}: the demo runs on cpu and cuda")
    if device.type == "cuda":
        if torch.version.cuda is None:
            raise DemoError(f"--device {name}: this torch ({torch.__version__}) has no CUDA in it")
        if not torch.cuda.is_available():
            raise DemoError(f"--device {name}: torch finds no CUDA device")
        if (device.index or 0) >= torch.cuda.device_count():
            raise DemoError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
    return device
