"""Gradients that are products of few terms are known by their factors, in regions too."""

import itertools

import pytest
import torch
from cases import numbers
from references import assert_same, peak
from torch.nn import functional as F

import functx
from functx import per_sample
from functx.per_sample import _chunk_gradients

from .losses import CASES, IN, OUT, B, arguments, slow, slow_norms, slow_sum, weight


@pytest.fixture
def made(monkeypatch):
    """What arrived: for each gradient whether it was known by factors."""
    seen = []
    factored = _chunk_gradients.rows_of

    def look(rows):
        found = factored(rows)
        seen.append(not isinstance(found, torch.Tensor))
        return found

    monkeypatch.setattr(_chunk_gradients, "rows_of", look)
    return seen


@pytest.mark.parametrize(
    ("chunk_size", "regions"), [(2, 0), *itertools.product([None, 1], range(3))]
)
@pytest.mark.parametrize("name", CASES)
def test_sums_and_norms_are_those_of_a_loop(name, chunk_size, regions, made):
    """And what is known by factors is so in a region, too."""
    loss, params, batch, by_factors = CASES[name]
    params, x = arguments(params, batch)
    for _ in range(regions):
        loss = functx.remat(lambda p, x, loss=loss: loss(p, x).sin())
    eps = 1024 if regions else 64  # of a sine of large numbers
    gradients = slow(loss, params, x)
    norms = slow_norms(gradients)
    limit = norms.mean().item()
    expected = slow_sum(gradients, (limit / norms).clamp(max=1))
    for grad_mode in (True, False):
        made.clear()
        with torch.set_grad_enabled(grad_mode):
            total, extras = per_sample.clipped_sum(
                loss, max_norm=limit, chunk_size=chunk_size, return_norms=True
            )(params, x)
        assert_same(extras.norms, norms, eps=eps)
        assert_same(list(total), expected, eps=4 * eps)
        if chunk_size != 2 and by_factors is not None:
            assert any(made) == by_factors
    assert_same(per_sample.norms(loss, chunk_size=chunk_size)(params, x), norms, eps=eps)


HOOKS = [
    lambda g: g * 2,
    lambda g: g.clone().view(-1).mul_(2).view(g.shape),
    lambda g: g.t().contiguous().t() + 1,
    lambda g: torch.cat([g[:1], g[1:] * 3]),
    lambda g: torch.where(g > 0, g, 0.0),
    lambda g: (h := g.clone(), h.t()[1].mul_(3), h.view(-1)[:5].add_(1))[0],
]
# In two examples of the batch, row 7 is read.
OF_ROWS = [
    lambda g: (g[7].fill_(2.0), g)[1],
    lambda g: (g[-1].mul_(2), g)[1],
    lambda g: g * g[7].sum(),
    lambda g: g + g[7] * g.select(1, 0).unsqueeze(1),
    lambda g: (g[7].zero_(), g[4].add_(1), g)[2],
    lambda g: (g[7], g.mul_(2)[7].zero_(), g)[2],
]


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize(
    ("name", "hook"), [*(("matmul", h) for h in HOOKS), *(("embedding", h) for h in OF_ROWS)]
)
def test_a_hook_sees_the_gradient_and_may_take_rows_of_it(name, hook, chunk_size):
    loss, params, batch, _ = CASES[name]
    params, x = arguments(params, batch)

    def hooked(p, x):
        middle = p[0].view_as(p[0])
        middle.register_hook(hook)
        return loss([middle], x)

    norms = slow_norms(slow(hooked, params, x))
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            found = per_sample.norms(hooked, chunk_size=chunk_size)(params, x)
        assert_same(found, norms, eps=64)


def test_code_that_wants_the_memory_of_a_product_draws_random_numbers_once():
    def loss(w, x):
        middle = w.view_as(w)
        middle.register_hook(lambda g: g.t_().t_())
        return F.dropout(x @ middle.T, 0.5).sin().sum()

    f, found = per_sample.norms(loss, randomness="different"), []
    for _ in range(2):  # the second call knows that factors are of no use
        torch.manual_seed(0)
        found.append(f(weight(), numbers(B, 2, IN)))
    assert_same(*found)


def test_what_cancels_is_not_lost():
    """Of two terms that are the same but for a millionth, in float32."""
    a = torch.randn(B, 1, IN)
    x = torch.cat([a, a * (1 + 1e-4)], 1)
    sign = torch.tensor([[1.0], [-1.0]])
    loss = lambda w, x: ((x @ w.T) * sign.to(x)).sum()
    w = torch.randn(OUT, IN)
    with torch.no_grad():
        exact = per_sample.norms(loss)(w.double(), x.double())
        found = per_sample.norms(loss)(w, x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "chunk_size"), [*zip(CASES, itertools.cycle([None, 1, 2]))])
def test_norms_can_be_differentiated(name, chunk_size):
    loss, params, batch, _ = CASES[name]
    params, x = arguments(params, batch)

    def derivatives(squares):
        asked = [p.clone().requires_grad_() for p in params]
        none = 0 * sum(p.sum() for p in asked)  # a norm may be constant
        return torch.autograd.grad(squares(asked) + none, asked)

    def expected(params):
        rows = [
            torch.autograd.grad(loss(params, one), params, create_graph=True, allow_unused=True)
            for one in x
        ]
        return sum(g.square().sum() for row in rows for g in row if g is not None)

    found = lambda params: per_sample.norms(loss, chunk_size=chunk_size)(params, x).square().sum()
    assert_same(derivatives(found), derivatives(expected), eps=256)


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 4, 1])
@pytest.mark.parametrize("regions", [False, True])
def test_a_wide_network_takes_a_sum_and_little_more(regions, chunk_size, grad_mode, made):
    size = 16
    params, x = [weight(200, 200) for _ in range(6)], numbers(size, 200)
    layer = lambda w, x: F.relu(x @ w, inplace=True)  # of memory that a factor had

    def loss(params, x):
        for w in params:
            x = functx.remat(layer)(w, x) if regions else torch.tanh(x @ w)
        return x.square().sum()

    one = sum(w.nbytes for w in params)
    with torch.set_grad_enabled(grad_mode):
        f = per_sample.clipped_sum(loss, max_norm=1.0, chunk_size=chunk_size)
        assert peak(f, params, x) < 1.6 * one
        f(params, x)  # with what is known by then
        assert all(made)
        assert peak(per_sample.norms(loss), params, x) < 0.7 * one
        assert peak(per_sample.grads(loss), params, x) > size * one
