"""Hooks of a replay are bound to what those of the forward are. See `_bound`."""

import gc
import weakref

import pytest
import torch
from bound import BOUND, DEPTHS, OBJECTS, Settings, identity
from cases import numbers
from references import assert_same
from torch.autograd import grad

import functx


def on_tensor(h, hook):
    h.register_hook(hook)


def after_node(h, hook):
    h.grad_fn.register_hook(lambda inputs, _: None if (g := hook(inputs[0])) is None else (g,))


def before_node(h, hook):
    h.grad_fn.register_prehook(lambda outputs: None if (g := hook(outputs[0])) is None else (g,))


HANG = [on_tensor, after_node, before_node]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("hang", HANG)
@pytest.mark.parametrize("make", BOUND)
def test_what_a_hook_is_bound_to_in_the_forward(make, hang, depth):
    """That, whatever has changed since; and it reads what it reads when it is called."""

    def program(remat):
        settings = Settings()

        def f(x):
            h = x.sin()
            hang(h, make(settings))
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        settings.set(5.0)
        first = grad(y, x, retain_graph=True)
        settings.set(7.0)
        return first, grad(y, x)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("hang", HANG)
def test_a_variable_that_is_bound_again(hang, depth):
    """By the program, between the forward and the backward: hooks find it as it is then."""

    def program(remat):
        k = 2.0

        def f(x):
            h = x.sin()
            hang(h, lambda g: g * k)
            return h.exp()

        x, found = numbers(3).requires_grad_(), []
        y = depth(f)(remat)(x).sum()
        for i in range(3):
            k = float(i)
            found += grad(y, x, retain_graph=True)
        return found

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("hang", HANG)
def test_a_hook_that_counts(hang, depth, inside):
    """In a variable of the program's, or of the body's."""

    def program(remat):
        calls = 0

        def f(x):
            own = 0

            def hook(g):
                nonlocal calls, own
                calls += 1
                own += 1
                return g * (own if inside else calls)

            h = x.sin()
            hang(h, hook)
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        found = [grad(y, x, retain_graph=True) for _ in range(3)]
        return calls, found

    (called, ours), (calls, theirs) = program(functx.remat), program(identity)
    assert called == calls == 3
    assert_same(ours, theirs, eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("hang", HANG)
def test_a_hook_that_keeps_a_gradient(hang, depth):
    def program(remat):
        kept = None

        def f(x):
            def hook(g):
                nonlocal kept
                kept = g if kept is None else kept + g

            h = x.sin()
            hang(h, hook)
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        return kept, x.grad

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("hang", HANG[:1])
def test_another_hook_is_an_error(hang, depth):
    flag = [True]

    def f(x):
        h = x.sin()
        hang(h, (lambda g: g * 2) if flag[0] else (lambda g: g * 3))
        return h.exp()

    x = numbers(3).requires_grad_()
    y = depth(f)(functx.remat)(x).sum()
    flag[0] = False
    with pytest.raises(functx.ReplayError, match="where the forward hung another one"):
        grad(y, x)


def test_with_no_check_another_hook_is_called():
    flag = [True]

    def f(x):
        h = x.sin()
        h.register_hook((lambda g: g * 2) if flag[0] else (lambda g: g * 3))
        return h.exp()

    x = numbers(3).requires_grad_()
    y = functx.remat(f, determinism_check="none")(x).sum()
    flag[0] = False
    assert_same(grad(y, x), (3 * x.cos() * x.sin().exp(),), eps=64)


def test_what_a_hook_closes_over_of_the_forward_is_not_kept():
    """Only what the replay makes anew: an activation goes when the forward has run."""
    made = []

    def f(x):
        h = x.sin()
        both = {"k": 2.0, "h": h.detach().cos()}
        h2 = (h * 2).detach()
        h.register_hook(lambda g: g * both["h"] * h2)
        made.extend(map(weakref.ref, (both["h"], h2)))
        return h.exp()

    x = numbers(3).requires_grad_()
    y = functx.remat(f)(x).sum()
    assert [ref() for ref in made] == [None, None]
    assert_same(grad(y, x), grad(f(x).sum(), x), eps=64)


def test_what_a_hook_is_bound_to_goes_with_the_region():
    def run():
        w = torch.ones(3, dtype=torch.float64)
        there.append(weakref.ref(w))

        def f(x):
            h = x.sin()
            h.register_hook(lambda g: g * w)
            return h.exp()

        return functx.remat(f)(x).sum()

    there, x = [], numbers(3).requires_grad_()
    run().backward()
    run()  # dropped
    gc.collect()
    assert [ref() for ref in there] == [None, None]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("make", OBJECTS)
def test_an_object_with_other_numbers_is_an_error(make, depth):
    settings, x = Settings(), numbers(3).requires_grad_()

    def f(x):
        h = x.sin()
        h.register_hook(make(settings))
        return h.exp()

    y = depth(f)(functx.remat)(x).sum()
    assert_same(grad(y, x, retain_graph=True), grad(depth(f)(identity)(x).sum(), x), eps=64)
    settings.set(5.0)
    with pytest.raises(functx.ReplayError, match="where the forward hung another one"):
        grad(y, x)


@pytest.mark.parametrize("make", OBJECTS)
def test_an_object_of_the_programs_may_change(make):
    def program(remat):
        settings, x = Settings(), numbers(3).requires_grad_()
        hook = make(settings)

        def f(x):
            h = x.sin()
            h.register_hook(hook)
            return h.exp()

        y = remat(f)(x).sum()
        getattr(hook, "__self__", hook).k = 5.0
        return grad(y, x)

    assert_same(program(functx.remat), program(identity), eps=64)
