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


def test_lean_grad_alone_is_below_torch_func(rows):
    assert rows["functx", "no"].peak * 2 <= rows["torch.func", "no"].peak


def test_torch_checkpoint_cannot_run_under_functorch(rows):
    assert "saved tensor hooks" in rows["torch.func", "torch.utils.checkpoint"].error


def test_kept_is_the_same_tape_in_torch_func_and_functx(rows):
    assert rows["functx", "no"].kept == rows["torch.func", "no"].kept


def test_remat_keeps_little_more_than_the_inputs_of_the_blocks(rows):
    settings = Settings()
    tokens = settings.batch * model.TOKENS * settings.size.width * 4
    kept = rows["functx", "functx.remat"].kept
    assert settings.size.depth * tokens <= kept <= (settings.size.depth + 2) * tokens


def test_timelines_are_whole(rows):
    for row in rows.values():
        if row.error is None:
            assert max(event.live for event in row.profile.timeline) == row.peak
            assert row.profile.returned == Settings().batch * sum(
                p.numel() * 4 for p in model.init(Settings().size).values()
            )


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


def test_clipped_mean():
    gradients = {"a": torch.tensor([[3.0], [0.3]]), "b": torch.tensor([[[4.0]], [[0.4]]])}
    mean = training.clipped_mean(gradients, clip=1.0)
    # Norms 5 and 0.5: the first is scaled to 1, the second stays.
    torch.testing.assert_close(mean["a"], torch.tensor([(0.6 + 0.3) / 2]))
    torch.testing.assert_close(mean["b"], torch.tensor([[(0.8 + 0.4) / 2]]))
    zero = training.clipped_mean({"a": torch.zeros(2, 3)}, clip=1.0)
    assert torch.equal(zero["a"], torch.zeros(3))


def test_blocks_run_twice_forward_and_no_more():
    settings = Settings(size=Size(depth=3, width=8, heads=2, hidden=16), batch=4)
    batch = batch_of(settings)

    def softmaxes(block):
        return functx.memory.count(training.per_example_gradients(settings.size, block), *batch)

    assert softmaxes(model.block)["_softmax"] == 3
    assert softmaxes(functx.remat(model.block))["_softmax"] == 6


def test_digits_are_split_without_overlap():
    digits = data.load(torch.device("cpu"))
    assert len(digits.train_images) + len(digits.test_images) == 1797
    assert digits.train_images.min() == 0
    assert digits.train_images.max() == 1
    again = data.load(torch.device("cpu"))
    assert torch.equal(digits.test_labels, again.test_labels)


def demo(tmp_path, *, hide_jax=False):
    """Run the toy demo in a process of its own; returns its output and figures."""
    hide = "import sys; sys.modules['jax'] = None; " if hide_jax else ""
    code = f"{hide}from functx.__main__ import main; raise SystemExit(main())"
    command = [sys.executable, "-W", "error", "-c", code, "demo", "--quick", "--out"]
    run = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads((tmp_path / "figures.json").read_text())


def test_end_to_end(tmp_path):
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


def test_without_jax_it_says_how_to_get_it_and_does_the_rest(tmp_path):
    text, figures = demo(tmp_path, hide_jax=True)
    assert "JAX is not installed" in text
    assert "pip install 'functx[jax]'" in text
    assert figures["crosscheck"] is None
    assert len(figures["rows"]) == 4
    assert (tmp_path / "memory.png").exists()


@pytest.mark.sweep
def test_accuracy_on_held_out_digits():
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
