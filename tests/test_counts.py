"""What is recomputed, and what is kept: counts of operations and bytes, below functorch.

``tanh(x @ w)`` is used throughout, because its derivative reads its result: each ``tanh`` and each
``mm`` of a region must run once more in a backward pass, no less, and no more.
"""

import pytest
import torch
from cases import deep_mlp, numbers
from programs import identity
from references import Operations, count, no_garbage_collection, peak
from torch import func as torch_func

import functx

pytestmark = pytest.mark.usefixtures("hooks")

LAYERS, SEGMENT = 24, 4
WEIGHTS, X, LOSS = deep_mlp(LAYERS)
ACTIVATION = X.numel() * X.element_size()


def block(x, weights):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def chained(weights, x, remat=functx.remat, segment=SEGMENT):
    for start in range(0, len(weights), segment):
        x = remat(block)(x, weights[start : start + segment])
    return x.square().sum()


def autograd(f, weights, x):
    weights = [w.detach().requires_grad_() for w in weights]
    return torch.autograd.grad(f(weights, x), weights)


def of_inputs(f):
    """``f`` as a function of the input only."""
    return lambda x: f(WEIGHTS, x)


class TestRecompute:
    def test_the_forward_pass_runs_once(self):
        for weights in (WEIGHTS, [w.detach().requires_grad_() for w in WEIGHTS]):
            counts = count(chained, weights, X)
            assert counts["tanh"] == counts["mm"] == LAYERS

    def test_plain_autograd(self):
        plain, ours = count(autograd, LOSS, WEIGHTS, X), count(autograd, chained, WEIGHTS, X)
        assert ours["tanh"] == 2 * LAYERS
        assert ours["tanh_backward"] == LAYERS
        assert ours["mm"] == plain["mm"] + LAYERS

    @pytest.mark.parametrize("library", [functx, torch_func])
    def test_grad(self, library):
        plain, ours = (
            count(library.grad(LOSS), WEIGHTS, X),
            count(library.grad(chained), WEIGHTS, X),
        )
        assert ours["tanh"] == 2 * LAYERS
        assert ours["tanh_backward"] == plain["tanh_backward"] == LAYERS
        assert ours["mm"] == plain["mm"] + LAYERS

    def test_vmap_of_grad(self):
        plain, ours = (
            count(functx.vmap(functx.grad(f), (None, 0)), WEIGHTS, X[:, None])
            for f in (LOSS, chained)
        )
        assert ours["tanh"] == 2 * LAYERS
        assert ours["tanh_backward"] == plain["tanh_backward"]

    def test_jvp_recomputes_nothing(self):
        plain, ours = (
            count(lambda f=f: functx.jvp(of_inputs(f), (X,), (X,))) for f in (LOSS, chained)
        )
        assert ours["tanh"] == plain["tanh"] == LAYERS
        assert ours["mm"] == plain["mm"]

    def test_without_a_derivative_nothing_is_recomputed(self):
        for f in (chained, functx.vmap(chained, (None, 0))):
            counts = count(f, WEIGHTS, X[:2])
            assert counts["tanh"] == LAYERS
        with torch.no_grad():
            assert count(chained, [w.requires_grad_() for w in deep_mlp()[0]], X)["tanh"] == LAYERS

    def test_two_pullbacks_recompute_twice(self):
        def run():
            value, pullback = functx.vjp(of_inputs(chained), X)
            pullback(torch.ones_like(value))
            pullback(torch.ones_like(value), retain_graph=False)

        assert count(run)["tanh"] == 3 * LAYERS

    def test_jacrev_recomputes_once_for_all_rows(self):
        def f(x, remat):
            return remat(block)(x, WEIGHTS[:4])

        counts = count(functx.jacrev(lambda x: f(x, functx.remat)), X[:2])
        assert counts["tanh"] == 8

    def test_second_order_is_a_remat_of_a_remat(self):
        """Forward, replay, and for the outer pass each of the two once more."""
        nested = functx.grad(lambda x: functx.grad(of_inputs(chained))(x).sum())
        plain = functx.grad(lambda x: functx.grad(of_inputs(LOSS))(x).sum())
        assert count(plain, X)["tanh"] == LAYERS
        assert 2 * LAYERS < count(nested, X)["tanh"] <= 4 * LAYERS

    def test_nested_regions_recompute_once_a_depth(self):
        def nest(depth, weights):
            if depth == 0:
                return lambda x: block(x, weights)
            half = len(weights) // 2
            first, second = nest(depth - 1, weights[:half]), nest(depth - 1, weights[half:])
            return functx.remat(lambda x: second(first(x)))

        for depth in (1, 2, 3):
            f = nest(depth, WEIGHTS[:8])
            counts = count(functx.grad(lambda x, f=f: f(x).sum()), X)
            assert 2 * 8 <= counts["tanh"] <= (depth + 1) * 8

    def test_what_needs_no_gradient_is_not_recomputed(self):
        """A region without a differentiated input is run once, like any function."""

        def f(x, y):
            return x.sum() * functx.remat(block)(y, WEIGHTS[:4]).sum()

        assert count(functx.grad(f), X, X)["tanh"] == 4
        y = X.detach().requires_grad_()
        assert count(lambda: f(y, X).backward())["tanh"] == 4

    def test_gradients_that_are_not_asked_for_are_not_computed(self):
        frozen = [w.detach() for w in WEIGHTS]
        plain, ours = (
            count(functx.grad(lambda x, f=f: f(frozen, x)), X)["mm"] for f in (LOSS, chained)
        )
        assert ours == plain + LAYERS


