"""Gradients that are products of few terms are known by their factors: equal, in fewer bytes."""

import functools

import factors
import pytest
import torch
from cases import DTYPE, numbers
from factors import CASES, IN, OUT, VOCAB, B, T, arguments, embed, weight
from per_sample_loops import slow, slow_norms, slow_sum
from references import assert_same

import functx
from functx import per_sample
from functx.per_sample import _outer


@pytest.fixture
def made(monkeypatch):
    """What arrived: for each gradient whether it was known by factors."""
    return factors.watch(monkeypatch)


class Reciprocal(torch.autograd.Function):
    """Its backward wants the memory of a gradient."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return torch.from_numpy(gradient.numpy().copy())


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_values(name, chunk_size, made):
    loss, params, batch, by_factors = CASES[name]
    params, x = arguments(params, batch)
    if batch == "i":
        x[0, 0], x[1, 1], x[2, 0] = 7, 7, VOCAB - 1  # what is padding in some cases
    gradients = slow(loss, params, x)
    norms = slow_norms(gradients)
    limit = norms.mean().item()
    expected = slow_sum(gradients, (limit / norms).clamp(max=1))
    for passes in (1, 2):
        for grad_mode in (True, False):
            with torch.set_grad_enabled(grad_mode):
                total, extras = per_sample.clipped_sum(
                    loss, max_norm=limit, chunk_size=chunk_size, return_norms=True, passes=passes
                )(params, x)
            assert_same(extras.norms, norms, eps=64)
            assert_same(list(total), expected, eps=256)
    if chunk_size is None and by_factors is not None:
        assert any(made) == by_factors
    assert_same(per_sample.norms(loss, chunk_size=chunk_size)(params, x), norms, eps=64)


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
class TestCodeThatWantsTheGradientItself:
    def check(self, loss, params, x, chunk_size):
        norms = slow_norms(slow(loss, params, x))
        found = per_sample.norms(loss, chunk_size=chunk_size)
        with torch.no_grad():
            assert_same(found(params, x), norms, eps=64)
        assert_same(found(params, x), norms, eps=64)

    def hooked(self, hook):
        def loss(p, x):
            middle = p[0].view_as(p[0])
            middle.register_hook(hook)
            return (x @ middle.T).sin().sum()

        return loss

    @pytest.mark.parametrize(
        "hook",
        [
            lambda g: g * 2,
            lambda g: g.clone().mul_(2),
            lambda g: g.clone().view(-1).mul_(2).view(g.shape),
            lambda g: g.t().contiguous().t() + 1,
            lambda g: g.clamp(min=0),
            lambda g: torch.cat([g[:1], g[1:] * 3]),
            lambda g: torch.where(g > 0, g, 0.0),
            lambda g: g.masked_fill(g < 0, 1.0),
        ],
    )
    def test_hooks(self, hook, chunk_size):
        self.check(self.hooked(hook), [weight()], numbers(B, T, IN), chunk_size)

    def test_writes_through_views(self, chunk_size):
        def hook(gradient):
            gradient = gradient.clone()
            gradient.t()[1].mul_(3)
            gradient[2].zero_()
            gradient.view(-1)[:5].add_(1)
            return gradient

        self.check(self.hooked(hook), [weight()], numbers(B, T, IN), chunk_size)

    def test_regions(self, chunk_size):
        @functx.remat
        def layer(w, x):
            return torch.tanh(x @ w.T)

        def loss(p, x):
            return layer(p[1], layer(p[0], x)).sum()

        params = [weight(), weight(IN, OUT)]
        self.check(loss, params, numbers(B, T, IN), chunk_size)
        x = numbers(B, T, IN)
        plain = lambda p, x: torch.tanh(torch.tanh(x @ p[0].T) @ p[1].T).sum()  # noqa: E731
        sums = [
            per_sample.clipped_sum(f, max_norm=0.3, chunk_size=chunk_size)(params, x)
            for f in (loss, plain)
        ]
        assert_same(*sums, eps=64)


def test_a_backward_in_numpy():
    """One example alone runs in plain autograd, where a backward may leave torch."""

    def loss(p, x):
        return (x @ Reciprocal.apply(p[0]).T).sin().sum()

    params, x = [weight()], numbers(B, T, IN)
    with torch.no_grad():
        norms = per_sample.norms(loss, chunk_size=1)(params, x)
    expected = per_sample.norms(lambda p, x: (x @ p[0].T).sin().sum())(params, x)
    assert_same(norms, expected, eps=64)


class Scribbles(torch.autograd.Function):
    """Its backward writes to what an earlier node has read: an activation of the layer after it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors[0].detach().zero_()
        return gradient


