"""What leaves a region otherwise than by return with a tangent: a result of it, or an error."""

import gc
import weakref

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch import nn
from torch.autograd import forward_ad

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X, V = numbers(4), numbers(4, start=2.0)
W = V.cos()


def appended(remat, x):
    aux = []

    def block(x):
        aux.append((x * W).sin())
        aux.append(aux[0].tanh())
        aux.append(x.detach() * 2)
        return aux[1].exp()

    return remat(block)(x).sum() + (aux[0] * aux[1] * V).sin().sum() + aux[2].sum()


def from_an_inner_region(remat, x):
    aux = []

    def inner(x):
        aux.append((x * W).sin())
        return aux[0].exp()

    out = remat(lambda x: remat(inner)(x.cos()).tanh())(x)
    return out.sum() + (aux[0] * V).sin().sum()


class WithLoss(nn.Module):
    def forward(self, x):
        h = torch.tanh(x * W)
        self.loss = h.square().sum()
        return h.exp()


def attribute(remat, x):
    module = WithLoss()
    region = remat(module)
    return region(x).sum() + 3 * region.loss + 2 * (region(x).sum() * region.loss)


def by_hook(remat, x):
    kept = []
    net = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    net[0].register_forward_hook(lambda module, args, out: kept.append(out))
    return remat(net)(x).sum() + (kept[0] * V).sin().sum()


def state(remat, x):
    """A recurrent state in a dict, which the next call reads."""
    kept = {"h": V.sin()}

    def step(x):
        kept["h"] = torch.tanh(kept["h"] * W + x)
        return kept["h"] * x

    region = remat(step)
    return sum(region(x).sum() for _ in range(3)) + kept["h"].sum()


def cache(remat, x):
    given = {}

    def block(x, given):
        given["k"] = nn.functional.linear(x[None], torch.outer(V, W))
        return given["k"].exp()

    out = remat(block)(x, given)
    out = remat(lambda x, given: x * given["k"])(out, given)
    return out.sum() + given["k"].sum()


def view(remat, x):
    aux = []

    def block(x):
        h = (x * W).sin()
        aux.append(h[1:])
        return h.exp()

    return remat(block)(x).sum() + (aux[0] * V[1:]).sin().sum()


def written(remat, x):
    aux = []

    def block(x):
        h = x * W
        aux.append(h)
        h.sin_()
        return h.exp()

    return remat(block)(x).sum() + (aux[0] * V).sin().sum()


def no_tangent(remat, x):
    aux = []

    def block(x):
        aux.append(V.sin())
        aux.append(x.sin())
        return aux[0] * x

    return remat(block)(x).sum() + (aux[0] * aux[1]).sin().sum()


def along(f, x, v=V):
    return functx.jvp(f, (x,), (v,))


def of_plain_autograd(f):
    x = X.clone().requires_grad_()
    value, tangent = along(f, x)
    return torch.autograd.grad(value + tangent.sin(), x)


def in_a_dual_level(f):
    with forward_ad.dual_level():
        return [*forward_ad.unpack_dual(f(forward_ad.make_dual(X.clone(), V)))]


WAYS = {
    "jvp": lambda f: along(f, X),
    "jacfwd": lambda f: functx.jacfwd(f)(X),
    "hessian": lambda f: functx.hessian(f)(X),
    "jvp of grad": lambda f: along(functx.grad(f), X),
    "grad of jvp": lambda f: functx.grad(lambda x: along(f, x)[1])(X),
    "jvp of jvp": lambda f: along(lambda x: along(f, x)[1], X, W),
    "vmap of jvp": lambda f: functx.vmap(lambda x: along(f, x))(torch.stack([X, W])),
    "backward of jvp": of_plain_autograd,
    "dual level": in_a_dual_level,
}
PROGRAMS = [
    *(appended, from_an_inner_region, attribute, by_hook, state, cache, view, written),
    no_tangent,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_as_without_remat(program, way):
    for _ in range(2):
        found, expected = (
            WAYS[way](lambda x, remat=remat: program(remat, x))
            for remat in (functx.remat, identity)
        )
        assert_same(found, expected, eps=32)


def two_views(x, aux):
    h = (x * W).sin()
    aux += [h[1:], h[:1]]
    return h.exp()


def returned_too(x, aux):
    aux.append((x * W).sin())
    return aux[0]


@pytest.mark.parametrize("body", [two_views, returned_too])
def test_others_are_refused(body):
    """One would be written to where the other is not."""
    aux = []
    with pytest.raises(functx.RematError, match=r"test_right_leaving_tangents\.py:\d+"):
        along(lambda x: functx.remat(lambda x: body(x, aux))(x).sum() + aux[0].sum(), X)


def test_nothing_is_held():
    aux = []

    def f(x):
        aux.clear()
        functx.remat(lambda x: aux.append(x.sin()) or x.cos())(x)
        return aux[0].sum()

    x = X.clone().requires_grad_()
    value, _ = along(f, x)
    left = weakref.ref(aux[0])
    value.backward()
    aux.clear()
    gc.collect()
    assert left() is None


def test_what_an_inner_level_leaves_is_refused():
    """Its level has ended within the body, and torch would say so by an internal assert."""
    aux = []

    def body(x):
        return functx.vmap(lambda row: (aux.append(row.sin()), row.cos())[1])(x)

    with pytest.raises(functx.RematError, match=r"test_right_leaving_tangents\.py:\d+"):
        along(lambda x: functx.remat(body)(x).sum(), X)
