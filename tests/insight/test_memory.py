"""Bytes, operations and who holds them, against sums done by hand: N numbers are 4 N bytes."""

import gc
import os

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacfwd, jvp, vmap

import functx
from functx._core import memory_tracker
from functx._insight import plots
from functx.memory import LiveStorages, count, peak, plot, profile

N = 1000
B = 4 * N


@pytest.fixture
def x():
    return torch.linspace(0, 1, N)


def held(x):
    found = [x.sin()]
    for _ in range(4):
        found.append(found[-1].sin())
    return found


def freed_between(x):
    y = x + 1
    del y
    return x + 2


def resized(x):
    y = torch.empty(N)
    y.resize_(3 * N)
    y.untyped_storage().resize_(B)
    y.resize_(N)  # touches it: the shrunk size is seen
    return y


def viewed(x):
    y = x + 1
    return y, y[1:], y.view(10, -1)


def cycle(x):
    found = [x + 1]
    found.append(found)


PROFILES = {
    "a chain": (lambda x: x.sin().sin().sin().sin(), 2 * B, 0, B),
    "what is held": (held, 5 * B, 0, 5 * B),
    "what is freed between operations": (freed_between, B, 0, B),
    "an argument": (lambda x: x, 0, 0, 0),
    "a write to an argument": (lambda x: x.mul_(2), 0, 0, 0),
    "views of an argument": (lambda x: x.view(10, -1).t()[3], 0, 0, 0),
    "a view keeps its storage": (lambda x: (x + 1)[:1], B, 0, B),
    "in-place operations": (lambda x: (x + 1).mul_(2).sin_(), B, 0, B),
    "an out argument": (lambda x: torch.sin(x, out=torch.empty(N)), B, 0, B),
    "a storage that grows and shrinks": (resized, 3 * B, 0, B),
    "several results": (lambda x: x.sort(), B + 8 * N, 0, B + 8 * N),
    "a list as argument": (lambda x: torch.stack([x, x]), 2 * B, 0, 2 * B),
    "a tree": (lambda x: {"a": [x + 1, (x + 2,)], "b": None}, 2 * B, 0, 2 * B),
    "results of one storage": (viewed, B, 0, B),
    "a reference cycle": (cycle, B, B, 0),
    "a wider dtype": (lambda x: torch.zeros(N, dtype=torch.float64), 8 * N, 0, 8 * N),
    "booleans": (lambda x: torch.zeros(N, dtype=torch.bool), N, 0, N),
    "no memory": (lambda x: torch.empty(N, device="meta") + 1, 0, 0, 0),
    "factories": (lambda x: torch.full((N,), 2.0), B, 0, B),
    "data": (lambda x: torch.tensor([1.0] * N), B, 0, B),
    "data as it is": (lambda x: torch.as_tensor([1.0] * N), B, 0, B),
    "a parameter": (lambda x: torch.nn.Parameter(torch.empty(N)), B, 0, B),
    "a storage taken over": (
        lambda x: torch.empty(0).set_(x.clone().untyped_storage(), 0, (N,)),
        *(B, 0, B),
    ),
}
"""Functions, and the bytes at their peak, kept besides the result, and returned."""


@pytest.mark.parametrize("name", PROFILES)
def test_bytes_are_those_summed_by_hand(name, x):
    f, *expected = PROFILES[name]
    p = profile(f, x)
    assert [p.peak, p.kept, p.returned] == expected
    assert peak(f, x) == p.peak


def test_kept_is_what_autograd_saves(x):
    w = x.clone().requires_grad_()
    assert profile(lambda: w.sin()).kept == 0  # saves w itself
    p = profile(lambda: w.sin().sin().sin())  # saves the two in between
    assert (p.kept, p.returned) == (2 * B, B)
    with torch.no_grad():
        assert profile(lambda: w.sin().sin().sin()).kept == 0


def test_a_backward_is_measured_too(x):
    def f(w):
        w.sin().sum().backward()

    w = x.clone().requires_grad_()
    # Backward: the sum and its gradient, 4 bytes each, are live; the latter is expanded, a view;
    # then cos(w), and the product of both, which becomes w.grad.
    p = profile(f, w)
    assert p.operations["cos"] == 1
    assert p.peak == 2 * B + 8
    assert p.kept == B
    assert w.grad is not None


def test_every_stack_is_seen_at_its_base():
    x = torch.linspace(0, 1, 12).reshape(3, 4)
    f = lambda x: x.sin().sum()
    assert count(vmap(f), x) == {"sin": 1, "sum": 1}
    assert count(vmap(grad(f)), x)["cos"] == 1
    assert peak(lambda: vmap(lambda x: x.sin())(x)) == 48
    assert profile(vmap(grad(f)), x).returned == 48
    assert count(grad(lambda x: vmap(f)(x).sum()), x)["cos"] == 1
    assert count(lambda: jvp(f, (x,), (x,)))["cos"] == 1
    # The Hessian of one row: jacfwd batches 4 tangents, so one `sin` of 4 is the second derivative.
    assert count(vmap(hessian(f)), x)["cos"] >= 1
    assert profile(vmap(hessian(f)), x).returned == 3 * 4 * 4 * 4
    assert profile(vmap(jacfwd(grad(f))), x).returned == 3 * 4 * 4 * 4


