"""Pullbacks of known runs, without a replay: the same operations, the same bits, nothing else."""

import contextlib
import sys
import threading
from collections import Counter

import pytest
import torch
from known import BODIES, KNOWN, Attention, Calls, Convolution, W, X, known, module, pulled, several
from references import assert_same, count
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import functx
from functx._remat import _known_pullbacks, _known_runs, _straight_line


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What other tests ran is not known."""
    monkeypatch.setattr(_known_runs, "_sightings", {})


@pytest.mark.parametrize("body", BODIES)
def test_the_same_bits(body):
    """In the runs in which it becomes known, and thereafter."""
    f, *inputs = BODIES[body]
    calls, replays = Calls(f), []
    expected = pulled(f, *inputs)
    for _ in range(KNOWN + 3):
        n, found = calls.replays(pulled, *inputs)
        assert_same(found, expected)
        replays.append(n)
    assert replays == [1] * _known_runs.ALIKE + [2, 1, 0, 0, 0]


@pytest.mark.parametrize("kind", [Attention, Convolution])
def test_modules(kind):
    f = module(kind)
    calls = Calls(f)

    def gradients(f):
        f = f if f is not calls.region else calls.region
        x = X.clone().requires_grad_()
        return torch.autograd.grad(f(x).pow(2).sum(), [x, *calls.f.parameters()])

    expected = gradients(f)
    for _ in range(KNOWN + 2):
        n, found = calls.replays(gradients)
        assert_same(found, expected)
    assert n == 0


def test_it_is_the_values_of_this_run_that_are_read():
    """Inputs, captures, constants and cotangents."""

    def run(remat, scale):
        w, constant = (W * scale).requires_grad_(), X * scale
        x = (X + scale).requires_grad_()
        out = remat(lambda x: torch.tanh(x @ w) * constant.exp())(x)
        return torch.autograd.grad(out, [x, w], X * scale)

    for i in range(KNOWN + 3):
        assert_same(run(functx.remat, i / 7), run(lambda f: f, i / 7))


def test_gradients_of_some_inputs_and_results():
    """Each choice is known by itself."""
    calls = Calls(several)
    for of in ([0], [1], [0, 1]):
        for results in ([0], [1], [0, 1, 2]):

            def some(f, of=of, results=results):
                inputs = [X.clone().requires_grad_(), W.clone().requires_grad_()]
                outs = f(*inputs)
                wanted = [outs[i].sum() for i in results]
                return torch.autograd.grad(wanted, [inputs[i] for i in of], allow_unused=True)

            expected = some(several)
            for _ in range(KNOWN + 1):
                n, found = calls.replays(some)
                assert_same(found, expected)
            assert n == 0


VIEWS = {"view", "t", "detach", "transpose", "permute", "unsqueeze", "squeeze", "expand", "alias"}


@pytest.mark.parametrize("body", ["sin", "sin of sin", "a chain", "two inputs", "a linear map"])
def test_it_runs_what_a_pullback_runs(body, monkeypatch):
    """No operation more than a replay that leaves out what is not read."""
    written = []
    original = _straight_line._written
    monkeypatch.setattr(
        _straight_line, "_written", lambda lines, *of: written.append(lines) or original(lines, *of)
    )
    f, *inputs = BODIES[body]
    calls = known(f, *inputs)
    inputs = [t.clone().requires_grad_() for t in inputs]
    out = calls.region(*inputs)
    ordinary = count(torch.autograd.grad, out, inputs, torch.ones_like(out))
    names = Counter(line.kind.func.overloadpacket.__name__ for line in written[-1])
    assert Counter({k: n for k, n in names.items() if k not in VIEWS}) == Counter(
        {k: n for k, n in ordinary.items() if k not in VIEWS}
    )
    assert len(written) == 1


def test_each_tensor_goes_with_its_last_use():
    """In a chain, two are there at a time: the one that is read, and a cotangent."""
    calls = known(lambda x: x.sin().sin().sin().sin().sin().sin(), X)
    most = []

    def trace(frame, event, arg):
        if frame.f_code.co_filename != _straight_line.FILE:
            return None
        most.append(sum(isinstance(v, torch.Tensor) for v in frame.f_locals.values()))
        return trace

    sys.settrace(trace)
    try:
        assert calls.replays(pulled, X)[0] == 0
    finally:
        sys.settrace(None)
    # Six inputs of a sine, the cotangent, and what is being made of them.
    assert max(most) == 8
    assert most[-1] == 1


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
    "anomaly mode": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "autocast": lambda: torch.autocast("cpu"),
    "another setting": deterministic,
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("around", AROUND)
def test_where_something_is_unusual_there_is_a_replay(around):
    calls = known(torch.sin, X)
    x = X.clone().requires_grad_()
    out = calls.region(x)
    before = calls.n
    with AROUND[around]():
        (g,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert calls.n == before + 1
    assert_same(g, X.cos())
    assert calls.replays(pulled, X)[0] == 0


def test_under_a_function_mode_there_is_a_replay():
    """One that is active while the engine runs, and not suspended by what has begun that."""
    calls = known(torch.sin, X)
    x = X.clone().requires_grad_()
    out = calls.region(x)
    before = calls.n
    out.register_hook(lambda g: Functions().__enter__() and None)  # the engine leaves it
    out.backward(torch.ones_like(out))
    assert calls.n == before + 1


def test_second_derivatives_and_batches_of_cotangents_are_replays():
    calls = known(torch.sin, X)
    x = X.clone().requires_grad_()
    out = calls.region(x)
    before = calls.n
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert_same(torch.autograd.grad(g.sum(), x)[0], -X.sin())
    out = calls.region(x)
    (g,) = torch.autograd.grad(out, x, torch.stack([X, X * 2]), is_grads_batched=True)
    assert_same(g, torch.stack([X, X * 2]) * X.cos())
    assert calls.n == before + 4


def test_cotangents_that_lie_otherwise_are_known_by_themselves():
    calls = known(lambda x: x.exp().reshape(-1), X)
    expanded = Calls(calls.f)
    want = pulled(calls.f, X, cotangent=lambda c: torch.full_like(c[0], 2).expand_as(c))
    for _ in range(3):
        n, found = calls.replays(
            lambda f: pulled(f, X, cotangent=lambda c: torch.full_like(c[0], 2).expand_as(c))
        )
        assert_same(found, want)
    assert n == 0
    assert expanded.n == 0


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
        out.sum().backward()
    constant.sub_(1)
    h = x * 1
    out = calls.region(h)
    h.detach().add_(1)
    with pytest.raises(functx.ReplayError, match="modified in place"):
        out.sum().backward()


def test_modules_that_have_changed_are_found():
    f = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double().eval()
    calls = Calls(f)
    for _ in range(KNOWN + 1):
        n, _ = calls.replays(pulled, X)
    assert n == 0
    out = calls.region(X.clone().requires_grad_())
    f.train()
    with pytest.raises(functx.ReplayError):
        out.sum().backward()


def test_random_numbers_are_drawn_by_replays():
    calls = Calls(lambda x: F.dropout(x.exp(), 0.5) * x)
    for seed in range(KNOWN + 2):
        torch.manual_seed(seed)
        expected = pulled(calls.f, X)
        torch.manual_seed(seed)
        n, found = calls.replays(pulled, X)
        assert_same(found, expected)
        assert n == 1


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


def wrong(code):
    return lambda given: [None if g is None else g + 1 for g in code(given)]


def failing(code):
    def fails(given):
        raise MemoryError

    return fails


@pytest.mark.parametrize("how", [wrong, failing])
def test_what_is_not_the_same_when_it_runs_first_is_forgotten(how, monkeypatch):
    code = _straight_line.Recorder.code
    monkeypatch.setattr(
        _straight_line.Recorder, "code", lambda self, results: how(code(self, results))
    )
    calls, expected = Calls(torch.sin), pulled(torch.sin, X)
    for _ in range(KNOWN + 2):
        n, found = calls.replays(pulled, X)
        assert_same(found, expected)
    assert n == 1


def test_bits_that_differ_when_it_is_written_are_found(monkeypatch):
    numbers_of = iter(range(1000))
    monkeypatch.setattr(_known_pullbacks, "checksum", lambda t: next(numbers_of))
    calls = Calls(torch.sin)
    assert [calls.replays(pulled, X)[0] for _ in range(KNOWN + 2)] == [1, 1, 1, 2, 1, 1, 1]


def test_a_backward_in_another_thread():
    calls = known(torch.sin, X)
    x = X.clone().requires_grad_()
    out = calls.region(x)
    before = calls.n
    thread = threading.Thread(target=out.backward, args=[torch.ones_like(out)])
    thread.start()
    thread.join()
    assert calls.n == before
    assert_same(x.grad, X.cos())


def test_twice_with_a_retained_graph():
    calls = known(torch.sin, X)
    x = X.clone().requires_grad_()
    out = calls.region(x).sum()
    for _ in range(2):
        assert_same(torch.autograd.grad(out, x, retain_graph=True)[0], X.cos())


def test_hooks_of_the_users_are_called():
    calls, seen = known(torch.sin, X), []
    x = X.clone().requires_grad_()
    out = calls.region(x)
    x.register_hook(seen.append)
    out.register_hook(lambda g: g * 3)
    before = calls.n
    out.backward(torch.ones_like(out))
    assert calls.n == before
    assert_same([x.grad, *seen], [3 * X.cos()] * 2)
