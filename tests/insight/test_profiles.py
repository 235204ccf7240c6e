"""Profiles: who holds the bytes at the peak, by the line of the user's code, in every pass."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import functx
from functx import _pictures, _traced
from functx.memory import profile

N = 1000
B = 4 * N
HERE = os.path.basename(__file__)


@pytest.fixture
def x():
    return torch.linspace(0, 1, N)


def line_of(f, offset):
    return f.__code__.co_firstlineno + offset


def wave(x):
    y = torch.sin(x)
    return torch.exp(y)


def test_holders_are_known_by_operation_shape_and_line(x):
    def f(x):
        y = wave(x)
        return y.reshape(10, -1).tanh()

    p = profile(f, x)
    assert p.peak == 2 * B == sum(held.nbytes for held in p.holders)
    first, second = p.holders
    assert (first.operation, first.shape, first.dtype) == ("sin", (N,), torch.float32)
    assert (first.file, first.line, first.function) == (__file__, line_of(wave, 1), "wave")
    assert (second.operation, second.line) == ("exp", line_of(wave, 2))
    assert second.place == f"{HERE}:{line_of(wave, 2)} in wave"
    assert {held.phase for held in p.holders} == {"forward"}
    assert dict(p.at_peak) == {"sin": B, "exp": B}


def test_a_backward_pass_has_the_lines_of_its_forward(x):
    def f(x):
        wave(x.requires_grad_()).sum().backward()

    p = profile(f, x)
    assert p.phases.count("backward") >= 3
    assert set(p.phases[: p.phases.index("backward")]) == {"forward"}
    (cosine,) = (held for held in p.holders if held.operation == "cos")
    assert (cosine.phase, cosine.line, cosine.function) == ("backward", line_of(wave, 1), "wave")
    assert cosine.place == f"backward of {HERE}:{line_of(wave, 1)} in wave"


@pytest.mark.parametrize(
    "stack",
    [
        functx.grad,
        torch.func.grad,
        lambda f: functx.vmap(functx.grad(f)),
        lambda f: functx.jacrev(lambda x: f(x)[None]),
        lambda f: functx.grad(lambda x: functx.vmap(f)(x[None]).sum()),
    ],
)
def test_lines_are_those_of_the_function_under_transforms(stack):
    x = torch.linspace(0, 1, N).reshape(4, -1)
    p = profile(stack(lambda x: wave(x).sum()), x)
    assert p.peak == sum(held.nbytes for held in p.holders)
    lines = {(held.operation, held.line) for held in p.holders if held.function == "wave"}
    assert lines & {("exp", line_of(wave, 2)), ("cos", line_of(wave, 1))}
    assert len(p.phases) == len(p.timeline)


def test_replays_are_told_from_the_rest(x):
    region = functx.remat(wave)
    for f in (
        functx.grad(lambda x: torch.sin(region(x)).sum()),
        lambda x: torch.sin(region(x.requires_grad_())).sum().backward(),
    ):
        p = profile(f, x.clone())
        ran = [(phase, e.operation) for phase, e in zip(p.phases, p.timeline)]
        assert ("replay", "sin") in ran
        assert ("backward", "cos") in ran
        assert ran.count(("forward", "sin")) == 2
    assert type(region(x.clone().requires_grad_()).grad_fn).__name__ == _traced.REGION


def test_modules_have_paths(x):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    p = profile(lambda x: net(x).sum().backward(), torch.ones(N, 4))
    held = {(h.operation, h.module, h.phase) for h in p.holders}
    assert ("addmm", "0", "forward") in held or ("tanh", "1.0", "forward") in held
    assert ("tanh_backward", "1.0", "backward") in held or ("mm", "1.1", "backward") in held


def test_the_first_measurement_of_a_process_is_as_all_others():
    """Torch loads its compiler in the first operation under a mode, which leaves frames behind.

    Needs a fresh process, which imports torch.
    """
    code = """if True:
        import torch, functx.memory

        def wave(x):
            y = torch.sin(x)
            return torch.exp(y)

        x = torch.ones(1000)
        print([functx.memory.peak(lambda: wave(x).tanh()) for _ in range(2)])
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"[{2 * B}, {2 * B}]"


def test_a_picture_has_layers_phases_and_the_peak(x, tmp_path):
    region = functx.remat(wave)

    def f(x):
        x = region(x)
        x = x.tanh()
        x = x.exp()
        x = x.cosh()
        x = region(x)
        x = x * x.sin()
        x = x.tanh()
        x = x.exp()
        x = x.cosh()
        return x.sum()

    p = profile(functx.grad(f), x)
    text = p.plot(tmp_path / "layers.svg").read_text()
    areas = _pictures.layers_of(p.history, len(p.timeline))
    assert text.count('<g id="FillBetweenPolyCollection') == len(areas) == 9
    assert [sum(at) for at in zip(*areas.values())] == [event.live for event in p.timeline]
    assert any(name.endswith("other lines") for name in areas)
    assert f"{HERE}:{line_of(wave, 2)} in wave" in areas
    assert p.plot(tmp_path / "layers.png").stat().st_size > 1000
    assert profile(lambda: 3).plot(tmp_path / "nothing.png").exists()
