"""Second derivatives that come to results of regions under forward mode: right, or an error."""

import functools

import pytest
import torch
from cases import numbers
from programs import identity
from torch.autograd import forward_ad

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
X, T = numbers(4), numbers(4, start=1.0)
BODIES = {
    "tanh": lambda remat, x: x.tanh(),
    "exp": lambda remat, x: x.exp(),
    "softmax": lambda remat, x: torch.softmax(x * 2, -1),
    "a region inside": lambda remat, x: remat(torch.tanh)(x),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_gradient_inside_of_forward_mode_asks_for_a_result(body):
    """The level of forward mode is around that of the gradient."""

    def program(remat):
        def f(x):
            y = remat(functools.partial(BODIES[body], remat))(x)
            (gx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
            return torch.autograd.grad(gx.pow(2).sum() + y.sum(), y, create_graph=True)[0].sum()

        return functx.jvp(functx.grad(f), (X,), (T,))

    same(program(functx.remat), program(identity))


def hook(t, seen):
    t.register_hook(lambda g: seen.append(forward_ad.unpack_dual(g).primal))


def retain(t, seen):
    t.retain_grad()


def nothing(t, seen):
    pass


def summed(x, y, gx):
    (gx.pow(2).sum() + y.sum()).backward()
    return []


def asked(x, y, gx):
    return torch.autograd.grad(gx.pow(2).sum(), (y,), allow_unused=True)


def in_a_dual_level(remat, body, look, end):
    x, seen = X.clone().requires_grad_(), []
    with forward_ad.dual_level():
        y = remat(functools.partial(body, remat))(forward_ad.make_dual(x, T))
        look(y, seen)
        (gx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        found = [g for g in end(x, y, forward_ad.unpack_dual(gx).primal) if g is not None]
        found += [x.grad, y.grad if look is retain else None]
        return [*(forward_ad.unpack_dual(g).primal for g in found if g is not None), *seen]


@pytest.mark.parametrize("end", [summed, asked])
@pytest.mark.parametrize("look", [hook, retain, nothing])
@pytest.mark.parametrize("body", [*BODIES, "not read", "a clone"])
def test_in_a_dual_level_of_the_users(body, look, end):
    more = {"not read": lambda _, x: x.sin(), "a clone": lambda _, x: x.tanh().clone()}
    body = {**BODIES, **more}[body]
    expected = in_a_dual_level(identity, body, look, end)
    if body in more.values() or (look is nothing and end is summed):
        same(in_a_dual_level(functx.remat, body, look, end), expected)
    else:
        with pytest.raises(functx.RematError, match=r"somebody looks at that: .*result\.clone"):
            in_a_dual_level(functx.remat, body, look, end)


def around_forward_mode(remat, body, of, look):
    """What is looked at is known outside of the level of forward mode, and computed inside."""

    def outer(x):
        def forward(x):
            def inner(x):
                y = remat(body)(x)
                return y.pow(2).sum(), y

            g, y = functx.grad(inner, has_aux=True)(x)
            return (g, y), y

        (g, _), (tg, ty), y = functx.jvp(forward, (x,), (T,), has_aux=True)
        looked_at = {"tangent": ty, "primal": y}[of]
        if look == "asked":
            asked = torch.autograd.grad(
                tg.pow(2).sum(), looked_at, create_graph=True, allow_unused=True
            )
            return g.sum(), asked
        seen = []
        looked_at.register_hook(lambda g: seen.append(g) or g * 2)
        del looked_at, ty, y
        return (g.pow(2) + tg.pow(2)).sum(), None

    return functx.grad(outer, has_aux=True)(X)


@pytest.mark.parametrize("look", ["asked", "hook"])
@pytest.mark.parametrize("of", ["primal", "tangent"])
def test_around_forward_mode(of, look):
    for body in (torch.sin, lambda x: x.tanh().clone()):
        same(
            around_forward_mode(functx.remat, body, of, look),
            around_forward_mode(identity, body, of, look),
        )
    with pytest.raises(functx.RematError, match="has a tangent, and somebody looks"):
        around_forward_mode(functx.remat, torch.exp, of, look)