def live_after_forward(library, f, depth):
    """Activations alive when ``f`` has run inside ``depth`` nested ``grad``."""
    seen = []

    def watched(x):
        value = of_inputs(f)(x)
        seen.append(operations.live)
        return value

    nested = watched
    for _ in range(depth):
        nested = library.grad(lambda x, nested=nested: nested(x).sum())
    with Operations() as operations:
        nested(X)
    return seen[0] / ACTIVATION


# What the same network peaks at with torch.utils.checkpoint every 4 layers, for the gradient of the
# weights or of the input. The gradients of all weights weigh 6 at the end.
CHECKPOINTED = 11.01


class TestMemory:
    @pytest.mark.parametrize("library", [functx, torch_func])
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_only_boundaries_are_kept_under_nested_grads(self, library, depth):
        boundaries = LAYERS // SEGMENT
        assert live_after_forward(library, chained, depth) <= boundaries + 1.5
        assert live_after_forward(library, LOSS, depth) >= LAYERS  # the measure can fail

    def test_peak_of_plain_autograd(self):
        assert peak(autograd, chained, WEIGHTS, X) / ACTIVATION <= CHECKPOINTED

    def test_peak_of_grad(self):
        assert peak(functx.grad(chained), WEIGHTS, X) / ACTIVATION <= CHECKPOINTED

    def test_peak_of_per_example_input_gradients(self):
        per_example = functx.vmap(functx.grad(chained, argnums=1), (None, 0))
        assert peak(per_example, WEIGHTS, X[:, None]) / ACTIVATION <= 10.2

    def test_peak_of_second_order(self):
        """The inner backward keeps boundaries too, of primals and of cotangents."""

        def nested(f):
            return functx.grad(lambda x: functx.grad(of_inputs(f))(x).sum())

        ours, plain = peak(nested(chained), X) / ACTIVATION, peak(nested(LOSS), X) / ACTIVATION
        assert plain > 45
        assert ours <= 0.6 * plain

    def test_a_long_chain_costs_its_boundaries(self):
        """Four regions of 8 layers, then of 16: the peak grows by one replay and the gradients."""
        weights, x, _ = deep_mlp(64)
        small, large = (
            peak(functx.grad(chained), weights[:n], x, segment=n // 4) / ACTIVATION
            for n in (32, 64)
        )
        recompute = 64 // 4 - 32 // 4
        gradients = sum(w.numel() for w in weights[32:]) * 8 / ACTIVATION
        assert large - small <= recompute + gradients + 0.5

    def test_nothing_is_left_afterwards(self):
        """Without the garbage collector: no reference cycles."""
        with no_garbage_collection(), Operations() as operations:
            result = functx.grad(chained)(WEIGHTS, X)
            leaf = X.detach().requires_grad_()
            functx.remat(block)(leaf, WEIGHTS[:4]).sum().backward()
            leaf.grad = None
            functx.remat(block)(leaf, WEIGHTS[:4])  # dropped without a backward pass
            assert operations.live == sum(g.numel() * 8 for g in result)


def test_a_remat_that_does_nothing_is_caught():
    """The same counts without remat fail every bound above."""

    plain = count(functx.grad(lambda w, x: chained(w, x, identity)), WEIGHTS, X)
    assert plain["tanh"] == LAYERS
    bytes_kept = peak(functx.grad(lambda w, x: chained(w, x, identity)), WEIGHTS, X)
    assert bytes_kept / ACTIVATION > 24


def test_numbers_are_fixed():
    assert torch.equal(numbers(3), numbers(3))
