"""Rule 6: no less memory than it says, no more than it must; and no saved-tensor hooks.

Bytes are exact: those of the storages that operations make, in activations of one layer.
"""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from cases import dense
from references import Operations, gradients, no_garbage_collection, peak
from torch import nn

import functx

from .programs import STACKS, identity, kept_bytes, numbers, same

LAYERS, SEGMENT = 24, 4
WEIGHTS = [numbers(16, 16, start=float(i)) / 2 for i in range(LAYERS)]
X = numbers(64, 16)
ACTIVATION = X.nbytes


def loss(weights, x, remat=functx.remat, segment=SEGMENT):
    for start in range(0, len(weights), segment):
        x = remat(dense)(weights[start : start + segment], x)
    return x.square().sum()


def plain_loss(weights, x):
    return loss(weights, x, identity)


def autograd(f, weights, x):
    return gradients(lambda weights: f(weights, x), weights)


class TestPeaks:
    """Gradients of all weights weigh 6 activations; the boundaries of six regions, 5 or 6 more."""

    @pytest.mark.parametrize(
        ("gradient", "x", "most"),
        [
            (lambda f: lambda weights, x: autograd(f, weights, x), X, 11.4),
            (functx.grad, X, 11.4),
            # Of inputs.
            (lambda f: functx.vmap(functx.grad(f, argnums=1), (None, 0)), X[:, None], 12.4),
        ],
        ids=["backward", "grad", "vmap(grad)"],
    )
    def test_of_gradients(self, gradient, x, most):
        assert peak(gradient(loss), WEIGHTS, x) <= most * ACTIVATION
        assert peak(gradient(plain_loss), WEIGHTS, x) > 25 * ACTIVATION

    @pytest.mark.parametrize("stack", ["double backward", "grad(grad)", "jvp(grad)"])
    def test_of_second_order(self, stack):
        """The inner backward keeps boundaries too, of primals and of cotangents."""

        def of_inputs(f):
            return lambda: STACKS[stack](lambda x: f(WEIGHTS, x), X)

        assert peak(of_inputs(loss)) <= 0.6 * peak(of_inputs(plain_loss))

    @pytest.mark.parametrize("depth", [1, 3])
    def test_of_levels_around_it_while_the_forward_runs(self, depth):
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

    @pytest.mark.parametrize("transform", ["grad", "vmap(grad)"])
    def test_second_order_does_not_grow_with_depth(self, transform):
        """The pullback of a pullback is a region again: it keeps inputs, however long the chain."""

        def kept(n, remat=functx.remat):
            gradient = functx.grad(lambda x: chain(n, remat)(x).sum())
            f = functx.vmap(gradient) if transform == "vmap(grad)" else gradient
            return kept_bytes(functx.vjp, f, X)[0]

        assert kept(4) == kept(32)
        assert kept(32, identity) > kept(4, identity) + 20 * ACTIVATION


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


SQUARE, WEIGHT = numbers(16, 16), numbers(16, 16, start=1.0) / 4
LEAF = WEIGHT.clone().requires_grad_()


plain = functools.partial(dense, [WEIGHT] * 4)


def recursive(x):
    """Through the name of the region itself."""

    f = lambda x, n: x.sin() if n == 0 else x.tanh() * functx.remat(f)(x.mean(), n - 1)
    return functx.remat(f)(x, 3)


def rebound(x):
    """``x = remat(lambda t: x)(y)``: a replay's copy of the function holds what ``x`` was."""
    y = x * 1.0
    x = functx.remat(lambda t: x * t)(y)
    x = functx.remat(lambda: functx.remat(lambda: x.sin())() * x)()
    return functx.remat(lambda t: x)(y)


def left_behind(x):
    """A hidden state that becomes a further result."""
    aux = []
    out = functx.remat(lambda x: (aux.append(x.sin()), plain(x))[1])(x)
    return out * aux.pop()


BODIES = {
    "plain": functx.remat(plain),
    "nested": functx.remat(lambda x: functx.remat(plain)(functx.remat(plain)(x))),
    "recursive": recursive,
    "rebound": rebound,
    "handed back": lambda x: torch.mul(*functx.remat(lambda x: (x.exp(), x))(x)),
    "captured": lambda x: (lambda w: functx.remat(lambda x: plain(x * w) * w)(x))(LEAF),
    "left behind": left_behind,
}


def failed(loss, x):
    with contextlib.suppress(ZeroDivisionError):
        functx.remat(lambda x: loss(x) / (1 // 0))(x.clone().requires_grad_())


WAYS = STACKS | {
    "dropped": lambda loss, x: loss(x.clone().requires_grad_()),
    "jvp": lambda loss, x: functx.jvp(loss, (x,), (x,)),
    "failed": failed,
}


def live_after(way, f):
    with Operations() as operations:
        with contextlib.suppress(functx.RematError):  # where what is left behind is refused
            WAYS[way](lambda x: f(x).sum(), SQUARE)
        return operations.live


@pytest.mark.parametrize("kind", BODIES)
def test_no_storage_is_left_without_the_garbage_collector(kind):
    for way in WAYS:  # what torch makes and imports at a first call
        live_after(way, BODIES[kind])
    with no_garbage_collection():
        left = {way: live_after(way, BODIES[kind]) for way in WAYS}
    assert not any(left.values()), f"bytes left: {left}"


@pytest.mark.parametrize("way", ["grad", "double backward", "vjp"])
def test_functions_and_arguments_are_let_go(way):
    class Argument:
        pass

    def run(alive):
        argument = Argument()
        f = lambda x, argument=argument: plain(x) if argument else x
        alive += [weakref.ref(argument), weakref.ref(f)]
        region = functx.remat(f)
        STACKS[way](lambda x: region(x).sum(), SQUARE)

    run([])
    with no_garbage_collection():
        run(alive := [])
        assert [ref() for ref in alive] == [None, None]


def test_inputs_go_with_the_backward():
    with no_garbage_collection(), Operations() as operations:
        x = SQUARE.clone().requires_grad_()
        h = x * 2
        alive = weakref.ref(h)
        value = functx.remat(plain)(h).sum()
        del h
        value.backward()
        assert alive() is None
        x.grad = None
        del x, value
        assert operations.live == 0


def test_many_steps_leave_no_objects():
    shared = functx.remat(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()).double())
    x = numbers(2, 3)

    def steps(n):
        for i in range(n):
            scale = numbers(3, start=float(i % 7)).requires_grad_()
            fresh = functx.remat(lambda x, scale=scale: x.sin() * scale)
            fresh(shared(x)).sum().backward()
            if i % 10 == 0:
                functx.vmap(functx.grad(lambda x, fresh=fresh: fresh(x).sum()))(x)
                fresh(x)
            shared.zero_grad()
        gc.collect()
        return len(gc.get_objects())

    before = steps(20)
    assert steps(60) - before < 30