def test_an_exception_inside_leaves_nothing_behind(x):
    def f():
        held = x + 1
        raise ValueError(held.shape)

    enabled = gc.isenabled()
    with pytest.raises(ValueError, match="1000"):
        profile(f)
    assert gc.isenabled() == enabled
    assert peak(lambda: x + 1) == B  # no mode is left on the stack
    with LiveStorages() as storages, pytest.raises(RuntimeError):
        torch.ones(2) + torch.ones(3)
    assert storages.operations == {"ones": 2}


def test_the_timeline_and_the_peak_are_by_operation(x):
    p = profile(lambda: (x.sin() + x.cos()).sum())
    assert p.timeline == ((0, "sin", B), (1, "cos", 2 * B), (2, "add", 3 * B), (3, "sum", B + 4))
    assert {h.operation: h.nbytes for h in p.holders} == {"sin": B, "cos": B, "add": B}
    assert p.operations == {"sin": 1, "cos": 1, "add": 1, "sum": 1}


def test_a_plot_writes_a_file(tmp_path, x):
    p = profile(lambda: x.sin().sum())
    assert p.plot(tmp_path / "one.png").stat().st_size > 1000
    assert plot({"a": p, "b": p}, tmp_path / "two.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("measure", [profile, peak, count])
def test_what_is_not_callable_is_an_error(measure):
    with pytest.raises(TypeError, match=f"functx.memory.{measure.__name__}: expected a callable"):
        measure(torch.ones(3))


def chain(layers):
    region = functx.remat(lambda x: torch.tanh(x @ torch.ones(10, 10)))

    def f(x):
        for _ in range(layers):
            x = region(x)
        return x.sum()

    return functx.grad(f)


# Compiled by inductor, which takes seconds.
def test_of_compiled_code_the_bytes_are_the_allocator_s(x):
    x, nbytes = x[:100].reshape(10, 10), 400
    jitted, compiled = functx.jit(chain(6)), torch.compile(lambda x: (x.sin() @ x.cos()).exp())
    jitted(x), compiled(x)
    fused = peak(jitted, x)
    assert 5 * nbytes <= fused <= peak(chain(6), x)  # what regions keep, and no result in between
    assert peak(lambda: jitted(x)) == fused
    p = profile(jitted, x)
    assert (p.peak, p.kept, p.returned) == (fused, 0, nbytes)
    assert "requests to the allocator" in str(p)
    assert peak(compiled, x) == 3 * nbytes  # a product, which exp overwrites, and its operands
    with pytest.raises(TypeError, match="compiled code, whose operations can't be counted"):
        count(jitted, x)


def test_compiled_code_that_is_not_found_is_an_error(x):
    jitted = functx.jit(torch.sin)
    with pytest.raises(TypeError, match="pass the jitted function as an argument"), LiveStorages():
        jitted(x)


HERE = os.path.basename(__file__)


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
    assert type(region(x.clone().requires_grad_()).grad_fn).__name__ == memory_tracker.REGION


def test_modules_have_paths(x):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    p = profile(lambda x: net(x).sum().backward(), torch.ones(N, 4))
    held = {(h.operation, h.module, h.phase) for h in p.holders}
    assert ("addmm", "0", "forward") in held or ("tanh", "1.0", "forward") in held
    assert ("tanh_backward", "1.0", "backward") in held or ("mm", "1.1", "backward") in held


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
    areas = plots.layers_of(p.history, len(p.timeline))
    assert text.count('<g id="FillBetweenPolyCollection') == len(areas) == 9
    assert [sum(at) for at in zip(*areas.values())] == [event.live for event in p.timeline]
    assert any(name.endswith("other lines") for name in areas)
    assert all(f"<!-- {said}" in text for said in ("peak, ", "shaded: the backward pass"))
    assert f"{HERE}:{line_of(wave, 2)} in wave" in areas
    assert p.plot(tmp_path / "layers.png").stat().st_size > 1000
    assert profile(lambda: 3).plot(tmp_path / "nothing.png").exists()


def test_reports_show_in_a_notebook_as_they_print():
    x = torch.ones(3, requires_grad=True)
    f = lambda: x.sin().sum()
    for report in (functx.memory.profile(f), functx.saved_residuals(f)):
        assert report._repr_html_().startswith("<pre>")
        assert str(report).split()[-1] in report._repr_html_()
