"""Where the pullback of a known run is a replay all the same, and what is found in time."""

import contextlib

import pytest
import torch
from known import KNOWN, Calls, W, X, known, pulled, wrong
from references import assert_same
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import functx
from functx._remat import _lines, _straight_line

pytestmark = pytest.mark.usefixtures("forgotten")


def a_forward():
    """A region whose pullback is known, its input, its result, how often the body has run."""
    calls = known(torch.sin, X)
    x = X.clone().requires_grad_()
    out = calls.region(x)
    return calls, x, out, calls.n


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND = {
    "a dispatch mode": Operators,
    "inference mode": torch.inference_mode,
    "anomaly mode": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "autocast": lambda: torch.autocast("cpu"),
    "another setting": deterministic,
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("around", AROUND)
def test_where_something_is_unusual_there_is_a_replay(around):
    calls, x, out, before = a_forward()
    with AROUND[around]():
        (g,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert calls.n == before + 1
    assert_same(g, X.cos())
    assert calls.replays(pulled, X)[0] == 0


def test_under_a_function_mode_there_is_a_replay():
    """One that is active while the engine runs, and not suspended by what has begun that."""
    calls, _, out, before = a_forward()
    out.register_hook(lambda g: Functions().__enter__() and None)  # the engine leaves it
    out.backward(torch.ones_like(out))
    assert calls.n == before + 1


def test_second_derivatives_and_batches_of_cotangents_are_replays():
    calls, x, out, before = a_forward()
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert_same(torch.autograd.grad(g.sum(), x)[0], -X.sin())
    out = calls.region(x)
    (g,) = torch.autograd.grad(out, x, torch.stack([X, X * 2]), is_grads_batched=True)
    assert_same(g, torch.stack([X, X * 2]) * X.cos())
    assert calls.n == before + 4


def test_inside_of_another_level_there_is_a_replay():
    calls, x, out, before = a_forward()

    def inside(s):
        return torch.autograd.grad(out, x, torch.ones_like(out))[0].sum() * s

    assert_same(functx.grad(inside)(torch.ones((), dtype=X.dtype)), X.cos().sum())
    assert calls.n == before + 1


def test_cotangents_that_lie_otherwise_are_known_by_themselves():
    """What was a view of one may have to be a copy of another one."""

    def body(x):
        return x.exp().view(-1).exp().view(3, 4)

    calls = known(body, X)
    lies = lambda c: c.mT.contiguous().mT  # noqa: E731
    expected = pulled(body, X, cotangent=lies)
    replays = []
    for _ in range(4):
        n, found = calls.replays(lambda f: pulled(f, X, cotangent=lies))
        assert_same(found, expected)
        replays.append(n)
    assert replays == [1, 1, 0, 0]
    assert calls.replays(pulled, X)[0] == 0


def test_shapes_that_values_decide_are_not_written_down():
    recorder = _straight_line.Recorder([X], 1, lambda: True)
    with recorder:
        y = X[X > 0.5]
    assert recorder.code([y]) is None
    recorder = _straight_line.Recorder([X], 1, lambda: True)
    with recorder:
        y = X[torch.tensor([2, 0])].exp()
    assert_same(recorder.code([y])([X]), [y])


@pytest.mark.parametrize("written", [[0, 1], [2, 0], [0, 2]])
def test_writes_to_several_tensors_are_not_written_down(written):
    """Nor is it forgotten, where one of them is not the body's."""
    given = X.clone()
    recorder = _straight_line.Recorder([given], 1, lambda: True)
    with recorder:
        there = [given.exp(), given.sin(), given]
        torch._foreach_mul_([there[i] for i in written], 2.0)
        torch._foreach_mul_([there[i] for i in written], torch.ones(2).unbind())
        y = there[0] + there[1]
    assert recorder.code([y]) is None


def test_writes_to_one_tensor_are_done_again():
    recorder = _straight_line.Recorder([X], 1, lambda: True)
    with recorder:
        h = X.exp()
        v = h.view(-1)
        h.mul_(2)
        h.t_().add_(1)
        y = v.sin()
    code = recorder.code([y])
    for _ in range(2):
        assert_same(code([X]), [(X.exp() * 2 + 1).view(-1).sin()])


def test_nothing_waits_for_a_device_whose_stream_is_captured(monkeypatch):
    """Bits are compared before, or afterwards; what is known runs."""
    calls, expected = Calls(torch.sin), pulled(torch.sin, X)

    def replays(captured):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: captured)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
            patch.setattr(torch.cuda, "default_generators", ())
            n, found = calls.replays(pulled, X)
        assert_same(found, expected)
        return n

    assert [replays(True) for _ in range(KNOWN + 1)] == [1] * (KNOWN + 1)
    assert [replays(False) for _ in range(3)] == [1, 1, 0]
    assert replays(True) == 0


def test_a_cotangent_that_is_an_input_is_not_taken_for_one():
    """What is told by its memory must not be one thing by chance."""

    def square(f, given):
        x = X.clone().requires_grad_()
        out = f(x)
        return torch.autograd.grad(out, x, x.detach() if given else X * 5)

    body = lambda x: x.exp() * x  # noqa: E731
    calls = Calls(body)
    for given in [True] * (KNOWN + 2) + [False] * 3 + [True]:
        n, found = calls.replays(square, given)
        assert_same(found, square(body, given))
    assert n == 0


def test_what_was_written_to_is_found():
    """As ever: inputs, and constants."""
    constant = X.clone()
    calls = known(lambda x: x.exp() * constant, X)
    x = X.clone().requires_grad_()
    out = calls.region(x * 1)
    constant.add_(1)
    with pytest.raises(functx.ReplayError, match="modified in place"):
        out.backward(torch.ones_like(out))
    constant.sub_(1)
    h = x * 1
    out = calls.region(h)
    h.detach().add_(1)
    with pytest.raises(functx.ReplayError, match="modified in place"):
        out.backward(torch.ones_like(out))


def test_modules_that_have_changed_are_found():
    f = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double().eval()
    calls = Calls(f)
    for _ in range(KNOWN + 1):
        n, _ = calls.replays(pulled, X)
    assert n == 0
    out = calls.region(X.clone().requires_grad_())
    f.train()
    with pytest.raises(functx.ReplayError):
        out.backward(torch.ones_like(out))


def drawn_aside(x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.rand_like(x) * x.exp()


def with_other_settings(x):
    with deterministic():
        return (x @ W).exp()


def read(x):
    return x.exp() * x.detach().exp().sum().item()


@pytest.mark.parametrize("body", [drawn_aside, with_other_settings, read])
def test_what_the_operations_do_not_tell_is_a_replay(body):
    with torch.random.fork_rng():  # the first one finds out which devices there are
        pass
    calls = Calls(body)
    expected = pulled(body, X)
    for _ in range(KNOWN + 2):
        n, found = calls.replays(pulled, X)
        assert_same(found, expected)
    assert n == 1


def test_formulas_that_are_others_under_modes_are_found():
    """The derivative of a product of numbers, one of them zero, takes another one."""
    x = X * (X[0, 0] < X)
    expected = pulled(lambda x: x.prod(), x)
    calls = Calls(lambda x: x.prod())
    for _ in range(KNOWN + 2):
        _, found = calls.replays(pulled, x)
        assert_same(found, expected)


def failing(code):
    def fails(given):
        raise MemoryError

    return fails


@pytest.mark.parametrize("how", [wrong, failing])
def test_what_is_not_the_same_when_it_runs_first_is_forgotten(how, monkeypatch):
    written = _straight_line.written
    monkeypatch.setattr(_straight_line, "written", lambda *of: how(written(*of)))
    calls, expected = Calls(torch.sin), pulled(torch.sin, X)
    for _ in range(KNOWN + 2):
        n, found = calls.replays(pulled, X)
        assert_same(found, expected)
    assert n == 1


def test_bits_that_differ_when_it_is_compared_are_found(monkeypatch):
    numbers_of = iter(range(1000))
    monkeypatch.setattr(_lines, "lean_checksum", lambda t: next(numbers_of))
    calls = Calls(torch.sin)
    assert [calls.replays(pulled, X)[0] for _ in range(KNOWN + 2)] == [1] * (KNOWN + 2)
