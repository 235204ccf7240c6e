"""Loops run no more steps again, and keep no more states, than schedules say; which are best."""

import functools
import math

import pytest
import torch
from cases import numbers
from references import Operations, count, gradients, no_garbage_collection, peak

import functx
from functx._loops import binomial

pytestmark = pytest.mark.usefixtures("no_hooks")
WEIGHT = numbers(4, 4) / 2
X = numbers(64, 4)
STATE = X.nbytes


def body(x):
    """The derivative of ``tanh`` reads its result, so a replay runs it, and the product."""
    return torch.tanh(x @ WEIGHT)


def loop(x, steps, **options):
    return functx.remat_loop(body, x, steps, **options).sum()


def until(x, n):
    step = lambda s: (s[0] + 1, body(s[1]))
    return functx.remat_loop(step, (0, x), lambda s: s[0] < n)[1].sum()


def autograd(f, x, *args, **kwargs):
    return gradients(lambda x: f(x, *args, **kwargs), x)


def grad(f, x, *args, **kwargs):
    return functx.grad(f)(x, *args, **kwargs)


def per_example(f, x, *args, **kwargs):
    return functx.vmap(functx.grad(lambda x: f(x, *args, **kwargs)))(x)


ways = pytest.mark.parametrize("gradient", [autograd, grad, per_example])


class TestOfSteps:
    @ways
    @pytest.mark.parametrize(("steps", "slots"), [(1, 1), (2, 1), (9, 2), (33, 5), (7, 9)])
    def test_it_runs_the_least_again_for_its_slots(self, gradient, steps, slots):
        counts = count(gradient, loop, X, steps, slots=slots)
        assert counts["tanh"] == steps + optimum(steps, slots)
        assert counts["tanh_backward"] == steps

    @ways
    @pytest.mark.parametrize(("steps", "slots"), [(33, 5), (100, 10), (120, 4)])
    def test_the_peak_is_its_slots_and_a_cotangent_a_region(self, gradient, steps, slots):
        """The kept states but the first, which is the caller's, and one step's residual.

        One cotangent a region that is being pulled back, and what one operation works on.
        """
        depth = binomial.depth(steps, slots)
        states = peak(gradient, loop, X, steps, slots=slots) / STATE
        assert states <= (slots - 1) + 1 + depth + 2.2

    def test_forward_mode_keeps_no_slots(self):
        """Pairs of states that the regions around a step are called with."""
        depth = binomial.depth(200, 10)
        used = peak(functx.jvp, lambda x: loop(x, 200, slots=10), (X,), (X,)) / STATE
        assert used <= 2 * (depth + 2) + 0.1

    def test_slices_are_not_copied(self):
        """The gradient of ``xs`` is written once for each region around a step, not more."""
        xs = numbers(64, 64, 4)

        def f(xs):
            step = lambda c, x: (torch.tanh(c + x), None)
            return functx.remat_scan(step, X, xs, slots=6)[0].sum()

        depth = binomial.depth(len(xs), 6)
        assert peak(functx.grad(f), xs) <= 2.2 * xs.nbytes + (6 + depth + 4) * STATE


def around(step, steps):
    """The regions around a step of a block, outermost first: it, its first half, and so on."""
    start, found = 0, [(0, steps)]
    while steps > 1:
        half = steps // 2
        if step < start + half:
            found, steps = [*found, (start, half)], half
        else:
            start, steps = start + half, steps - half
    return found


def again(n):
    """Steps that run again: each once a region around it.

    But where a region ends with another, which is so around the last step, only that is needed.
    """
    steps = [((1 << k), i) for k in range(12) for i in range(1 << k)][:n]
    last, found = around(steps[-1][1], steps[-1][0]), 0
    for block, i in steps:
        regions = around(i, block)
        common = [a == b for a, b in zip(regions, last)] if block == steps[-1][0] else []
        found += len(regions) - max(0, sum(common) - 1)
    return found


class TestUntilACondition:
    """Blocks of 1, 2, 4, ... steps, each of which is halved again and again."""

    def test_steps_run_again_as_the_blocks_have_it(self):
        for n in (*range(1, 14), 40):
            assert count(grad, until, X[:2], n)["tanh"] == n + again(n)
        assert again(1024) < 2 * 3755

    @pytest.mark.parametrize(("n", "way"), [(40, grad), (130, per_example)])
    def test_the_peak_is_two_states_a_block(self, n, way):
        assert peak(way, until, X, n) / STATE <= 2 * n.bit_length() + 4


def of_slots(x, steps):
    return loop(x, steps, slots=10)


@pytest.mark.parametrize("f", [of_slots, until])
def test_where_no_derivative_of_it_is_taken_nothing_runs_again(f):
    assert count(functx.jvp, lambda x: f(x, 33), (X,), (X,))["tanh"] == 33
    assert count(f, X, 33)["tanh"] == 33
    assert count(functx.vmap(lambda x: f(x, 33)), X)["tanh"] == 33
    assert count(functx.grad(lambda y: (y * f(X, 33)).sum()), X)["tanh"] == 33


# Nine states, and of the last step what went in and what came out; or one before each of the blocks
# of 2, 4, ..., 64, and the last.
@pytest.mark.parametrize(("f", "states"), [(of_slots, 11.1), (until, 7.1)])
def test_between_the_passes_it_keeps_its_slots_or_a_state_a_block(f, states):
    with no_garbage_collection(), Operations() as operations:
        x = X.detach().requires_grad_()
        y = f(x, 100)
        assert operations.live / STATE <= states
        y.backward()
        x.grad = None
        del y
    assert operations.live == 0


@functools.cache
def optimum(steps, slots):
    """The fewest steps run again: try every place for the next state that is kept."""
    if steps <= 1:
        return 0
    if slots == 0:
        return math.inf
    return min(m + optimum(m, slots) + optimum(steps - m, slots - 1) for m in range(1, steps))


def walk(steps, slots):
    """Steps run again, and the most regions around one step, of a schedule as it is executed."""
    *regions, last = binomial.chain(steps, slots)
    assert last[0] == 1
    assert sum(m for m, _ in regions) == steps - 1
    again = deepest = 0
    for m, own in regions:
        assert own >= 1  # a region's first state is one of its slots
        inside, depth = walk(m, own)
        again, deepest = again + m + inside, max(deepest, depth + 1)
    return again, deepest


@pytest.mark.parametrize("slots", range(1, 9))
def test_binomial_schedules_are_the_optimum(slots):
    for steps in range(1, 100):
        best, depth = optimum(steps, slots), binomial.depth(steps, slots)
        assert walk(steps, slots) == (best, depth)


def test_a_thousand_steps_in_ten_slots_run_3755_again():
    assert walk(1024, 10) == (3755, 5)


def test_the_least_slots_bound_the_depth():
    for steps in (1, 31, 32, 496, 497, 1024, 10**6):
        slots = binomial.least_slots(steps)
        assert binomial.depth(steps, slots) <= binomial.DEEPEST
        assert slots == 1 or binomial.depth(steps, slots - 1) > binomial.DEEPEST
