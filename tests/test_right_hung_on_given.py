"""Hooks that a body hangs on what it did not make: on that itself, once. See `_hung_on_given`."""

import gc
import weakref

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch.autograd.graph import register_multi_grad_hook

import functx

HOW = ("argument", "capture", "global", "attribute", "nested", "twice", "nested capture")
HELD = {}


class Box:
    pass


def region(remat, how, t, body):
    """``body(t)`` as a region that is given ``t`` in some way."""
    if how == "argument":
        return remat(body)(t)
    if how == "capture":
        return remat(lambda: body(t))()
    if how == "global":
        HELD["t"] = t
        return remat(lambda: body(HELD["t"]))()
    if how == "attribute":
        box = Box()
        box.t = t
        return remat(lambda box: body(box.t))(box)
    if how == "nested":
        return remat(lambda t: remat(body)(t) * 2)(t)
    if how == "nested capture":
        return remat(lambda: remat(lambda: body(t))().sin())()
    return remat(lambda t, again: body(again) + t.sum())(t, t)


def program(remat, how, hook, *, leaf=False, before=False):
    """A tensor that a region hangs a hook on, and that is used outside of it as well."""

    def loss(x):
        t = x if leaf else x * 2
        if before:
            t.register_hook(lambda g: g * 0.5)

        def body(t):
            t.register_hook(hook)
            return (t.sin() * t).sum()

        y = region(remat, how, t, body)
        if before:
            t.register_hook(lambda g: g + 0.25)
        return y + (t * t * 5).sum()

    return loss


WAYS = {
    "backward": lambda f, x: backward(f, x),
    "grad": lambda f, x: functx.grad(f)(x),
    "vmap(grad)": lambda f, x: functx.vmap(functx.grad(f))(torch.stack([x, x * 2])),
    "grad(grad)": lambda f, x: functx.grad(lambda x: functx.grad(f)(x).sin().sum())(x),
    "jvp(grad)": lambda f, x: functx.jvp(functx.grad(f), (x,), (x.cos(),)),
    "create_graph": lambda f, x: create_graph(f, x),
}


def backward(f, x):
    x = x.clone().requires_grad_()
    f(x).backward()
    return x.grad


