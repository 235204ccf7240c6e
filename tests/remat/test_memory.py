"""Rule 6: no less memory than it says, no more than it must; and no saved-tensor hooks.

Bytes are exact: those of the storages that operations make, in activations of one layer.
"""

import pytest
import torch
from references import Operations, no_garbage_collection, peak

import functx

from .programs import STACKS, identity, kept_bytes, numbers, same

LAYERS, SEGMENT = 24, 4
WEIGHTS = [numbers(16, 16, start=float(i)) / 2 for i in range(LAYERS)]
X = numbers(64, 16)
ACTIVATION = X.nbytes


def block(x, weights):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def loss(weights, x, remat=functx.remat, segment=SEGMENT):
    for start in range(0, len(weights), segment):
        x = remat(block)(x, weights[start : start + segment])
    return x.square().sum()


def plain_loss(weights, x):
    return loss(weights, x, identity)


def autograd(f, weights, x):
    weights = [w.detach().requires_grad_() for w in weights]
    return torch.autograd.grad(f(weights, x), weights)


def per_example(f):
    return functx.vmap(functx.grad(f, argnums=1), (None, 0))


class TestPeaks:
    """Gradients of all weights weigh 6 activations; the boundaries of six regions, 5 or 6 more."""

    def test_of_plain_autograd(self):
        assert peak(autograd, loss, WEIGHTS, X) <= 11.4 * ACTIVATION
        assert peak(autograd, plain_loss, WEIGHTS, X) > 25 * ACTIVATION

    def test_of_grad(self):
        assert peak(functx.grad(loss), WEIGHTS, X) <= 11.4 * ACTIVATION
        assert peak(functx.grad(plain_loss), WEIGHTS, X) > 25 * ACTIVATION

    def test_of_input_gradients_per_example(self):
        assert peak(per_example(loss), WEIGHTS, X[:, None]) <= 12.4 * ACTIVATION
        assert peak(per_example(plain_loss), WEIGHTS, X[:, None]) > 25 * ACTIVATION

    def test_of_a_long_chain_grows_by_its_boundaries(self):
        """Four regions of 8 layers, then of 16: one replay more, and the gradients."""
        weights = [numbers(16, 16, start=float(i)) / 2 for i in range(64)]
        small, large = (
            peak(lambda w, n=n: functx.grad(loss)(w, X, segment=n // 4), weights[:n])
            for n in (32, 64)
        )
        gradients = sum(w.nbytes for w in weights[32:])
        assert large - small <= gradients + (64 // 4 - 32 // 4 + 0.5) * ACTIVATION

    @pytest.mark.parametrize("stack", ["double backward", "grad(grad)", "jvp(grad)"])
    def test_of_second_order(self, stack):
        """The inner backward keeps boundaries too, of primals and of cotangents."""

        def of_inputs(f):
            return lambda: STACKS[stack](lambda x: f(WEIGHTS, x), X)

        assert peak(of_inputs(loss)) <= 0.6 * peak(of_inputs(plain_loss))

    @pytest.mark.parametrize("depth", [1, 3])
    def test_of_levels_around_it_while_the_forward_runs(self, depth):
        """Only boundaries are kept, however many transforms differentiate."""

        def live(f):
            seen = []

            def watched(x):
                value = f(WEIGHTS, x)
                seen.append(operations.live)
                return value

            nest = watched
            for _ in range(depth):
                nest = functx.grad(lambda x, nest=nest: nest(x).sum())
            with no_garbage_collection(), Operations() as operations:
                nest(X)
            return seen[0]

        assert live(loss) <= (LAYERS // SEGMENT + 1.5) * ACTIVATION
        assert live(plain_loss) >= LAYERS * ACTIVATION


def chain(n, remat=functx.remat):
    def f(x):
        for _ in range(n):
            x = torch.tanh(x.sin())
        return x

    return remat(f)


class TestKept:
    """After a forward pass, beside its result."""

    @staticmethod
    def kept(f, x=X):
        def forward():
            y = f(x.detach().requires_grad_())
            return y.sum()  # that sum reads no value

        held, left = kept_bytes(forward)
        assert left == 0
        return held - 8

    def test_one_region_keeps_its_input_only(self):
        assert self.kept(lambda x: chain(4)(x * 1)) == ACTIVATION
        assert self.kept(chain(4)) == 0
        assert self.kept(lambda x: chain(4, identity)(x * 1)) > 4 * ACTIVATION

    def test_a_chain_of_regions_keeps_each_boundary_once(self):
        def f(x):
            for _ in range(5):
                x = chain(2)(x)
            return x

        assert self.kept(f) == 4 * ACTIVATION

    def test_an_input_of_many_regions_is_kept_once(self):
        def f(x):
            x = x * 1
            return chain(2)(x) + chain(3)(x) + functx.remat(lambda y: (y * x).sin())(x.sum())

        assert self.kept(f) <= ACTIVATION + 8

    def test_a_region_in_a_region_keeps_nothing_of_its_own(self):
        assert self.kept(functx.remat(lambda x: chain(2)(chain(2)(x)))) == 0

    def test_a_captured_weight_is_no_copy(self):
        w = numbers(16, 16).requires_grad_()
        assert self.kept(functx.remat(lambda x: torch.tanh(x @ w))) == 0

    def test_a_result_that_a_policy_keeps_is_kept_once(self):
        """It is what the next part keeps, too."""
        keep = functx.checkpoint_policies.everything_saveable

        def f(x, remat):
            return torch.tanh(remat(lambda x: torch.tanh(torch.tanh(x)))(x))

        def with_policy(g):
            return functx.remat(g, policy=keep)

        plain, ours = (self.kept(lambda x, r=r: f(x, r)) for r in (identity, with_policy))
        assert ours <= plain

    @pytest.mark.parametrize("transform", ["grad", "vmap(grad)"])
    def test_second_order_does_not_grow_with_depth(self, transform):
        """The pullback of a pullback is a region again: it keeps inputs, however long the chain."""

        def kept(n, remat=functx.remat):
            gradient = functx.grad(lambda x: chain(n, remat)(x).sum())
            f = functx.vmap(gradient) if transform == "vmap(grad)" else gradient
            return kept_bytes(functx.vjp, f, X)[0]

        assert kept(4) == kept(32)
        assert kept(32, identity) > kept(4, identity) + 20 * ACTIVATION


@pytest.mark.parametrize("stack", STACKS)
def test_no_saved_tensor_hooks(stack):
    with torch.autograd.graph.disable_saved_tensors_hooks("remat must not use them"):
        ours = STACKS[stack](
            lambda x: functx.remat(lambda x: chain(2)(chain(2)(x)))(x).sum(), numbers(3)
        )
    same(ours, STACKS[stack](lambda x: chain(4, identity)(x).sum(), numbers(3)))


def test_memory_is_freed_by_dropping_references_only():
    """What the user holds on to keeps its memory and its numbers."""
    held = []

    def f(x):
        y = x.sin()
        held.append((y.detach(), x.detach().sin()))
        return y.exp().tanh()

    x = X.clone().requires_grad_()
    y = functx.remat(f)(x * 1)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert held
    for tensor, expected in held:
        assert tensor.untyped_storage().nbytes() == X.nbytes
        same(tensor, expected)
    same(x.detach(), X)
