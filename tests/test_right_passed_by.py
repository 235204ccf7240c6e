"""Hooks on results of a region in backward passes that ask for some gradients only.

Without remat the engine comes by a result where something that is asked for lies below it.
"""

import itertools

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch.autograd.graph import register_multi_grad_hook

import functx

INPUTS = ("x", "w", "v")
ASKED = [those for n in (1, 2, 3) for those in itertools.combinations((*INPUTS, "a", "b", "c"), n)]


def flat(x, w, v, hang, remat):
    a = x.sin()
    b = w * a
    c = v.cos()
    hang(a, b, c)
    return a * 2, b + 1, c * 3


def inside(x, w, v, hang, remat):
    """Two of the results come from one region inside, by one node; what is above it is not seen."""
    a, c = remat(lambda: (x.sin(), v.cos()))()
    b = w * a
    hang(a, c)
    return a * 2, b + 1, c * 3


BODIES = {"flat": flat, "inside": inside}


def called(remat, body, asked, how, within, times=1):
    """Which hooks are called, with the gradients; of code that has run so often."""
    for _ in range(times):
        calls = []
        x, w, v = (numbers(3, start=k).requires_grad_() for k in range(3))

        def hook(name, calls=calls):
            return lambda g: calls.append(name)

        def hang(*those, hook=hook):
            for n, t in enumerate(those if within else ()):
                t.register_hook(hook(f"inside {n}"))

        ys = remat(lambda x, w=w, v=v, hang=hang: BODIES[body](x, w, v, hang, remat))(x)
        for n, y in enumerate(ys):
            y.register_hook(hook(n))
        there = lambda gs, calls=calls: calls.append([g is not None for g in gs])  # noqa: E731
        register_multi_grad_hook(ys, there)
        loss = sum((y * y).sum() * (n + 1) for n, y in enumerate(ys))
        known = dict(zip((*INPUTS, "a", "b", "c"), (x, w, v, *ys)))
        inputs = [known[name] for name in asked]
        if how == "backward":
            loss.backward(inputs=inputs)
            gradients = [t.grad for t in inputs]
        else:
            create = how == "create_graph"
            gradients = torch.autograd.grad(loss, inputs, create_graph=create)
    # Those inside of a region are called in a replay, after those on results.
    outer = [c for c in calls if not isinstance(c, str)]
    return outer, sorted(c for c in calls if isinstance(c, str)), gradients


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("how", ["grad", "backward", "create_graph"])
@pytest.mark.parametrize("within", [False, True])
def test_hooks_are_called_where_the_engine_would_come_by(body, how, within):
    """And one on several results waits for those alone."""
    for asked in ASKED:
        for times in (1, 6) if body == "flat" and not within else (1,):
            ours = called(functx.remat, body, asked, how, within, times)
            assert_same(ours, called(identity, body, asked, how, within, times), eps=16)


def test_in_transforms():
    """``vmap(grad)`` asks for some arguments; what is closed over is asked for outside."""

    def run(remat, transform):
        calls, w = [], numbers(3).requires_grad_()

        def loss(x):
            ys = remat(lambda x: (x.sin() * w, w.cos(), x.exp()))(x)
            for n, y in enumerate(ys):
                if y.requires_grad:
                    y.register_hook(lambda g, n=n: calls.append(n))
            return sum(y.sum() * (n + 1) for n, y in enumerate(ys))

        f = functx.grad(loss)
        if transform == "vmap":
            f = functx.vmap(f)
        x = numbers(2, 3) if transform == "vmap" else numbers(3)
        g = f(x)
        return g, calls, torch.autograd.grad(g.sum(), w)

    for transform in ("grad", "vmap"):
        assert_same(run(functx.remat, transform), run(identity, transform), eps=16)


@pytest.mark.parametrize("made", [False, True])
def test_leaves_that_the_body_makes(made):
    """``backward()`` comes by what leads to them; a pass that asks for others does not."""

    def run(remat, inputs):
        calls, x = [], numbers(3).requires_grad_()

        def body(x):
            p = torch.ones(3, dtype=torch.float64).requires_grad_(made)
            return x.sin(), p.cos() * 2, x * p

        ys = remat(body)(x)
        for n, y in enumerate(ys):
            if y.requires_grad:
                y.register_hook(lambda g, n=n: calls.append(n))
        sum(y.sum() for y in ys).backward(inputs=[x] if inputs else None)
        return x.grad, calls

    for inputs in (False, True):
        assert_same(run(functx.remat, inputs), run(identity, inputs), eps=8)


def test_results_that_a_pullback_reads():
    """A gradient that depends on nothing else that is asked for; which one does, nobody knows."""

    def run(remat):
        calls = []
        x, v = (numbers(3, start=k).requires_grad_() for k in range(2))
        y, z = remat(lambda x: (x.exp(), v.sin()))(x)
        first = torch.autograd.grad((y + z).sum(), [x, v], create_graph=True)
        for n, g in enumerate(first):
            g.register_hook(lambda g, n=n: calls.append(n))
        found = torch.autograd.grad(sum(g.square().sum() for g in first), [y, v])
        return found, calls

    assert_same(run(functx.remat), run(identity), eps=16)
