"""Hooks on what regions read: called when and with what they are without remat."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


def program(remat, how, pulled, nested=False):
    """Two results, of which one depends on a tensor with a hook; what the hook was called with."""
    x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
    seen = []

    def loss(x, w):
        h, other = x.sin(), w.cos()
        h.register_hook(lambda g: seen.append(g.detach().clone()) or g * 1.5)
        if how == "argument":
            region = remat(lambda h, other: (h.exp() * other, other.tanh(), h))
            outs = region(h, other)
        elif how == "capture":
            outs = remat(lambda: (h.exp() * other, other.tanh(), h))()
        else:
            outs = remat(lambda: (remat(lambda: h.exp() * other)(), remat(other.tanh)(), h))()
        if nested:
            outs = remat(lambda a, b: (a * 2, b.sin()))(*outs[:2])
        return sum(outs[i].sin().sum() for i in pulled)

    return x, w, seen, loss


@pytest.mark.parametrize("how", ["argument", "capture", "nested"])
@pytest.mark.parametrize("pulled", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", ["plain", "retained", "grad", "vmap(grad)", "grad(grad)"])
def test_a_hook_is_called_where_a_gradient_comes_by(how, pulled, nested, way):
    """Not where only results are pulled back that do not depend on its tensor."""

    def run(remat):
        x, w, seen, loss = program(remat, how, pulled, nested)
        if way == "plain":
            grads = torch.autograd.grad(loss(x, w), (x, w), allow_unused=True)
        elif way == "retained":
            y = loss(x, w)
            grads = torch.autograd.grad(y, (x, w), allow_unused=True, retain_graph=True)
            grads += torch.autograd.grad(y, (x, w), allow_unused=True)
        else:
            x, w = x.detach(), w.detach()
            f = functx.grad(loss, argnums=(0, 1))
            if way == "vmap(grad)":
                grads = functx.vmap(f)(torch.stack([x, x]), torch.stack([w, w * 2]))
                return len(seen), grads
            if way == "grad(grad)":
                grads = functx.grad(lambda x, w: sum(g.sin().sum() for g in f(x, w)), (0, 1))(x, w)
            else:
                grads = f(x, w)
            return len(seen), grads
        return seen, [torch.zeros(()) if g is None else g for g in grads]

    (seen, grads), (expected, gradients) = run(functx.remat), run(identity)
    if isinstance(seen, list):
        assert_same(seen, expected, eps=8)
    elif way != "grad(grad)":  # where a replay has its own
        assert seen == expected
    assert_same(list(grads), list(gradients), eps=16)


def test_results_share_a_node_where_no_hook_tells_them_apart():
    """A second node is a second replay."""
    x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
    body = functx.remat(lambda h, other: (h.exp() * other, other.tanh()))
    a, b = body(x * 1.0, w)
    assert a.grad_fn is b.grad_fn
    hooked = x * 1.0
    hooked.register_hook(lambda g: g)
    a, b = body(hooked, w)
    assert a.grad_fn is not b.grad_fn
    both = functx.remat(lambda h, other: (h.exp() * other, (other * h).tanh()))
    a, b = both(hooked, w)
    assert a.grad_fn is b.grad_fn


def test_a_hook_on_a_result_that_closes_over_what_the_region_made():
    """Fixed points are differentiated so (deep equilibrium models)."""

    def run(remat):
        w = torch.linspace(-0.5, 0.5, 9, dtype=torch.float64).reshape(3, 3).requires_grad_()
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()

        def body(x):
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(20):
                    z = torch.tanh(z @ w + x)
            z = torch.tanh(z @ w + x)
            z0 = z.detach().requires_grad_()
            f0 = torch.tanh(z0 @ w + x)

            def solve(g):
                u = g
                for _ in range(20):
                    u = torch.autograd.grad(f0, z0, u, retain_graph=True)[0] + g
                return u

            z.register_hook(solve)
            return z

        remat(body)(x).square().sum().backward()
        return x.grad, w.grad

    assert_same(run(functx.remat), run(identity), eps=8)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_hook_around_a_nest_whose_regions_are_given_what_was_computed(depth):
    """Which input a result depends on is seen through regions that split nothing by themselves."""

    def sines(a, b):
        return a.sin(), b.cos()

    def around(remat, f):
        def computed(a, b):
            p, q = remat(f)(a * 2, b * 3)
            return p * 2, q * 3

        return computed

    def called(remat):
        f, seen = sines, []
        for _ in range(depth):
            f = around(remat, f)
        x, w = numbers(3).requires_grad_(), numbers(3, start=1.0).requires_grad_()
        for name, t in (("x", x), ("w", w)):
            t.register_hook(lambda g, name=name: seen.append((name, g)))
        p, q = remat(f)(x, w)
        for loss in (p.sum(), q.sum()):
            loss.backward(retain_graph=True)
        return seen, x.grad, w.grad

    assert_same(called(functx.remat), called(identity))


def node_hook(t, called):
    t.grad_fn.register_prehook(lambda gs: called.append(gs[0].clone()))


def node_hook_after(t, called):
    t.grad_fn.register_hook(lambda inputs, outputs: called.append(outputs[0].clone()))


def tensor_hook(t, called):
    t.register_hook(lambda g: called.append(g.clone()) or g * 3)
    t.register_hook(lambda g: called.append(g.clone())).remove()


@pytest.mark.parametrize("pulled", [0, 1])
@pytest.mark.parametrize("way", ["plain", "grad"])
def test_a_hook_on_one_of_the_results_of_a_region_is_called_for_that(way, pulled):
    """They share a node, whose hooks the engine calls with ``None`` where nothing flows."""

    def run(remat):
        called, x = [], numbers(3).requires_grad_()

        def f(x):
            ys = remat(lambda x: (x.exp(), x.sin()))(x)
            tensor_hook(ys[0], called)
            return (ys[pulled] * 2).sum()

        if way == "plain":
            return *torch.autograd.grad(f(x), x), called
        return functx.grad(f)(x.detach()), len(called)

    assert_same(run(functx.remat), run(identity), eps=8)


@pytest.mark.parametrize("look", [tensor_hook, node_hook, node_hook_after])
@pytest.mark.parametrize("one", [0, 1])
def test_a_hook_on_a_result_is_not_called_by_gradients_that_do_not_read_it(look, one):
    """The gradient of an exponent reads the power, that of the base does not."""

    def run(remat):
        called = []
        a, b = numbers(3).exp().requires_grad_(), numbers(3, start=1.0).requires_grad_()
        y = remat(torch.pow)(a, b)
        look(y, called)
        gradients = torch.autograd.grad(y.sum(), (a, b), create_graph=True)
        return torch.autograd.grad(gradients[one].sum(), (a, b)), called

    assert_same(run(functx.remat), run(identity), eps=16)
