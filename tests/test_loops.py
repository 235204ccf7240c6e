"""Loops that keep some of their states: counts and bytes, and what they refuse."""

import pytest
import torch
from cases import DTYPE, numbers
from references import Operations, assert_same, count, no_garbage_collection, peak, total
from torch import nn

import functx
from functx import _schedules

pytestmark = pytest.mark.usefixtures("no_hooks")

WEIGHT = numbers(4, 4) / 2
X = numbers(64, 4)
STATE = X.numel() * X.element_size()


def body(x):
    """The derivative of ``tanh`` reads its result, so a replay runs it, and the product."""
    return torch.tanh(x @ WEIGHT)


def loop(x, steps, **options):
    return functx.remat_loop(body, x, steps, **options).sum()


def plain(x, steps):
    for _ in range(steps):
        x = body(x)
    return x.sum()


def autograd(f, x, *args, **kwargs):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(f(leaf, *args, **kwargs), leaf)[0]


def grad(f, x, *args, **kwargs):
    return functx.grad(lambda x: f(x, *args, **kwargs))(x)


def per_example(f, x, *args, **kwargs):
    return functx.vmap(functx.grad(lambda x: f(x, *args, **kwargs)))(x)


GRADIENTS = {"autograd": autograd, "grad": grad, "vmap(grad)": per_example}


class Calls:
    """A body that counts its calls."""

    def __init__(self):
        self.n = 0

    def __call__(self, x):
        self.n += 1
        return body(x)


class TestRecompute:
    @pytest.mark.parametrize("gradient", GRADIENTS)
    @pytest.mark.parametrize(("steps", "slots"), [(1, 1), (2, 1), (9, 2), (13, 3), (33, 5), (7, 9)])
    def test_least_for_its_slots(self, gradient, steps, slots):
        counts = count(GRADIENTS[gradient], loop, X, steps, slots=slots)
        assert counts["tanh"] == steps + _schedules.recomputed(steps, slots)
        assert counts["tanh_backward"] == steps

    def test_a_thousand_steps(self):
        calls = Calls()

        def f(x):
            y = functx.remat_loop(calls, x, 1024, slots=10)
            assert calls.n == 1024
            return y.sum()

        with Operations() as operations:
            autograd(f, X[:2])
        assert operations.counts["tanh"] == calls.n == 1024 + 3755

    def test_forward_mode_recomputes_nothing(self):
        counts = count(functx.jvp, lambda x: loop(x, 33, slots=5), (X,), (X,))
        assert counts["tanh"] == 33

    def test_without_a_derivative_nothing_is_recomputed(self):
        for f in (loop, functx.vmap(lambda x: loop(x, 33, slots=5))):
            assert count(f, X, *((33,) if f is loop else ()))["tanh"] == 33

    def test_rows_of_a_jacobian_share_the_recompute(self):
        counts = count(functx.jacrev(lambda x: functx.remat_loop(body, x, 13, slots=3)), X[:1])
        assert counts["tanh"] == 13 + _schedules.recomputed(13, 3)

    def test_scan_recomputes_as_a_loop(self):
        def f(x):
            return total(functx.remat_scan(lambda c, _: (body(c), c.sum()), x, None, 33, slots=5))

        assert count(grad, f, X)["tanh"] == 33 + _schedules.recomputed(33, 5)


class TestMemory:
    @pytest.mark.parametrize("gradient", GRADIENTS)
    @pytest.mark.parametrize(("steps", "slots"), [(33, 5), (100, 5), (100, 10), (120, 4)])
    def test_peak(self, gradient, steps, slots):
        """The kept states but the first, which is the caller's, and one step's residual.

        One cotangent a region that is being pulled back, and what one operation works on.
        """
        depth = _schedules.depth(steps, slots)
        states = peak(GRADIENTS[gradient], loop, X, steps, slots=slots) / STATE
        assert states <= (slots - 1) + 1 + depth + 2.2

    def test_peak_can_fail(self):
        assert peak(grad, lambda x: plain(x, 100), X) / STATE > 99

    def test_what_is_kept_between_the_passes(self):
        with no_garbage_collection(), Operations() as operations:
            x = X.detach().requires_grad_()
            y = loop(x, 100, slots=10)
            # Nine states, and of the last step what went in and what came out.
            assert operations.live / STATE <= 11.1
            y.backward()
            x.grad = None
            del y
        assert operations.live == 0

    def test_forward_mode_keeps_no_slots(self):
        """Pairs of states that the regions around a step are called with."""
        depth = _schedules.depth(200, 10)
        used = peak(functx.jvp, lambda x: loop(x, 200, slots=10), (X,), (X,)) / STATE
        assert used <= 2 * (depth + 2) + 0.1

    def test_slices_are_not_copied(self):
        """The gradient of ``xs`` is written once for each region around a step, not more."""
        xs = numbers(64, 64, 4)
        steps = len(xs)

        def f(xs):
            return functx.remat_scan(lambda c, x: (torch.tanh(c + x), None), X, xs, slots=6)[
                0
            ].sum()

        depth = _schedules.depth(steps, 6)
        gradient = xs.numel() * 8
        assert peak(functx.grad(f), xs) <= 2.2 * gradient + (6 + depth + 4) * STATE