def create_graph(f, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(g.sin().sum(), x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
def test_it_is_given_all_of_the_gradient(way, how, before, leaf):
    """It clamps: a part of the gradient clamped, and the rest, is another sum."""

    def run(remat):
        seen = []

        def hook(g):
            seen.append(1)
            return g.clamp(-4, 4) * g

        f = program(remat, how, hook, leaf=leaf, before=before)
        return WAYS[way](f, numbers(4)), len(seen)

    (found, calls), (expected, count) = run(functx.remat), run(identity)
    assert_same(found, expected, eps=256)
    assert calls == count


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_what_it_closes_over(way):
    """Something that the region made, which has left it: with its gradient."""

    def run(remat):
        def loss(x):
            t = x.cos()

            def body(t):
                h = t.exp()
                t.register_hook(lambda g: g * h)
                return (h * t).sum()

            return remat(body)(t) + t.square().sum()

        return WAYS[way](loss, numbers(3)), create_graph(loss, numbers(3))

    assert_same(run(functx.remat), run(identity), eps=16)


def test_a_handle_takes_it_off():
    for when in ("inside", "outside", "never"):

        def run(remat, when=when):
            x, seen, handles = numbers(3).requires_grad_(), [], []
            t = x * 2

            def body(t):
                handles.append(t.register_hook(lambda g: seen.append(1) or g * 3))
                if when == "inside":
                    handles.pop().remove()
                return t.sin().sum()

            y = remat(body)(t) + t.sum()
            if when == "outside":
                handles.pop().remove()
            y.backward()
            return x.grad, len(seen)

        (found, calls), (expected, count) = run(functx.remat), run(identity)
        assert_same(found, expected, eps=8)
        assert calls == count == (when == "never")


def test_twice_and_with_a_retained_graph():
    def run(remat):
        x, seen = numbers(3).requires_grad_(), []
        t = x * 2

        def body(t):
            t.register_hook(lambda g: seen.append(g.clone()))
            return t.sin()

        y = (remat(body)(t) + remat(body)(t) * t).sum()
        y.backward(retain_graph=True)
        y.backward()
        return x.grad, seen

    assert_same(run(functx.remat), run(identity), eps=8)


def test_after_a_parameter_has_its_gradient():
    """``register_post_accumulate_grad_hook``: a step of the optimizer inside the backward."""

    def run(remat):
        layer = torch.nn.Linear(3, 3, dtype=torch.float64)
        torch.nn.init.constant_(layer.weight, 0.1)
        torch.nn.init.constant_(layer.bias, 0.1)
        seen = []

        def body(x):
            layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
            return layer(x).sin()

        x = numbers(2, 3)
        (remat(body)(x).sum() + layer.weight.square().sum()).backward()
        return layer.weight.grad, seen

    assert_same(run(functx.remat), run(identity), eps=8)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_one_of_several_tensors_is_refused(mode):
    x = numbers(3).requires_grad_()

    def body(x):
        h = x.sin()
        register_multi_grad_hook((x, h), lambda g: None, mode=mode)
        return h.sum()

    with pytest.raises(functx.RematError, match=r"register_multi_grad_hook .* did not make"):
        functx.remat(body)(x)
    assert not x._backward_hooks


def test_a_gradient_inside_is_refused():
    x = numbers(3).requires_grad_()

    def body(x):
        x.register_hook(lambda g: g * 2)
        (g,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return g.sum()

    with pytest.raises(functx.RematError, match=r"takes a gradient with respect to that"):
        functx.remat(body)(x)


def test_what_has_no_gradient_is_refused_as_by_torch():
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        functx.remat(lambda x: x.register_hook(print) and x)(numbers(3))


@pytest.mark.parametrize("after", [False, True])
def test_what_was_written_to_is_the_regions(after):
    def run(remat):
        x = numbers(3).requires_grad_()
        t = x * 2

        def body(t):
            t.mul_(3)
            t.register_hook(lambda g: g.clamp(-0.5, 0.5) * 3)
            return t.sin().sum()

        y = remat(body)(t)
        (y + t.square().sum() if after else y).backward()
        return x.grad

    assert_same(run(functx.remat), run(identity), eps=8)


def test_what_was_captured_and_written_to_is_refused():
    t = numbers(3).requires_grad_() * 2

    def body():
        t.mul_(3)
        t.register_hook(lambda g: g * 3)
        return t.sin().sum()

    with pytest.raises(functx.RematError, match=r"writes in place .* hangs a hook on that"):
        functx.remat(body)()


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_to_require_grad_from_now_on(nested):
    def run(remat):
        x = numbers(3)

        def body(x):
            x.requires_grad_()
            x.register_hook(lambda g: g * 2)
            return x.sin().sum()

        (remat(lambda x: remat(body)(x) * 1) if nested else remat(body))(x).backward()
        return x.grad

    assert_same(run(functx.remat), run(identity), eps=8)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_loop(slots):
    """Replays of steps, several of one step, hang none either."""

    def run(loop):
        x, seen = numbers(3).requires_grad_(), []
        w = x * 2

        def step(c, scale):
            w.register_hook(lambda g: seen.append(1) or g.clamp(-1, 1) * g * scale)
            return (c * w).sin(), c

        y, _ = loop(step, numbers(3), numbers(6))
        (y.sum() + w.sum()).backward()
        return x.grad, len(seen)

    def plain(step, c, xs):
        for x in xs:
            c, _ = step(c, x)
        return c, None

    found = run(lambda step, c, xs: functx.remat_scan(step, c, xs, slots=slots))
    assert_same(found, run(plain), eps=64)


def test_nothing_is_left_behind():
    """When the tensor goes, so do its hook and what that closes over."""
    x = numbers(3).requires_grad_()
    gone = []
    for _ in range(2):
        t = x * 2

        def body(t):
            h = t.detach().exp()
            gone.append(weakref.ref(h))
            t.register_hook(lambda g: g * h)
            return (h * t).sum()

        (functx.remat(body)(t) + t.sum()).backward()
    del t, body
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
