"""The demo's claims, in bytes and operations; and the program from start to end at toy size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import functx
from functx._demo import data, measure, model, training
from functx._demo.model import Size
from functx._demo.run import Settings


def batch_of(settings):
    digits = data.load(torch.device("cpu"), limit=settings.batch * 5 // 4 + 5)
    params = model.init(settings.size)
    return params, digits.train_images[: settings.batch], digits.train_labels[: settings.batch]


@pytest.fixture(scope="module")
def rows():
    """The demo's own model and batch, at full size, without the training."""
    settings = Settings()
    rows = measure.torch_rows(settings.size, batch_of(settings), repeats=1)
    return {(row.library, row.remat): row for row in rows}


def test_peak_is_at_most_a_third_of_torch_func(rows):
    assert rows["functx", "functx.remat"].peak * 3 <= rows["torch.func", "no"].peak
    assert rows["functx", "no"].peak * 2 <= rows["torch.func", "no"].peak


def test_gradients_are_those_of_a_loop_over_the_examples():
    size = Size(depth=2, width=8, heads=2, hidden=16)
    params, images, labels = batch_of(Settings(batch=5, size=size))
    got = training.per_example_gradients(size, functx.remat(model.block))(params, images, labels)
    for i in range(5):
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        value = model.loss(leaves, images[i], labels[i], size)
        want = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()))))
        for name in params:
            torch.testing.assert_close(got[name][i], want[name], rtol=1e-4, atol=1e-6)


def demo(tmp_path, *, hide_jax=False):
    """Run the toy demo in a process of its own; returns its output and figures."""
    hide = "import sys; sys.modules['jax'] = None; " if hide_jax else ""
    code = f"{hide}from functx.__main__ import main; raise SystemExit(main())"
    command = [sys.executable, "-W", "error", "-c", code, "demo", "--quick", "--out"]
    run = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads((tmp_path / "figures.json").read_text())


# The only run of the whole program: it trains, and compiles with JAX.
def test_it_runs_from_start_to_end_and_writes_its_figures(tmp_path):
    pytest.importorskip("jax")
    text, figures = demo(tmp_path)
    assert "held out:" in text
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "printout.txt").read_text().rstrip() in text
    assert figures["training"]["steps"] == 8
    assert [(row["library"], row["remat"]) for row in figures["rows"]] == [
        ("torch.func", "no"),
        ("torch.func", "torch.utils.checkpoint"),
        ("functx", "no"),
        ("functx", "functx.remat"),
        ("JAX (jit)", "no"),
        ("JAX (jit)", "jax.checkpoint"),
    ]
    kept = [row["kept_bytes"] for row in figures["rows"]]
    assert kept[5] < kept[4]
    check = figures["crosscheck"]
    assert check["kept_equal"]
    assert check["kept_torch"]["regions"] == 2
    assert set(check["differences"]) == {"value", "grad", "vmap(grad)"}
    for difference in check["differences"].values():
        assert difference["relative"] < 1e-5


@pytest.mark.sweep
def test_it_learns_to_read_digits():
    settings = Settings()
    digits = data.load(torch.device("cpu"))
    params = model.init(settings.size)
    per_example = training.per_example_gradients(settings.size, functx.remat(model.block))
    steps = training.train(
        params,
        digits,
        per_example,
        epochs=settings.epochs,
        batch=settings.batch,
        rate=settings.rate,
        clip=settings.clip,
    )
    assert sum(1 for _ in steps) == training.steps(digits, settings.epochs, settings.batch)
    held_out = training.accuracy(params, settings.size, digits.test_images, digits.test_labels)
    assert held_out > 0.9
