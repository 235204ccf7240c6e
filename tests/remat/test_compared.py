"""Rule 3: departures of a replay, and inputs written to since, are errors that say where."""

import enum
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import functx

from .programs import STACKS, X, Y, how_regions_run, numbers, same

NOW = SimpleNamespace(second=False)


@pytest.fixture(autouse=True)
def _first():
    NOW.second = False
    yield
    NOW.second = False


def pick(first, then):
    """What a region reads and does not keep: another thing once the forward has returned."""
    return then if NOW.second else first


def drop_one(x):
    x = x.sin()
    if pick(True, False):
        x = x.exp()
    return x.cos()


def one_of_two_results(a, b):
    s, c = a.sin(), b.cos()
    return pick(s, c).exp()


class Axis(enum.IntEnum):
    FIRST = 0
    LAST = -1


class Approximation(enum.StrEnum):
    NONE = "none"
    TANH = "tanh"


class Count(int):
    """A number of a class of its own, as libraries of units and configurations have them."""


class Rate(float):
    """As `Count`."""


class Case(NamedTuple):
    f: Any  # of two vectors
    call: str  # a regular expression for the name of the call that departs
    sides: tuple[str, str]  # and for what was found there by the forward and by the replay


NUMBERS = {
    "a number": Case(lambda a, b: (a * pick(2.0, 3.0)).sin(), "mul", (r"2\.0", r"3\.0")),
    "an integer": Case(lambda a, b: a.pow(pick(2, 3)).sin(), "pow", ("2", "3")),
    "a keyword": Case(
        lambda a, b: torch.sum(a * a, 0, keepdim=pick(True, False)).sin(), "sum", ("True", "False")
    ),
    "a string": Case(
        lambda a, b: F.gelu(a, approximate=pick("none", "tanh")).sin(), "gelu", ("none", "tanh")
    ),
    "in a list": Case(lambda a, b: torch.roll(a, [pick(1, 2)], [0]).sin(), "roll", ("1", "2")),
    "in a slice": Case(lambda a, b: a[pick(0, 1) : pick(2, 3)].sin(), "getitem", ("2", "3")),
    "in a list of indices": Case(lambda a, b: a[[0, pick(1, 2)]].sin(), "getitem", ("1", "2")),
    "in a small array": Case(
        lambda a, b: a[np.array([0, pick(1, 2)])].sin(), "getitem", ("1", "2")
    ),
    "in a large array": Case(
        lambda a, b: (a.repeat(400)[np.full(1000, pick(1, 2))]).sin(), "getitem", ("hash", "hash")
    ),
    "a member of an enum of integers": Case(
        lambda a, b: torch.outer(a, b).softmax(pick(Axis.FIRST, Axis.LAST)).sin(),
        "softmax",
        ("FIRST", "LAST"),
    ),
    "a member of an enum of strings": Case(
        lambda a, b: F.gelu(a, approximate=pick(*Approximation)).sin(), "gelu", ("none", "tanh")
    ),
    "an integer of a derived class": Case(
        lambda a, b: a.pow(pick(Count(2), Count(3))).sin(), "pow", ("2", "3")
    ),
    "a float of a derived class": Case(
        lambda a, b: (a * pick(Rate(2.0), Rate(3.0))).sin(), "mul", (r"2\.0", r"3\.0")
    ),
    "a range": Case(
        lambda a, b: a[pick(range(0, 2), range(1, 3))].sin(),
        "getitem",
        (r"range\(0, 2\)", r"range\(1, 3\)"),
    ),
    "of a derived class, in a slice": Case(
        lambda a, b: a[Count(0) : pick(Count(2), Count(3))].sin(), "getitem", ("2", "3")
    ),
    "of a derived class, in a list": Case(
        lambda a, b: torch.roll(a, [pick(Count(1), Count(2))], [0]).sin(), "roll", ("1", "2")
    ),
    "a dtype": Case(
        lambda a, b: a.to(pick(torch.float32, torch.bfloat16)).sin(),
        r"\bto\b",
        ("float32", "bfloat16"),
    ),
    "a flag of a module": Case(
        lambda a, b: F.dropout(a.sin(), 0.5, training=pick(True, False)).sin(),
        "dropout",
        ("True", "False"),
    ),
}
SEQUENCES = {
    "the grad mode": Case(
        lambda a, b: torch.set_grad_enabled(pick(True, False))(torch.sin)(a * a) * a.exp(),
        "sin",
        ("sin", "under no_grad"),
    ),
    "a function": Case(lambda a, b: pick(torch.sin, torch.cos)(a * a).exp(), "sin", ("sin", "cos")),
    "the order": Case(
        lambda a, b: a.sin().exp() if pick(True, False) else a.exp().sin(), "sin", ("sin", "exp")
    ),
    "a call less": Case(lambda a, b: drop_one(a), "exp", ("exp", "cos")),
    "a call more": Case(
        lambda a, b: a.exp().cos() if pick(True, False) else a.exp().sin().cos(),
        "cos",
        ("cos", "sin"),
    ),
    "an end that comes early": Case(
        lambda a, b: a.sin().exp().cos() if pick(True, False) else a.sin().exp(), "cos", ("cos", "")
    ),
    "an end that comes late": Case(
        lambda a, b: a.sin().exp() if pick(True, False) else a.sin().exp().cos(), "cos", ("", "cos")
    ),
}
INPUT, RESULT = "input|argument", "result|call|makes"
OPERANDS = {
    "another argument": Case(lambda a, b: pick(a, b).sin(), "sin", (INPUT, INPUT)),
    "another intermediate": Case(one_of_two_results, "exp", (RESULT, RESULT)),
    "an intermediate in place of an argument": Case(
        lambda a, b: pick(*(lambda s: (a, s))(a.sin())).exp(), "exp", (INPUT, RESULT)
    ),
    "another result of the same call": Case(
        lambda a, b: pick(*torch.stack([a, b]).unbind()).sin(), "sin", (RESULT, RESULT)
    ),
    "two arguments in another order": Case(
        lambda a, b: torch.sub(*pick((a, b), (b, a))).sin(), "sub", (INPUT, INPUT)
    ),
    "an argument in a list": Case(
        lambda a, b: torch.stack(pick([a, b], [b, a]))[0].sin(), "stack", (INPUT, INPUT)
    ),
}
ALL = NUMBERS | SEQUENCES | OPERANDS


