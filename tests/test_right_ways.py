"""What objects hold changes once: however it is linked, in slots, in a dict that is replaced."""

import sys

import pytest
import torch
from cases import DTYPE

import functx

X = torch.linspace(0.1, 1, 3, dtype=DTYPE)


class Holder:
    pass


def both(make):
    """Of a program of two steps, with and without: the gradients and what is left."""
    found = []
    for remat in (lambda f: f, functx.remat):
        f, left = make()
        g, gradients = remat(f), []
        for _ in range(2):
            x = X.clone().requires_grad_()
            (g(x) + 2 * g(x)).sum().backward()
            gradients.append(x.grad)
        found.append((torch.stack(gradients), left()))
    (plain, its), (ours, left) = found
    assert torch.equal(ours, plain)
    assert left == its


def linked_dicts(n):
    h = Holder()
    h.first = {"count": 0}
    one = h.first
    for _ in range(n):
        one["next"] = {"count": 0}
        one = one["next"]

    def f(x):
        one = h.first
        while one is not None:
            one["count"] += 1
            last, one = one, one.get("next")
        return x * last["count"]

    def left():
        one, counts = h.first, []
        while one is not None:
            counts.append(one["count"])
            one = one.get("next")
        return counts

    return f, left


def linked_lists_of_a_closure(n):
    """In no object: they count runs; those with tensors of a tape are copies for each replay."""
    first = last = []
    for _ in range(n):
        last.append([])
        last = last[0]

    def f(x):
        one, depth = first, 0
        while one:
            one, depth = one[0], depth + 1
        return x * depth

    return f, lambda: 0


def lists_in_lists(n):
    h = Holder()
    h.logs = [[[] for _ in range(10)] for _ in range(n // 10)]

    def f(x):
        for logs in h.logs:
            for log in logs:
                log.append(1)
        return x * len(h.logs[0][0])

    return f, lambda: [[len(log) for log in logs] for logs in h.logs]


def logs_of_objects(n):
    those = [Holder() for _ in range(n)]
    for one in those:
        one.log, one.calls = [], 0

    def f(x):
        for one in those:
            one.log.append(1)
            one.calls += 1
        return x * those[-1].calls

    return f, lambda: [(len(one.log), one.calls) for one in those]


def tensors_in_logs_of_objects(n):
    those = [Holder() for _ in range(n)]
    for one in those:
        one.log = []

    def f(x):
        y = x.sin()
        for one in those:
            one.log.append(y)
        return x * len(those[-1].log)

    return f, lambda: [len(one.log) for one in those]


@pytest.mark.parametrize(
    "make",
    [
        linked_dicts,
        linked_lists_of_a_closure,
        lists_in_lists,
        logs_of_objects,
        tensors_in_logs_of_objects,
    ],
)
def test_four_times_as_much_takes_four_times_as_long(make):
    both(lambda: make(40))

    def lines(n):
        f, _ = make(n)
        counted = 0

        def count(frame, event, arg):
            nonlocal counted
            counted += event == "line"
            return count

        g = functx.remat(f)
        torch.autograd.grad(g(x := X.clone().requires_grad_()).sum(), x)
        before = sys.gettrace()
        sys.settrace(count)
        try:
            torch.autograd.grad(g(x := X.clone().requires_grad_()).sum(), x)
        finally:
            sys.settrace(before)
        return counted

    assert lines(800) < 4.5 * lines(200)


def test_three_thousand_dicts_deep():
    both(lambda: linked_dicts(3000))


def replaced_dict():
    o = Holder()
    o.ema, o.old = torch.zeros((), dtype=DTYPE), 0

    def f(x):
        new = {**o.__dict__, "ema": o.ema + 1, "new": len(o.__dict__)}
        new.pop("old", None)
        o.__dict__ = new
        return x * o.ema

    return f, lambda: {name: float(x) for name, x in o.__dict__.items()}


def once_replaced_dict():
    """The first time only: a replay of that is of the object as it was."""
    o = Holder()
    o.k = 1.0

    def f(x):
        if not hasattr(o, "made"):
            o.__dict__ = {"k": 3.0, "made": True}
        o.k += 1
        return x * o.k

    return f, lambda: dict(o.__dict__)


class Slotted:
    __slots__ = ("log", "n")

    def __init__(self):
        self.n, self.log = 0, []


class Hidden(Slotted):
    """With no other slots: a property of the name of one, which it reads."""

    __slots__ = ()

    @property
    def n(self):
        return Slotted.n.__get__(self)

    @n.setter
    def n(self, n):
        Slotted.n.__set__(self, n)

    @property
    def log(self):
        return Slotted.log.__get__(self)

    @log.setter
    def log(self, log):
        Slotted.log.__set__(self, log)


class ReadOnly(Slotted):
    __slots__ = ()

    def __init__(self):
        Slotted.n.__set__(self, 0)
        Slotted.log.__set__(self, [])

    @property
    def n(self):
        return [Slotted.n.__get__(self)]


class Frozen(Slotted):
    __slots__ = ()

    def __init__(self):
        object.__setattr__(self, "n", 0)
        object.__setattr__(self, "log", [])

    def __setattr__(self, name, value):
        raise AttributeError(name)

    __delattr__ = __init__


class ADictInASlot:
    __slots__ = ("__dict__",)

    def __init__(self):
        self.n, self.log = 0, []


class WeakSlots(Slotted):
    __slots__ = ("__weakref__", "late")


def of_slots(cls):
    def make():
        o = cls()

        def f(x):
            n = cls.n.__get__(o) if cls is Hidden else Slotted.n.__get__(o)
            Slotted.n.__set__(o, n + 1)
            o.log.append(n)
            o.log[0] += 1
            if cls is WeakSlots and not hasattr(o, "late"):
                o.late = 1
            return x * (n + 1) * len(o.log)

        return f, lambda: (Slotted.n.__get__(o), o.log, hasattr(o, "late"))

    return make


def dict_in_a_slot():
    o = ADictInASlot()

    def f(x):
        o.n += 1
        o.log.append(o.n)
        return x * o.n * len(o.log)

    return f, lambda: (o.n, o.log)


def frozen_class():
    class Meta(type):
        def __setattr__(cls, name, value):
            if name == "calls" and cls.frozen:
                raise AttributeError(name)
            type.__setattr__(cls, name, value)

        def __delattr__(cls, name):
            raise AttributeError(name)

    class Counts(metaclass=Meta):
        frozen = False
        calls = 0

    def f(x):
        Counts.frozen = False
        Counts.calls += 1
        Counts.frozen = True
        return x * Counts.calls

    return f, lambda: (Counts.frozen, Counts.calls)


class Items(list):
    """A container of a class of the program's, which nothing but the function leads to."""


def of_items():
    items = Items([{"count": 0}, [0]])

    def f(x):
        items[0]["count"] += 1
        items[1][0] += 1
        return x * items[0]["count"]

    return f, lambda: list(items)


MADE = {
    "replaced": replaced_dict,
    "once": once_replaced_dict,
    **{cls.__name__: of_slots(cls) for cls in (Slotted, Hidden, ReadOnly, Frozen, WeakSlots)},
    "a dict in a slot": dict_in_a_slot,
    "class": frozen_class,
    "items": of_items,
}


@pytest.mark.parametrize("name", MADE)
def test_counts_once(name):
    both(MADE[name])
