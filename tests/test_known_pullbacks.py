"""Pullbacks of known runs, without a replay: the same operations, the same bits, nothing else."""

import functools
import sys
import threading
from collections import Counter

import pytest
import torch
from known import (
    BODIES,
    KNOWN,
    Attention,
    Calls,
    Convolution,
    Normalized,
    W,
    X,
    known,
    module,
    pulled,
    several,
)
from references import assert_same, count

import functx
from functx._remat import _known_runs, _lines, _straight_line

pytestmark = pytest.mark.usefixtures("forgotten")


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
    assert replays == [1] * (_known_runs.ALIKE + 2) + [0, 0, 0]


def total(f):
    return lambda *args: f(*args).pow(2).sum()


LEVELS = {
    "grad": lambda f, x, w: functx.grad(total(f), (0, 1))(x, w),
    "vmap(grad)": lambda f, x, w: functx.vmap(functx.grad(total(f), (0, 1)), (0, None))(x, w),
    "vmap(grad), the last": lambda f, x, w: functx.vmap(
        functx.grad(total(f), 1), (-1, None), randomness="different"
    )(torch.stack([x, x + 1], -1), w),
    "vmap(vmap(grad))": lambda f, x, w: functx.vmap(
        functx.vmap(functx.grad(total(f), (0, 1)), (0, None)), (None, 0)
    )(x, torch.stack([w, w * 2])),
    "jacrev": lambda f, x, w: functx.jacrev(lambda w: f(x, w))(w),
    "vmap, backward": lambda f, x, w: pulled(functx.vmap(f, (0, None)), x, w),
    "grad of vmap": lambda f, x, w: functx.grad(total(functx.vmap(f, (0, None))), (0, 1))(x, w),
    "vjp": lambda f, x, w: functx.vjp(f, x, w)[1](torch.ones(3, 4, dtype=x.dtype)),
}


@pytest.mark.parametrize("way", LEVELS)
def test_under_transforms(way):
    """What is inside of wrappers is computed with; gradients come at the levels they come at."""

    def body(x, w):
        return torch.tanh(x @ w).sin() @ w

    calls, replays = Calls(body), []
    expected = LEVELS[way](body, X, W)
    for _ in range(KNOWN + 2):
        n, found = calls.replays(LEVELS[way], X, W)
        assert_same(found, expected)
        replays.append(n)
    assert replays == [1] * (_known_runs.ALIKE + 2) + [0, 0]


@pytest.mark.parametrize(
    "way",
    [
        lambda f, x, w: functx.hessian(lambda w: total(f)(x, w))(w),
        lambda f, x, w: functx.grad(lambda x: total(functx.grad(total(f)))(x, w))(x),
        lambda f, x, w: pulled(lambda w: functx.grad(total(f))(x, w), w),
        lambda f, x, w: functx.grad(lambda s: total(f)(x, W * s))(torch.ones_like(w)),
    ],
)
def test_what_may_be_differentiated_is_right(way):
    """Where a tape of another level would record what the pullback does."""

    def body(x, w):
        return torch.tanh(x @ w).sin() @ w

    calls, expected = Calls(body), way(body, X, W)
    for _ in range(KNOWN + 2):
        _, found = calls.replays(way, X, W)
        assert_same(found, expected, 8)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's batching rules
@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize("kind", [Attention, Convolution, Normalized])
def test_modules(kind, per_example):
    """Also by torch's batching rules, of which those of norms are Python."""
    f = module(kind)
    params = {name: p.detach() for name, p in f.named_parameters()}
    call = functools.partial(functx.functional_call, f)
    calls = Calls(call if per_example else f)

    def gradients(f):
        if per_example:

            def loss(params, x):
                return f(params, (x,)).pow(2).sum()

            return functx.vmap(functx.grad(loss, (0, 1)), (None, 0))(params, torch.stack([X, -X]))
        x = X.clone().requires_grad_()
        return torch.autograd.grad(f(x).pow(2).sum(), [x, *calls.f.parameters()])

    expected = gradients(calls.f)
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
    original = _straight_line.written
    monkeypatch.setattr(
        _straight_line, "written", lambda lines, *of: written.append(lines) or original(lines, *of)
    )
    f, *inputs = BODIES[body]
    calls = known(f, *inputs)
    inputs = [t.clone().requires_grad_() for t in inputs]
    out = calls.region(*inputs)
    ordinary = count(torch.autograd.grad, out, inputs, torch.ones_like(out))
    # Sums are in place, as the engine's are where no mode counts them.
    packets = (line.kind.func.overloadpacket for line in written[-1])
    names = Counter(packet.__name__.removesuffix("_") for packet in packets)
    assert Counter({k: n for k, n in names.items() if k not in VIEWS}) == Counter(
        {k: n for k, n in ordinary.items() if k not in VIEWS}
    )
    assert len(written) == 2  # and what it is compared by


def test_sums_are_in_place_where_nobody_reads_a_summand(monkeypatch):
    """Not into what is read later, by whatever view, nor into what the caller has."""
    written = []
    original = _straight_line.written
    monkeypatch.setattr(
        _straight_line, "written", lambda lines, *of: written.append(lines) or original(lines, *of)
    )
    bodies = {
        lambda x: (x.exp() + x.sin()).tanh(): 1,  # and the sum of the two gradients, below
        lambda x: ((h := x.exp()) + h.view(-1)[:4]).tanh() * h: 0,
        lambda x: ((h := x.exp())[:1] + h[1:2]).tanh() * h.sum(): 0,
        lambda x: (x + x.detach()).tanh(): 0,
    }
    for body, forward in bodies.items():
        calls = known(body, X)
        expected = pulled(body, X)
        for _ in range(2):
            assert_same(calls.replays(pulled, X)[1], expected)
        names = [line.kind.func.overloadpacket.__name__ for line in written[-1]]
        tanh = names.index("tanh")
        assert names[:tanh].count("add_") == forward


def test_each_tensor_goes_with_its_last_use():
    """In a chain, two are there at a time: the one that is read, and a cotangent."""
    calls = known(lambda x: x.sin().sin().sin().sin().sin().sin(), X)
    most = []

    def trace(frame, event, arg):
        if frame.f_code.co_filename != _lines.FILE:
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


def test_it_shows_in_a_profile_as_a_replay():
    calls = known(torch.sin, X)
    with torch.profiler.profile() as profile:
        assert calls.replays(pulled, X)[0] == 0
    names = [event.key for event in profile.key_averages() if event.key.startswith("remat: ")]
    assert sum("replay of" in name for name in names) == 1
