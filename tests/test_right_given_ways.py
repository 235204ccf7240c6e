"""Containers that a region is given and changes: reached in two ways, through modules, freed."""

import collections
import threading
import weakref

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import assert_same
from right import freed, right_or_raises
from test_right_given import appends, number_of, sets
from test_right_leaving import WAYS, W, X
from torch import nn
from torch.func import functional_call

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


class Shared:
    """One container in several places of the arguments."""

    @staticmethod
    def twice(x, a, b):
        a.append(x.sin())
        return b[-1].cos()

    @staticmethod
    def inside(x, a, b):
        a["u"].append(x.sin())
        a["v"][1].append(a["u"][-1] * 2)
        b[0].append(x)
        return a["u"][1].cos() * len(a["u"])


@pytest.mark.parametrize("kind", ["twice", "inside"])
def test_one_that_is_given_twice(kind):
    def program(remat):
        c, x = [], X.clone().requires_grad_()
        if kind == "twice":
            out = remat(Shared.twice)(x, c, c)
        else:
            given = {"u": c, "v": (1, c)}
            out = remat(Shared.inside)(x, given, [c])
            assert given["u"] is c
            assert given["v"][1] is c
        loss = number_of(out, c)
        return [torch.autograd.grad(loss, x, retain_graph=True) for _ in range(2)], len(c)

    assert_same(program(functx.remat), program(identity), eps=64)


WAYS_TO_REACH = {}


def another_way(f):
    WAYS_TO_REACH[f.__name__] = f
    return f


@another_way
def closure(c):
    def f(x, given):
        given[0] = x.sin()
        return c[0].exp()

    return f


@another_way
def closure_writes(c):
    def f(x, given):
        c[0] = x.sin()
        return given[0].exp()

    return f


@another_way
def attribute(c):
    class Holder:
        def __init__(self):
            self.log = c

        def f(self, x, given):
            given[0] = x.sin()
            return self.read().exp()

        def read(self):
            return self.log[0]

    return Holder().f


@another_way
def of_a_module(c):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = c

        def forward(self, x, given):
            given[0] = x.sin()
            return self.log[0].exp()

    return Holder()


@another_way
def default(c):
    def f(x, given, c=c):
        given[0] = x.sin()
        return c[0].exp()

    return f


@another_way
def a_global(c):
    globals()["GLOBAL"] = c

    def f(x, given):
        given[0] = x.sin()
        return GLOBAL[0].exp()  # noqa: F821

    return f


@another_way
def called(c):
    def g(x):
        return c[0].exp() * x

    def f(x, given):
        given[0] = x.sin()
        return g(x)

    return f


@pytest.mark.parametrize("way", WAYS_TO_REACH)
def test_reached_in_another_way_too(way):
    def program(remat):
        c, x = [X * 2], X.clone().requires_grad_()
        loss = number_of(remat(WAYS_TO_REACH[way](c))(x, c), c)
        return torch.autograd.grad(loss, x)

    error = right_or_raises(program, match="in another way too", eps=64)
    assert __file__ in str(error)


def test_an_error_in_the_body_says_so_too():
    c = []

    def f(x, given):
        given.append(x.sin())
        return c[-1].exp()

    with pytest.raises(IndexError) as caught:
        functx.remat(f)(X.clone().requires_grad_(), c)
    assert "in another way too" in caught.value.__notes__[0]


def test_one_that_an_attribute_holds_as_well_but_the_code_does_not_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.losses = []

        def block(self, x, given):
            given.append(x.sin())
            return x.exp()

        def forward(self, x, remat):
            return remat(self.block)(x, self.losses)

    def program(remat):
        model, x = Model(), X.clone().requires_grad_()
        loss = number_of(model(x, remat), model.losses)
        return torch.autograd.grad(loss, x), len(model.losses)

    assert_same(program(functx.remat), program(identity), eps=64)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=DTYPE)

    def forward(self, x, losses, *, cache=None):
        h = self.linear(x)
        losses.append(h.square().mean())
        cache.setdefault("h", []).append(h)
        cache["calls"] = cache.get("calls", 0) + 1
        return h.sin() * cache["calls"]


def layered(module, x):
    losses, cache = [], {}
    y = module(module(x, losses, cache=cache), losses, cache=cache)
    assert cache["calls"] == len(losses) == len(cache["h"]) == 2
    return number_of(y, losses, cache)


