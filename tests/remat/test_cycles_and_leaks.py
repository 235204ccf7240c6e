"""Nothing holds what a region used: no reference cycles, nothing after the backward."""

import contextlib
import gc
import weakref

import pytest
import torch
from cases import numbers
from references import Operations, no_garbage_collection
from torch import nn

import functx

SIZE = 16
X = numbers(SIZE, SIZE)
BYTES = X.numel() * X.element_size()
W = numbers(SIZE, SIZE, start=1.0) / 4


def plain(x):
    for _ in range(4):
        x = torch.tanh(x @ W)
    return x


def nested(x):
    return functx.remat(plain)(functx.remat(plain)(x))


def recursive(x):
    """Through the name of the region itself."""

    def f(x, n):
        return x.sin() if n == 0 else x.tanh() * functx.remat(f)(x.mean(), n - 1)

    return functx.remat(f)(x, 3)


def rebound(x):
    """``x = remat(lambda t: x)(y)``: a replay's copy of the function holds what ``x`` was."""
    y = x * 1.0
    x = functx.remat(lambda t: x * t)(y)
    x = functx.remat(lambda: functx.remat(lambda: x.sin())() * x)()
    return functx.remat(lambda t: x)(y)


def handed_back(x):
    out, same = functx.remat(lambda x: (x.exp(), x))(x)
    return out * same


LEAF = W.clone().requires_grad_()


def captured(x):
    w = LEAF
    return functx.remat(lambda x: plain(x * w) * w)(x)


def left_behind(x):
    """A hidden state that becomes a further result."""
    aux = []

    def f(x):
        aux.append(x.sin())
        return plain(x)

    out = functx.remat(f)(x)
    return out * aux.pop()


BODIES = {
    "plain": functx.remat(plain),
    "nested": functx.remat(nested),
    **{
        f.__name__: f
        for f in (
            recursive,
            rebound,
            handed_back,
            captured,
            left_behind,
        )
    },
}


def backward(f):
    f(X.clone().requires_grad_()).sum().backward()


def dropped(f):
    f(X.clone().requires_grad_())


def double(f):
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    torch.autograd.grad(first.sum(), x)


def grad(f):
    functx.grad(lambda x: f(x).sum())(X)


def per_example(f):
    functx.vmap(functx.grad(lambda x: f(x[None]).sum()), randomness="different")(X)


def vjp(f):
    _, pullback = functx.vjp(lambda x: f(x), X)
    pullback(X)
    pullback(X)


def jvp(f):
    functx.jvp(f, (X,), (X,))


def failed(f):
    def g(x):
        f(x)
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        functx.remat(g)(X.clone().requires_grad_())


WAYS = [backward, dropped, double, grad, per_example, vjp, jvp, failed]


def live_after(way, f):
    with Operations() as operations:
        with contextlib.suppress(functx.RematError):  # where what is left behind is refused
            way(f)
        LEAF.grad = None
        return operations.live


@pytest.mark.parametrize("kind", BODIES)
def test_no_storage_is_left_without_the_garbage_collector(kind):
    for way in WAYS:  # what torch makes and imports at a first call
        live_after(way, BODIES[kind])
    with no_garbage_collection():
        left = {way.__name__: live_after(way, BODIES[kind]) for way in WAYS}
    assert not any(left.values()), f"bytes left: {left}"


@pytest.mark.parametrize("way", [grad, double, vjp], ids=lambda way: way.__name__)
def test_functions_and_arguments_are_let_go(way):
    class Argument:
        pass

    def run(alive):
        argument = Argument()

        def f(x, argument=argument):
            return plain(x) if argument else x

        alive += [weakref.ref(argument), weakref.ref(f)]
        way(functx.remat(f))

    run([])
    with no_garbage_collection():
        run(alive := [])
        assert [ref() for ref in alive] == [None, None]


def test_inputs_go_with_the_backward():
    with no_garbage_collection(), Operations() as operations:
        x = X.clone().requires_grad_()
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
