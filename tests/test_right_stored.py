"""What a region is given and stores elsewhere; objects in what it is given; the user's lists."""

import dataclasses
from collections import deque

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

X = numbers(3)


class Thing:
    pass


class Mine(list):
    """A list of the user's own class."""


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class Inherits(Slotted):
    __slots__ = ("m",)


@dataclasses.dataclass
class Registered:
    """Made anew with each flattening, and its parts with it."""

    parts: list

    def flatten(self):
        return [p.t for p in self.parts], [p.n for p in self.parts]


@dataclasses.dataclass
class Part:
    t: torch.Tensor
    n: int = 0


torch.utils._pytree.register_pytree_node(
    Registered,
    Registered.flatten,
    lambda ts, ns: Registered([Part(t, n) for t, n in zip(ts, ns)]),
)


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "store",
    [
        lambda t, c: setattr(t, "kept", c),
        lambda t, c: t.log.append(c),
        lambda t, c: t.table.update(it=c),
        lambda t, c: t.queue.append(c),
    ],
)
def test_what_is_stored_is_the_callers(store, nested, change):
    def program(remat):
        t, c, x = Thing(), [1], X.clone().requires_grad_()
        t.log, t.table, t.queue, t.kept = [], {}, deque(), None

        def body(x, c):
            store(t, c)
            if change:
                c.append(x.sin())
            return x.cos()

        f = remat(body)
        y = remat(lambda x, c: f(x, c))(x, c) if nested else f(x, c)
        found = [z for z in (t.kept, *t.log, *t.table.values(), *t.queue) if z is not None]
        assert [z is c for z in found] == [True]
        (y + sum(c[1:])).sum().backward()
        assert found[0] is c
        assert len(c) == 1 + change
        return x.grad

    assert_same(program(functx.remat), program(identity))


def test_what_a_closure_or_a_cell_has_is_the_callers():
    kept = None

    def body(x, c):
        nonlocal kept
        kept = c
        return x.sin(), lambda: c

    c = {"n": 1}
    y, get = functx.remat(body)(X.clone().requires_grad_(), c)
    assert kept is c
    assert get() is c
    y.sum().backward()
    assert kept is c


def test_what_a_tuple_has_is_an_error():
    module = nn.Module()

    def body(x, c):
        module.kept = (c, 1)
        return x.sin()

    with pytest.raises(functx.RematError, match="in a tuple"):
        functx.remat(body)(X.clone().requires_grad_(), [1])


def test_what_a_function_that_calls_itself_closes_over_is_stored_nowhere():
    """It is garbage that nobody has collected yet."""

    def body(x, config):
        pair = x, config

        def walk(n, h):
            return h if n == 0 else walk(n - 1, h.sin() * pair[1]["scale"])

        return walk(2, x)

    def run(remat):
        x = X.clone().requires_grad_()
        remat(body)(x, {"scale": 2.0}).sum().backward()
        return x.grad

    assert_same(run(functx.remat), run(identity))


def test_what_is_returned_searches_for_nothing(monkeypatch):
    """Neither what is returned nor what is moved between given containers was stored elsewhere."""
    monkeypatch.setattr("gc.get_referrers", None)

    def body(x, a, b):
        a.append(b)
        b.append(x.sin())
        return x.cos(), a, b

    a, b = [], []
    y, got, other = functx.remat(body)(X.clone().requires_grad_(), a, b)
    assert [got is a, other is b, a[0] is b, len(b)] == [True, True, True, 1]
    y.sum().backward()


@pytest.mark.parametrize("in_a_list", [False, True])
def test_objects_in_registered_ones(in_a_list):
    def program(remat):
        x = X.clone().requires_grad_()
        r = Registered([Part(x * 2), Part(x * 3)])

        def body(x, r):
            r = r[0] if in_a_list else r
            for p in r.parts:
                p.t = p.t * x.sin()
                p.n += 1
            return x * r.parts[0].n

        f, y, parts = remat(body), 0, [*r.parts]
        for _ in range(3):
            y = y + f(x, [r] if in_a_list else r)
        assert [a is b for a, b in zip(parts, r.parts)] == [True, True]
        (y + parts[0].t + parts[1].t).sum().backward()
        return x.grad, y, [(p.t, p.n) for p in parts]

    assert_same(program(functx.remat), program(identity), eps=8)


def test_lists_of_the_users_class():
    def program(remat):
        mine, thing, slots = Mine(), Thing(), Inherits()
        thing.log = Mine()
        x = X.clone().requires_grad_()

        def body(x):
            mine.append(x.sin())
            thing.log.append(x.cos())
            slots.n += 1
            return x * len(mine)

        f = remat(body)
        for _ in range(3):
            f(x).sum().backward()
        return x.grad, [*mine], [*thing.log], slots.n

    assert_same(program(functx.remat), program(identity))