class TestSequential:
    @pytest.mark.parametrize("segments", [1, 2, 3, 7])
    def test_values_and_counts(self, segments):
        layers = [nn.Sequential(nn.Linear(4, 4, dtype=DTYPE), nn.Tanh()) for _ in range(7)]

        def run(f):
            x = X.detach().requires_grad_()
            y = f(x)
            return y, torch.autograd.grad(y.sum(), [x, *nn.Sequential(*layers).parameters()])

        for functions in (layers, nn.Sequential(*layers), iter(layers)):
            ours = run(
                lambda x, functions=functions: functx.remat_sequential(functions, segments, x)
            )
            assert_same(ours, run(nn.Sequential(*layers)))
        last = _schedules.segments(7, segments)[-1]
        counts = count(run, lambda x: functx.remat_sequential(layers, segments, x))
        assert counts["tanh"] == 7 + 7 - (last[1] - last[0])

    def test_per_example(self):
        layers = [lambda x, w=w: torch.tanh(x @ w) for w in (WEIGHT, WEIGHT.T, WEIGHT)]

        def f(x, k):
            return functx.remat_sequential(layers, k, x).sum()

        ours, expected = (functx.vmap(functx.grad(lambda x, k=k: f(x, k)))(X) for k in (2, 1))
        assert_same(ours, expected)

    def test_what_it_refuses(self):
        layers = [torch.sin] * 3
        for segments in (0, 4, -1):
            with pytest.raises(ValueError, match="3 functions can be cut into 1 to 3 segments"):
                functx.remat_sequential(layers, segments, X)
        for segments in (2.0, True, None):
            with pytest.raises(TypeError, match="segments must be an int"):
                functx.remat_sequential(layers, segments, X)
        with pytest.raises(TypeError, match="expected a callable"):
            functx.remat_sequential([torch.sin, X], 1, X)


class TestRefused:
    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"slots": 0}, ValueError, "slots is 0"),
            ({"slots": 1.5}, TypeError, "slots must be an int"),
            ({"slots": 2, "steps": 497}, ValueError, "need 3 slots or more, got 2"),
            ({"steps": -1}, ValueError, "expected 0 or more"),
            ({"steps": 2.0}, TypeError, "steps must be an int"),
        ],
    )
    def test_loop(self, kwargs, error, message):
        with pytest.raises(error, match=message):
            functx.remat_loop(body, X, **{"steps": 100, **kwargs})

    @pytest.mark.parametrize(
        ("body", "args", "error", "message"),
        [
            (lambda c, x: c, (X, X), TypeError, "must return a pair"),
            (lambda c, x: (c[:1], x), (X, X), TypeError, "leaf 0 was a torch.float64 tensor"),
            (lambda c, x: (c.float(), x), (X, X), TypeError, "torch.float32"),
            (lambda c, x: ((c, c), x), (X, X), TypeError, "structure"),
            (lambda c, x: (c, x), (X, 1.0), TypeError, "xs must be tensors"),
            (lambda c, x: (c, x), (X, X[0, 0]), ValueError, "leading dimension"),
            (lambda c, x: (c, x), (X, X, 3), ValueError, "agree on one number"),
            (lambda c, x: (c, x), (X, (X, X[:2])), ValueError, "agree on one number"),
            (lambda c, x: (c, x), (X,), ValueError, "length must be given"),
            (3, (X, X), TypeError, "expected a callable"),
        ],
    )
    def test_scan(self, body, args, error, message):
        with pytest.raises(error, match=message):
            functx.remat_scan(body, *args)

    def test_outputs_of_several_structures(self):
        def body(i, x):
            return i + 1, (x,) if i else x

        with pytest.raises(TypeError, match="differ in structure"):
            functx.remat_scan(body, 0, X)

    def test_the_deepest_nest_works(self):
        steps = _schedules.reach(1, _schedules.DEEPEST)
        ours = grad(loop, X[:1], steps, slots=1)
        assert_same(ours, grad(plain, X[:1], steps))
        with pytest.raises(ValueError, match="need 2 slots"):
            loop(X, steps + 1, slots=1)
