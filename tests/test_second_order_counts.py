"""Second derivatives of every composition: nothing is computed that a compiler would leave out.

What runs is compared with what dead-code elimination leaves of the same nested pullbacks, traced.
All that the forward gives is a result here: who runs a forward can't know what will be read.
"""

from collections import Counter

import pytest
import torch
from cases import numbers
from known import KNOWN
from programs import identity
from references import count
from sweeping import swept_but
from test_second_order import PROGRAMS, live_nodes
from torch.utils import _pytree as pytree

import functx
from bench.counts import programs

pytestmark = pytest.mark.usefixtures("forgotten")

X = numbers(3, 4)
W = [numbers(4, 4, start=i) for i in range(3)]


def layer(w, f):
    return lambda x: f(x @ w)


def chain(*functions):
    def f(x):
        for function in functions:
            x = function(x)
        return x

    return f


def mlp(f):
    return chain(*(layer(w, f) for w in W))


def apart(remat):
    def f(x):
        a, b = remat(lambda x: (x.sin(), x.exp()))(x)
        return a * b

    return f


NETWORKS = {
    "an MLP": lambda remat: remat(mlp(torch.sin)),
    "one of tanh": lambda remat: remat(mlp(torch.tanh)),
    "a region a layer": lambda remat: chain(*(remat(layer(w, torch.sin)) for w in W)),
    "regions in a region": lambda remat: remat(chain(*(remat(layer(w, torch.sin)) for w in W))),
    "two results": apart,
    "a quotient": lambda remat: remat(lambda x: x / x.exp().sum(-1, keepdim=True)),
    "attention": lambda remat: remat(lambda x: torch.softmax(x @ W[0], -1) @ W[1]),
    **{
        name: lambda remat, name=name: programs(torch.sin, remat)[name][2]
        for name in PROGRAMS
        if name in ("binomial, 4", "two regions of four")
    },
}


def gradient(f):
    return functx.value_and_grad(lambda x: f(x).sum())


def both(f):
    """The value and the sum of a gradient, as one number."""

    def g(x):
        value, found = gradient(f)(x)
        return value + found.sum()

    return g


def twice(f):
    """What it gives, as auxiliary data too."""

    def g(x):
        out = f(x)
        return out, out

    return g


def pulled(f):
    def g(x):
        value, pullback = functx.vjp(f, x)
        return value, pullback(value)

    return g


def pushed(f, v):
    return lambda x: functx.jvp(f, (x,), (v,))


COMPOSITIONS = {
    "grad(grad)": lambda f: functx.value_and_grad(both(f)),
    "jvp(grad)": lambda f: pushed(gradient(f), X * 2),
    "jvp(vjp)": lambda f: pushed(pulled(f), X * 2),
    "vmap(jvp(grad))": lambda f: functx.vmap(lambda x, v: pushed(gradient(f), v)(x), (0, None)),
    "jacfwd(grad)": lambda f: functx.jacfwd(twice(gradient(f)), has_aux=True),
    "jacrev(jacrev)": lambda f: functx.jacrev(functx.jacrev(f)),
    "jacrev(jacfwd)": lambda f: functx.jacrev(functx.jacfwd(f)),
    "grad(jvp)": lambda f: functx.value_and_grad(lambda x: sum(map(torch.sum, pushed(f, X)(x)))),
    "grad(vmap(grad))": lambda f: functx.value_and_grad(
        lambda x: sum(t.sum() for t in functx.vmap(gradient(f))(x))
    ),
    "vmap(grad(grad))": lambda f: functx.vmap(functx.value_and_grad(both(f))),
    "autograd, twice": lambda f: lambda x: twice_by_autograd(f, x),
}


def twice_by_autograd(f, x):
    x = x.detach().requires_grad_()
    value = f(x).sum()
    (found,) = torch.autograd.grad(value, x, create_graph=True)
    return torch.autograd.grad(value + found.sum(), x)


COMPUTED = ("sin", "cos", "exp", "tanh", "mm", "bmm", "tanh_backward", "_softmax", "div")


QUICK = ("an MLP", "regions in a region", "two results", "a quotient")


@pytest.mark.parametrize("name", swept_but(QUICK, NETWORKS))
@pytest.mark.parametrize("way", COMPOSITIONS)
def test_no_operation_more_than_a_compiler_leaves(name, way):
    """Than without regions, where forward mode makes zeros that a compiler knows."""

    def derivative(remat):
        return COMPOSITIONS[way](NETWORKS[name](remat))

    args = (X, X[0] * 2) if way.startswith("vmap(jvp") else (X,)

    def more(remat):
        f = derivative(remat)
        left = live_nodes(lambda *args: pytree.tree_leaves(f(*args)), *args)
        for run in range(KNOWN + 1):
            if 0 < run < KNOWN:
                f(*args)
                continue
            ran = count(f, *args)
            yield Counter({op: ran[op] - left.get(op, 0) for op in COMPUTED})

    plain = next(more(identity))
    for found in more(functx.remat):
        assert [op for op in COMPUTED if found[op] > plain[op]] == []