def differentiate(stack, f, changes=True, **options):
    """Of a region that is run again when `NOW` has changed."""

    def loss(a):
        NOW.second = False
        y = functx.remat(f, **options)(a, a.cos())
        NOW.second = changes
        return y.sum()

    return STACKS[stack](loss, X)


def check_message(message, case):
    """It names the call, a line of the region, and both sides."""
    first, last = (
        case.f.__code__.co_firstlineno,
        max(line for *_, line in case.f.__code__.co_lines() if line),
    )
    lines = [int(n) for n in re.findall(r"test_compared\.py\D{1,12}(\d+)", message)]
    inner = [drop_one.__code__.co_firstlineno + i for i in range(6)]
    assert any(first <= n <= last or n in inner for n in lines), message
    for part in (case.call, *case.sides):
        assert re.search(part, message), f"{part} is not in: {message}"


def departs(speed, stack, case):
    """A run of either speed departs, and the message says where."""
    speed.prepare(lambda: differentiate(stack, case.f, changes=False))
    with speed, pytest.raises(functx.ReplayError) as caught:
        differentiate(stack, case.f)
    check_message(str(caught.value), case)


@pytest.mark.parametrize("name", ALL)
def test_a_departure_raises(name, speed):
    departs(speed, "backward", ALL[name])


OTHERS = [stack for stack in STACKS if stack != "backward"]
UNDER = ["a number", "in a slice", "a call less", *OPERANDS]


@pytest.mark.parametrize(
    ("name", "stack"), [(n, OTHERS[(i + j) % 7]) for i, n in enumerate(UNDER) for j in (0, 3)]
)
def test_under_transforms(name, stack, speed):
    departs(speed, stack, ALL[name])


@pytest.mark.parametrize("runs", [0, 2])
@pytest.mark.parametrize("name", ["a number", "another intermediate"])
def test_in_a_region_in_a_region(name, runs):
    f = lambda a, b: functx.remat(ALL[name].f)(a.sin(), b).exp()
    for _ in range(runs):
        differentiate("grad", f, changes=False)
    with pytest.raises(functx.ReplayError):
        differentiate("grad", f)


def rows(x):
    return x[torch.rand(64) > 0.5].sin().sin()


def test_a_shape_that_only_shows_in_the_result(speed):
    x = numbers(64).requires_grad_()

    def forward():
        torch.manual_seed(1)
        return functx.remat(rows, preserve_rng_state=False)(x)

    speed.prepare(forward)
    with speed:
        y = forward()
    torch.manual_seed(2)
    with pytest.raises(functx.ReplayError) as caught:
        y.sum().backward()
    torch.manual_seed(2)
    shape = str(int((torch.rand(64) > 0.5).sum()))
    case = Case(rows, "getitem|index", (str(len(y)), shape))
    check_message(str(caught.value), case)


def test_a_device_that_only_the_forward_makes_is_no_departure(speed):
    """As `torch.manual_seed` does, where it is the first of the process."""
    f = lambda a, b: (pick(torch.device, str)("cpu"), (a * b).sin())[1]
    expected = STACKS["backward"](lambda a: f(a, a.cos()).sum(), X)
    speed.prepare(lambda: differentiate("backward", f, changes=False))
    with speed:
        same(differentiate("backward", f), expected)


