"""Known pullbacks of regions that draw random numbers: the same ones, if operations alone draw."""

from collections import Counter

import pytest
import torch
from known import KNOWN, Calls, W, X, pulled
from references import assert_same, count
from torch import nn
from torch.nn import functional as F

import functx
from functx._remat import _environment, _straight_line

pytestmark = pytest.mark.usefixtures("forgotten")


def scaled(x):
    return torch.rand_like(x) * x.exp()


def of_noise(x):
    return (x + torch.randn(3, 4, dtype=x.dtype)).tanh() * torch.bernoulli(x.sigmoid())


def with_its_last_unread(x, w):
    return F.dropout(F.dropout((x @ w).tanh(), 0.25) @ w, 0.5)


def drawn_for_nobody(x):
    torch.rand(3)
    torch.multinomial((x * 2).detach().exp(), 2)
    return F.dropout(x.exp(), 0.5)


BODIES = {
    "dropout": (lambda x: F.dropout(x.exp(), 0.5) * x, X),
    "dropout of an input": (lambda x: F.dropout(x, 0.5), X),
    "in place": (lambda x: x * torch.empty_like(x).exponential_().sin(), X),
    "dropout of features": (lambda x: F.dropout1d(x[None].exp(), 0.5) * x, X),
    "rand_like": (scaled, X),
    "noise": (of_noise, X),
    "the last is not read": (with_its_last_unread, X, W),
    "drawn for nobody": (drawn_for_nobody, X),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None], w[None], dropout_p=0.5),
        X,
        W[None],
    ),
}


def compared(calls, steps, run, *inputs):
    """How often the body runs again in each step, which gives the bits that it gives without."""
    replays = []
    for seed in range(steps):
        torch.manual_seed(seed)
        expected, drawn = run(calls.f, *inputs), torch.rand(2)
        torch.manual_seed(seed)
        n, found = calls.replays(run, *inputs)
        assert_same(found, expected)
        assert torch.equal(torch.rand(2), drawn)
        replays.append(n)
    return replays


@pytest.mark.parametrize("body", BODIES)
def test_the_same_numbers_are_drawn(body):
    f, *inputs = BODIES[body]
    assert compared(Calls(f), KNOWN + 3, pulled, *inputs)[-4:] == [1, 0, 0, 0]


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_per_example(randomness):
    def run(f, x, w):
        loss = functx.grad(lambda x, w: f(x, w).pow(2).sum(), (0, 1))
        return functx.vmap(loss, (0, None), randomness=randomness)(x, w)

    calls = Calls(with_its_last_unread)
    assert compared(calls, KNOWN + 3, run, torch.stack([X, -X]), W)[-1] == 0


def test_a_module_in_a_loop():
    """Regions that draw one after another; each begins where it began."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()).double() for _ in range(3)]

    def run(wrap):
        x = X.clone().requires_grad_()
        out = x
        for layer in layers:
            out = wrap(layer)(out)
        return torch.autograd.grad(out.sum(), [x, *layers[0].parameters()])

    for seed in range(KNOWN + 2):
        torch.manual_seed(seed)
        expected = run(lambda layer: layer)
        torch.manual_seed(seed)
        assert_same(run(functx.remat), expected)


def test_no_more_runs_than_in_a_replay(monkeypatch):
    """What only the last dropout reads is not computed."""
    written = []
    original = _straight_line.written
    monkeypatch.setattr(
        _straight_line, "written", lambda lines, *of: written.append(lines) or original(lines, *of)
    )
    calls = Calls(with_its_last_unread)
    assert compared(calls, KNOWN + 1, pulled, X, W)[-1] == 0
    inputs = [t.clone().requires_grad_() for t in (X, W)]
    out = calls.region(*inputs)
    ordinary = count(torch.autograd.grad, out, inputs, torch.ones_like(out))
    names = Counter(line.kind.func.overloadpacket.__name__ for line in written[-1])
    for name in ("mm", "tanh", "bernoulli_"):
        assert names[name] == ordinary[name]


@pytest.mark.parametrize("draw", [torch.poisson, lambda n: torch.binomial(n, n * 0 + 0.5)])
def test_how_much_is_drawn_may_depend_on_values(draw):
    """Nothing, while the code was written down and compared."""

    def f(x, n):
        draw(n)
        return F.dropout(x.sin(), 0.5)

    calls = Calls(f)
    for step in range(KNOWN + 4):
        n = torch.full_like(X, 4.0 * (step > KNOWN))
        torch.manual_seed(step)
        expected = pulled(lambda x, n=n: f(x, n), X)
        torch.manual_seed(step)
        replays, found = calls.replays(lambda region, n=n: pulled(lambda x: region(x, n), X))
        assert_same(found, expected)
    assert replays == 0


seeded = []


def seeding_itself(x):
    out = F.dropout(x.exp(), 0.5)
    if seeded:
        torch.manual_seed(seeded[0])
    return F.dropout(out, 0.5)


@pytest.mark.parametrize("seed", [3, 7])
def test_a_generator_that_is_seeded_in_between(seed):
    """In one step alone, also with the seed that it had."""
    calls = Calls(seeding_itself)
    assert compared(calls, KNOWN + 2, pulled, X)[-1] == 0
    seeded.append(seed)
    try:
        torch.manual_seed(seed)
        torch.rand(5)
        expected = pulled(calls.f, X)
        torch.manual_seed(seed)
        torch.rand(5)
        _, found = calls.replays(pulled, X)
        assert_same(found, expected)
    finally:
        seeded.clear()


def seeded_first(x):
    torch.manual_seed(0)
    return F.dropout(x.exp(), 0.5)


def in_a_fork(x):
    with torch.random.fork_rng():
        torch.rand(3)
    return F.dropout(x.exp(), 0.5)


def set_at_the_end(x):
    out = F.dropout(x.exp(), 0.5)
    torch.set_rng_state(torch.Generator().manual_seed(torch.initial_seed()).get_state())
    return out


@pytest.mark.parametrize("body", [seeded_first, in_a_fork, set_at_the_end])
def test_what_else_moves_a_generator_is_a_replay(body):
    """While it is known, it may be where it is set to."""
    with torch.random.fork_rng():  # the first one finds out which devices there are
        pass
    calls = Calls(body)
    for step in range(KNOWN + 4):
        for f in (calls.f, calls.region):
            torch.manual_seed(0)
            if step > KNOWN:
                torch.rand(step)
            found = pulled(f, X)
            if f is calls.f:
                expected = found
        assert_same(found, expected)
    assert calls.replays(pulled, X)[0] == 1


def test_numbers_drawn_unseen_are_a_replay(monkeypatch):
    """An operation that nobody knows to draw moves the generator in between."""
    environment = _environment.Environment
    monkeypatch.setattr(environment, "draws", lambda self: None)
    monkeypatch.setattr(environment, "drew", lambda self: None)
    assert compared(Calls(scaled), KNOWN + 2, pulled, X)[-1] == 1


def test_python_that_draws_is_a_replay():
    import random

    def f(x):
        return F.dropout(x, 0.5) * (x.exp() if random.random() < 2 else x)

    calls = Calls(f)
    assert compared(calls, KNOWN + 2, pulled, X)[-1] == 1