# Of one example alone the tape is pulled back twice, which torch refuses for such a function.
@pytest.mark.parametrize(("chunk_size", "passes"), [(None, 1), (None, 2), (1, 1)])
def test_factors_written_to_before_they_are_read(chunk_size, passes):
    def loss(p, x):
        return (Scribbles.apply((x @ p[0].T).sin()) @ p[0]).sin().sum()

    params, x = [weight()], numbers(B, T, IN)

    def plain(p, x):
        return ((x @ p[0].T).sin() @ p[0]).sin().sum()

    with torch.no_grad():
        for make in (per_sample.norms, functools.partial(
            per_sample.clipped_sum, max_norm=0.1, passes=passes
        )):  # fmt: skip
            found, expected = (make(f, chunk_size=chunk_size)(params, x) for f in (loss, plain))
            assert_same(found, expected, eps=64)


def test_an_error_of_the_user_comes_through():
    def hook(gradient):
        raise KeyError("mine")

    def loss(p, x):
        middle = p[0] * 1
        middle.register_hook(hook)
        return (x @ middle.T).sum()

    with pytest.raises(KeyError, match="mine"):
        per_sample.norms(loss)([weight()], numbers(B, T, IN))


def test_what_cancels_is_not_lost():
    """Of two terms that are the same but for a millionth, in float32."""
    a = torch.randn(B, 1, IN)
    x = torch.cat([a, a * (1 + 1e-4)], 1)
    sign = torch.tensor([[1.0], [-1.0]])

    def loss(w, x):
        return ((x @ w.T) * sign.to(x)).sum()

    w = torch.randn(OUT, IN)
    with torch.no_grad():
        exact = per_sample.norms(loss)(w.double(), x.double())
        found = per_sample.norms(loss)(w, x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_half_precision():
    w, x = weight(80, 80).bfloat16(), numbers(B, T, 80).bfloat16()

    def loss(w, x):
        return (x @ w.T).sum()

    exact = per_sample.norms(loss)(w.double(), x.double())
    found = per_sample.norms(loss)(w, x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0)
    total = per_sample.clipped_sum(loss, max_norm=1.0)(w, x)
    expected = per_sample.clipped_sum(loss, max_norm=1.0)(w.double(), x.double())
    torch.testing.assert_close(total.double(), expected, rtol=2e-2, atol=1e-3)


def test_memory_that_was_a_factors_is_free_to_write_to():
    with _outer.KeepFactors(2) as mode:
        for _ in range(50):
            product = torch.bmm(numbers(2, 40, 1), numbers(2, 1, 50))
            del product
            numbers(2, 40, 1).zero_()
    assert mode.made == 50


def test_indices_of_another_layout_are_no_tables():
    """An embedding's gradient for all examples in one table is not one table for each."""
    mode = _outer.KeepFactors(2)
    gradient, index = torch.ones(2, 1, 3, dtype=DTYPE), torch.tensor([[30], [5]])
    with mode:
        found = torch.ops.aten.embedding_dense_backward(gradient, index, 60, -1, False)
    assert mode.made == 0
    assert found[30].tolist() == found[5].tolist() == [1, 1, 1]


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize(
    "hook",
    [
        lambda g: (g[3].zero_(), g)[1],
        lambda g: (g[3].fill_(2.0), g)[1],
        lambda g: (g[-1].mul_(2), g)[1],
        lambda g: g * g[3].sum(),
        lambda g: g + g[3] * g.select(1, 0).unsqueeze(1),
        lambda g: (g[3].zero_(), g[4].add_(1), g)[2],
        lambda g: (g[3], g.mul_(2)[3].zero_(), g)[2],
    ],
)
def test_rows_of_an_embeddings_gradient(hook, chunk_size):
    def loss(p, i):
        middle = p[0].view_as(p[0])
        middle.register_hook(hook)
        return embed(middle, i).sin().sum()

    params, i = arguments("e", "i")
    i[0, 0], i[1, 1], i[2, 0] = 3, 3, VOCAB - 1
    norms = slow_norms(slow(loss, params, i))
    with torch.no_grad():
        assert_same(per_sample.norms(loss, chunk_size=chunk_size)(params, i), norms, eps=64)


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_norms(name, chunk_size):
    """What plain autograd follows is no factor, in a chunk of one example too."""
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

    def found(params):
        return per_sample.norms(loss, chunk_size=chunk_size)(params, x).square().sum()

    assert_same(derivatives(found), derivatives(expected), eps=256)