class TestDeterminismCheckNone:
    @pytest.mark.parametrize("name", ["a number", "in a slice", "a dtype"])
    def test_numbers_are_not_compared(self, name):
        differentiate("backward", NUMBERS[name].f, determinism_check="none")

    def test_shapes_are_not_compared(self):
        differentiate(
            "backward",
            lambda a, b: (a.sin() * torch.ones(pick(3, 1), dtype=a.dtype)).sin().sum(),
            determinism_check="none",
        )

    @pytest.mark.parametrize("name", ["a function", "a call less", "an end that comes late"])
    def test_the_sequence_of_calls_is(self, name):
        with pytest.raises(functx.ReplayError):
            differentiate("backward", SEQUENCES[name].f, determinism_check="none")


def test_debug_shows_the_calls_of_both_side_by_side(speed):
    def f(x):
        y = x.sin() * 2
        return pick(torch.cos, torch.exp)(y)

    region = functx.remat(f, debug=True)
    speed.prepare(lambda: region(numbers(3).requires_grad_()))
    with speed:
        out = region(numbers(3).requires_grad_())
    NOW.second = True
    with pytest.raises(functx.ReplayError) as caught:
        out.sum().backward()
    head, forward, *calls = str(caught.value).splitlines()
    assert "exp" in head
    assert "cos" in head
    assert forward.split("  ")[-1] == "the replay"
    assert [line.split() for line in calls[:1]] == [
        ["Tensor.sin(input", "0)", "Tensor.sin(input", "0)"]
    ]
    assert "cos(result 2)" in calls[2]
    assert "exp(result 2)" in calls[2]


def modified():
    return pytest.raises(functx.ReplayError, match=r"modified (by an )?in-?\s?place")


def names_a_line(caught):
    return re.search(r"test_compared\.py\D{1,12}\d+", str(caught.value))


FUNCTIONS = {
    "an argument": lambda x, w: functx.remat(lambda x, w: (x * w).sin())(x, w),
    "an argument that is a view": lambda x, w: functx.remat(lambda x, w: (x * w).sin())(x, w[:]),
    "captured": lambda x, w: functx.remat(lambda x: (x * w).sin())(x),
    "captured by a region in a region": lambda x, w: functx.remat(
        lambda x: functx.remat(lambda x: (x * w).sin())(x.sin())
    )(x),
}


@pytest.mark.parametrize(
    ("name", "requires_grad"), [(n, i % 2 == 0) for i, n in enumerate(FUNCTIONS)]
)
@pytest.mark.parametrize("runs", [0, 2])
def test_a_tensor(name, requires_grad, runs):
    with how_regions_run() as how:
        for _ in range(runs + 1):
            w = Y.clone().requires_grad_(requires_grad)
            y = FUNCTIONS[name](X.clone().requires_grad_(), w)
    assert runs == 0 or how[-1] == "followed" or "region in" in name
    with torch.no_grad():
        w.mul_(2)
    with modified() as caught:
        y.sum().backward()
    assert names_a_line(caught)


def test_a_parameter_by_an_optimizer(speed):
    net = nn.Linear(3, 3).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    region = functx.remat(lambda x: torch.sin(net(x)))
    speed.prepare(lambda: region(X))
    with speed:
        y = region(X).sum()
    y.backward(retain_graph=True)
    optimizer.step()
    with modified() as caught:
        y.backward()
    assert names_a_line(caught)


def test_what_a_vjp_was_called_with(speed):
    x, region = X.clone(), functx.remat(lambda x: (x * x).sin())
    speed.prepare(lambda: functx.vjp(region, x))
    with speed:
        y, pullback = functx.vjp(region, x)
    pullback(torch.ones_like(y))
    x.mul_(2)
    with modified() as caught:
        pullback(torch.ones_like(y))
    assert names_a_line(caught)


def test_a_result_is_the_users_to_write_to():
    x = X.clone().requires_grad_()
    y = functx.remat(lambda x: x.sin().sin() * Y)(x)
    y.mul_(2)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    z = 2 * (x.sin().sin() * Y)
    same(gradient, torch.autograd.grad(z.sum(), x)[0])


def test_a_tensor_written_to_before_the_call_or_after_the_backward_is_none():
    w = numbers(3).requires_grad_()
    with torch.no_grad():
        w.mul_(2)
    y = functx.remat(lambda w: (X * w).sin().sin())(w).sum()
    (gradient,) = torch.autograd.grad(y, w)
    with torch.no_grad():
        w.zero_()
    expected = functx.grad(lambda w: (X * w).sin().sin().sum())(2 * numbers(3))
    same(gradient, expected)
