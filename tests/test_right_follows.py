"""What a region has written to, and what it computes from that: who asks for which gradient."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch.autograd.graph import get_gradient_edge

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(3).requires_grad_()


def scaled(x):
    x.mul_(2)
    return x.exp()


def scaled_part(x):
    x[1:].mul_(2)
    return x.exp()


def nested(remat, body):
    return remat(lambda x: remat(body)(x))


def once(remat, body):
    return remat(body)


HOW = [once, nested]
ASKING = [
    lambda loss, z: torch.autograd.grad(loss, z, allow_unused=True),
    lambda loss, z: torch.autograd.grad(loss, z, materialize_grads=True),
    lambda loss, z: torch.autograd.grad(loss, get_gradient_edge(z), allow_unused=True),
    lambda loss, z: (loss.backward(inputs=[z]), z.grad)[1:],
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ask", ASKING)
@pytest.mark.parametrize("body", [scaled, scaled_part])
@pytest.mark.parametrize("use", [lambda y, z: y, lambda y, z: y + z])
def test_the_gradient_of_what_was_written_to_alone(how, ask, body, use):
    def asked(remat):
        z = X * 1
        y = how(remat, body)(z)
        return ask(use(y, z).sin().sum(), z)

    (found,) = asked(identity)
    assert found.abs().min() > 0
    with pytest.raises(functx.RematError, match="its gradient is"):
        asked(functx.remat)


@pytest.mark.parametrize("of", ["view", "whole"])
def test_a_view_that_was_written_to_and_its_whole(of):
    whole = X * 1
    view = whole[1:]
    y = functx.remat(scaled)(view)
    with pytest.raises(functx.RematError, match="its gradient is asked for"):
        torch.autograd.grad(y.sum(), view if of == "view" else whole, allow_unused=True)


def test_what_left_otherwise_than_by_return():
    def body(x):
        x.mul_(2)
        log.append(x.sin())

    log, z = [], X * 1
    functx.remat(body)(z)
    with pytest.raises(functx.RematError, match="its gradient is asked for"):
        torch.autograd.grad(log[0].sum(), z, allow_unused=True)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("asked", [0, 1])
def test_one_that_is_written_to_is_computed_from_another(swapped, asked):
    def gradients(remat):
        z = [X * 1, X * 2]

        def body(a, b):
            (b if swapped else a).mul_(2)
            (a if swapped else b).mul_(b if swapped else a)

        remat(body)(*z)
        first, last = z[swapped], z[not swapped]
        wanted = [first, last][asked]
        return torch.autograd.grad(last.sin().sum(), wanted, allow_unused=True)

    if asked:  # nothing of the region is between
        assert_same(gradients(functx.remat), gradients(identity))
    else:
        with pytest.raises(functx.RematError, match="its gradient is asked for"):
            gradients(functx.remat)


def chain(x):
    x.mul_(2)
    h = x.sin()
    return h, h.exp()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("look", ["ask", "hook", "retain"])
def test_a_result_that_another_one_is_computed_from(how, look):
    def looked(remat, use):
        seen, z = [], X * 1
        h, y = how(remat, chain)(z)
        loss = use(h, y).cos().sum()
        if look == "ask":
            return torch.autograd.grad(loss, h, allow_unused=True)
        h.register_hook(seen.append) if look == "hook" else h.retain_grad()
        (found,) = torch.autograd.grad(loss, X)
        return found, *seen, h.grad

    for use in (lambda h, y: y, lambda h, y: h + y):
        with pytest.raises(functx.RematError, match="computes another one"):
            looked(functx.remat, use)
    assert_same(looked(functx.remat, lambda h, y: h), looked(identity, lambda h, y: h))


@pytest.mark.parametrize("name", ["register_hook", "register_prehook"])
def test_a_hook_on_the_node_of_what_was_written_to(name):
    def called(remat, use):
        seen, z = [], X * 1
        y = remat(scaled)(z)
        getattr(z.grad_fn, name)(lambda *given: seen.append(given[-1][0]))
        (found,) = torch.autograd.grad(use(y, z).sum(), X)
        return found, *seen

    assert_same(called(functx.remat, lambda y, z: z), called(identity, lambda y, z: z))
    with pytest.raises(functx.RematError, match="its node has a hook"):
        called(functx.remat, lambda y, z: y)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("outside", [None, "hook", "retain", "ask", "changes"])
@pytest.mark.parametrize("factor", [None, 2])
def test_hooks_inside_and_outside(how, outside, factor):
    """As of a region that writes to nothing: `_hung_inside`."""

    def body(x):
        x.mul_(2)
        y = x.exp()
        y.register_hook(lambda g: g * factor if factor else None)
        return y

    def gradients(remat):
        seen, z = [], X * 1
        y = how(remat, body)(z)
        if outside == "ask":
            return torch.autograd.grad(y.sin().sum(), (y, X))
        if outside == "retain":
            y.retain_grad()
        elif outside is not None:
            y.register_hook(lambda g: g + 1 if outside == "changes" else seen.append(g))
        (found,) = torch.autograd.grad(y.sin().sum(), X)
        return found, *seen, y.grad

    expected = gradients(identity)
    if outside is None or (factor is None and outside != "changes"):
        assert_same(gradients(functx.remat), expected)
    else:
        with pytest.raises(functx.RematError, match="hangs a hook on a result"):
            gradients(functx.remat)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("look", ["ask", "hook", "retain"])
def test_a_second_derivative_that_flows_to_the_result(how, look):
    def second(remat):
        seen, z = [], X * 1
        y = how(remat, scaled)(z)
        (g,) = torch.autograd.grad(y.sum(), X, create_graph=True)
        if look == "ask":
            return torch.autograd.grad(g.square().sum(), (y, X))
        y.register_hook(seen.append) if look == "hook" else y.retain_grad()
        (found,) = torch.autograd.grad(g.square().sum(), X)
        return found, *seen, y.grad

    assert_same(second(functx.remat), second(identity), eps=16)


@pytest.mark.parametrize("use", [lambda y, z: y, lambda y, z: y * z.sin()])
def test_what_nobody_looks_at_is_right(use):
    def loss(x, remat):
        z = x * 1
        y = remat(scaled)(z)
        return use(y, z).sum()

    x = X.detach()
    mapped = functx.vmap(functx.grad(loss), (0, None))
    xs = torch.stack([x, x + 1])
    for f, given in ((functx.grad(loss), x), (functx.hessian(loss), x), (mapped, xs)):
        assert_same(f(given, functx.remat), f(given, identity), eps=64)


def test_compiled_autograd_is_given_zeros_to_add_up():
    def gradient(remat):
        x = X.detach().clone().requires_grad_()
        z = x * 1
        y = remat(scaled)(z)
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            (y + z).sum().backward()
        return x.grad

    assert_same(gradient(functx.remat), gradient(identity))


def test_a_region_after_it_has_one_node():
    """What follows is no result of a custom Function, whose backward is given zeros."""
    z = X * 1
    y = functx.remat(scaled)(z)
    a, b = functx.remat(lambda y, x: (y.sin(), x.cos()))(y, X)
    assert a.grad_fn is b.grad_fn
    assert y._version == 0


def reversed_(x, c):
    x.mul_(2)
    a = x.sin()
    return x.cos(), a


def later(x, c):
    x.mul_(2)
    return x.sin(), c.cos()


def earlier(x, c):
    a = c.sin()
    x.mul_(2)
    return a, x.cos()


def inside(x, c):
    c = c * 1
    return functx.remat(reversed_)(x, c)


@pytest.mark.parametrize("body", [reversed_, later, earlier, inside])
def test_hooks_on_results_are_called_by_when_these_were_made(body):
    def called(remat):
        seen, z = [], X * 1
        results = remat(body)(z, X)
        for n, r in enumerate(results):
            r.register_hook(lambda g, n=n: seen.append(n))
        sum(r.sum() for r in results).backward()
        return seen

    assert called(functx.remat) == called(identity)


def test_what_is_computed_from_the_last_write_to_another():
    """Whichever is written to first."""

    def body(a, b):
        a.mul_(1.5)
        b.mul_(2)
        a.mul_(b)

    a, b = X * 1, X * 2
    functx.remat(body)(a, b)
    with pytest.raises(functx.RematError, match="its gradient is asked for"):
        torch.autograd.grad(a.sum(), b, allow_unused=True)
