"""Results that a region's own pullback reads: what a second derivative brings them is looked at."""

import functools
import gc
import weakref

import pytest
import torch
from cases import numbers
from programs import identity

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12, equal_nan=True)
X, W = numbers(3, 4), numbers(4, 4, start=0.3)


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


def inner_region(x):
    return functx.remat(lambda x: torch.tanh(x @ W))(x)


BODIES = {
    "tanh": lambda x: torch.tanh(x @ W),
    "exp": torch.exp,
    "infinite where it is zero": lambda x: torch.sqrt(x * x * (x > 0.5) + (x <= 0.5)),
    "softmax": lambda x: torch.softmax(x @ W, -1),
    "relu": lambda x: torch.relu(x @ W),
    "not read": torch.sin,
    "a region inside": inner_region,
    "more than a region inside": lambda x: inner_region(x) * 1,
    "a view": lambda x: torch.tanh(x @ W)[:2],
}


def hook(y, seen):
    y.register_hook(lambda g: seen.append(g.clone()))


def changing_hook(y, seen):
    y.register_hook(lambda g: g * 2)


def on_the_node(y, seen):
    y.grad_fn.register_prehook(lambda gs: seen.extend(g.clone() for g in gs))


def retained(y, seen):
    y.retain_grad()


def nothing(y, seen):
    pass


def summed(x, y, gx):
    (gx.pow(2).sum() + y.sum()).backward()
    return [x.grad]


def alone(x, y, gx):
    gx.pow(2).sum().backward()
    return [x.grad]


def asked(x, y, gx):
    return torch.autograd.grad(gx.pow(2).sum() + y.sum(), y)


def asked_alone(x, y, gx):
    return torch.autograd.grad(gx.pow(2).sum(), y, allow_unused=True)


def asked_both(x, y, gx):
    return torch.autograd.grad(gx.pow(2).sum(), (y, x), allow_unused=True)


def third(x, y, gx):
    (hx,) = torch.autograd.grad(gx.pow(2).sum(), x, create_graph=True)
    return torch.autograd.grad(hx.pow(2).sum() + y.sum(), (x, y))


def looked(remat, body, look, end):
    """What a second pass gives, and what is seen of the result in both."""
    x, seen = X.clone().requires_grad_(), []
    y = remat(body)(x)
    look(y, seen)
    (gx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    return *end(x, y, gx), *seen, y.grad if look is retained else None


ENDS = [summed, alone, asked, asked_alone, asked_both, third]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("look", [hook, changing_hook, on_the_node, retained, nothing])
@pytest.mark.parametrize("body", BODIES)
def test_all_that_comes_is_seen(body, look, end):
    """Hooks see it, and may change it; it is retained, and handed out."""
    same(looked(functx.remat, BODIES[body], look, end), looked(identity, BODIES[body], look, end))


def through_grad(remat):
    x, seen = X.clone().requires_grad_(), []

    def f(x):
        y = remat(BODIES["tanh"])(x)
        return y.pow(2).sum(), y

    gx, y = functx.grad(f, has_aux=True)(x)
    hook(y, seen)
    (gx.pow(2).sum() + y.sum()).backward()
    return x.grad, *seen


def inside_of_grad(remat):
    def f(x):
        y = remat(BODIES["tanh"])(x)
        (gx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(gx.pow(2).sum() + y.sum(), y, create_graph=True)[0].sum()

    return functx.grad(f)(X), functx.vmap(functx.grad(f))(X)


def batched(remat):
    x = X.clone().requires_grad_()
    y = remat(BODIES["tanh"])(x)
    basis = torch.eye(12, dtype=x.dtype).view(12, 3, 4)
    (jacobian,) = torch.autograd.grad(y, x, basis, is_grads_batched=True, create_graph=True)
    return torch.autograd.grad(jacobian.pow(2).sum(), (x, y))


def chain(remat):
    x, seen = X.clone().requires_grad_(), []
    h = x
    for body in ("tanh", "exp", "softmax", "relu", "a region inside"):
        h = remat(BODIES[body])(h)
        hook(h, seen)
    (gx,) = torch.autograd.grad(h.pow(2).sum(), x, create_graph=True)
    (gx.norm() - 1).pow(2).backward()
    return x.grad, *seen


def gone_later(remat):
    """The loss goes before the second pass, and the result with it."""
    x, seen = X.clone().requires_grad_(), []

    def loss():
        y = remat(BODIES["tanh"])(x)
        hook(y, seen)
        return (y * y).sum()

    (gx,) = torch.autograd.grad(loss(), x, create_graph=True)
    gx.pow(2).sum().backward()
    return x.grad, *seen


@pytest.mark.parametrize("program", [through_grad, inside_of_grad, batched, chain, gone_later])
def test_in_other_surroundings(program):
    same(program(functx.remat), program(identity))


def nobody_holds_it(x, seen, body):
    def loss():
        y = functx.remat(body)(x)
        hook(y, seen)
        return (y * 2).sum()

    (gx,) = torch.autograd.grad(loss(), x, create_graph=True)
    gx.pow(2).sum().backward()


def test_what_cannot_be_handed_on_is_an_error():
    """The result has gone before the first pass; or it comes right from a custom Function."""
    x = X.clone().requires_grad_()
    with pytest.raises(functx.RematError, match="nobody has held the result"):
        nobody_holds_it(x, [], BODIES["tanh"])
    for look in (hook, retained):
        with pytest.raises(functx.RematError, match="from a custom Function"):
            looked(functx.remat, Exp.apply, look, alone)


@pytest.mark.parametrize("body", [torch.sin, torch.relu])
def test_what_cannot_be_handed_on_and_is_zero_is_none(body):
    """No more than one that is not read."""
    x, seen = X.clone().requires_grad_(), []
    nobody_holds_it(x, seen, body)
    assert len(seen) == 1
    wanted = X.clone().requires_grad_()
    (g,) = torch.autograd.grad((body(wanted) * 2).sum(), wanted, create_graph=True)
    same(x.grad, torch.autograd.grad(g.pow(2).sum(), wanted)[0])


def test_results_are_not_kept_by_it():
    """The node of a pullback has an edge to a result, which nobody else holds."""
    x = X.clone().requires_grad_()
    y = functx.remat(torch.exp)(x)
    (gx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    known = weakref.ref(y)
    del y
    gc.collect()
    assert known() is None
    same(torch.autograd.grad(gx.sum(), x)[0], X.exp())


def two(x):
    h = x.exp()
    return h, h.tanh()


def test_a_hook_on_a_node_that_results_share_is_refused():
    """It would see what comes to the first from outside alone."""
    x = X.clone().requires_grad_()
    h, y = functx.remat(two)(x)
    h.grad_fn.register_prehook(lambda gs: None)
    h.sum().backward(retain_graph=True)
    with pytest.raises(functx.RematError, match="the node that they share has a hook"):
        (h.sum() + y.sum()).backward()