@pytest.mark.parametrize("of", ["backward", "functional_call", "each example", "jacrev of grad"])
def test_of_a_module(of):
    def program(remat):
        layer = seeded(Layer)
        module = remat(layer)
        parameters = {k: p.detach() for k, p in layer.named_parameters()}

        def loss(p, x):
            return functional_call(Twice(module), {f"module.{k}": v for k, v in p.items()}, (x,))

        if of == "backward":
            return torch.autograd.grad(layered(module, X), [*layer.parameters()])
        if of == "functional_call":
            return functx.grad(loss)(parameters, X)
        if of == "each example":
            return functx.vmap(functx.grad(loss), (None, 0))(parameters, X)
        return functx.jacrev(functx.grad(loss))(parameters, X[0])

    assert_same(program(functx.remat), program(identity), eps=256)


class Twice(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return layered(self.module, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    def program(checkpoint):
        c, x = [], X.clone().requires_grad_()
        y = checkpoint(appends, checkpoint(appends, x, W, c), W, c)
        loss = number_of(y, c)
        return [torch.autograd.grad(loss, x, retain_graph=True) for _ in range(2)], len(c)

    def checkpointed(f, *args):
        return functx.checkpoint(f, *args, use_reentrant=reentrant)

    assert_same(program(checkpointed), program(lambda f, *args: f(*args)), eps=64)


def test_keyword_arguments_are_the_calls_own():
    """As Python makes them: what the body adds to them nobody sees."""

    def f(x, **more):
        more["h"] = x.sin()
        return more["h"] * more["by"]

    mine, x = {"by": X}, X.clone().requires_grad_()
    functx.remat(f)(x, **mine).sum().backward()
    assert_same(x.grad, x.cos() * X, eps=4)
    assert [*mine] == ["by"]


def test_what_it_appends_and_stores_elsewhere_is_one_tensor():
    stored, c = [], []

    def f(x, c):
        parts = [x.sin()]
        c.append(parts)
        stored.append(parts)
        stored.append(parts[0])
        return parts[0].exp()

    functx.remat(f)(X.clone().requires_grad_(), c)
    assert c[0] is stored[0]
    assert c[0][0] is stored[1]


def test_a_replay_that_changes_it_otherwise():
    times = [2, 3]

    def f(x, c):
        c += [x.sin()] * 1 + [x.cos() for _ in range(1)][: times[0] - 1]
        return x.exp()

    c, x = [], X.clone().requires_grad_()
    y = functx.remat(f)(x, c)
    times[0] = 1
    with pytest.raises(functx.ReplayError):
        (y.sum() + c[0].sum()).backward()


def test_a_budget_is_refused():
    c = []
    with pytest.raises(functx.RematError, match="changes a list or a dict that it is given"):
        functx.remat(appends, budget=1.0)(X.clone().requires_grad_(), W, c)


class Log(collections.OrderedDict):
    """Registered as a container; functx can't know how it is to be changed."""


torch.utils._pytree.register_pytree_node(
    Log, lambda c: ([*c.values()], [*c]), lambda values, keys: Log(zip(keys, values))
)


def test_a_container_of_an_unknown_class():
    c = Log(a=X)
    with pytest.raises(functx.RematError, match="Log"):
        functx.remat(sets)(X.clone().requires_grad_(), W, c)
    given = Log(a=X)
    y = functx.remat(lambda x, c: (x.sin() * c["a"], c))(X.clone().requires_grad_(), given)
    assert y[1] is given


@pytest.mark.parametrize("way", ["backward", "grad", "vmap of grad", "grad of grad"])
def test_nothing_keeps_it_alive(way):
    refs = []

    def f(x, w):
        c = {"log": []}

        def block(x, c):
            c["log"].append((x @ w).sin())
            return c["log"][0].exp()

        y = functx.remat(block)(x, c)
        refs.extend(map(weakref.ref, c["log"]))
        return y.sum() + c["log"][0].sum()

    freed(lambda: WAYS[way](f), refs)


def test_one_that_threads_share_and_do_not_change():
    """Their copies are their own."""
    shared = {"w": W, "more": [X]}
    results = {}

    def run(i):
        x = (X * i).requires_grad_()
        for _ in range(20):
            y = functx.remat(lambda x, p: (x @ p["w"]).sin() * p["more"][0])(x, shared)
            results[i] = torch.autograd.grad(y.sum(), x)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(4):
        assert_same(results[i], (X * (X * i @ W).cos()) @ W.mT, eps=64)


def test_numbers_of_transforms_are_torchs():
    """What `grad` and `vmap` do with a list among their arguments is as in torch.func."""

    def f(x, c):
        c.append(x.sum())
        return x.sin().sum()

    for name in ("grad", "jacrev", "jacfwd", "hessian"):
        ours, theirs = [], []
        getattr(functx, name)(f)(numbers(3), ours)
        getattr(torch.func, name)(f)(numbers(3), theirs)
        assert len(ours) == len(theirs)
