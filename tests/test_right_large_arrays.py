"""Large NumPy arrays within reach of a region: which count, and what is read of them."""

import functools
import operator
import threading
from itertools import product

import numpy as np
import pytest
import torch
from cases import numbers

import functx
from functx._remat import _large_arrays, _much_memory, _named_arrays, _within_reach

LARGE = 1 << 18


def large():
    return np.arange(1.0, LARGE + 1) / LARGE


@pytest.mark.parametrize("pages", [2, 4, 256])
@pytest.mark.parametrize("most", [0, 5000, 1 << 24])
@pytest.mark.parametrize("size", [0, 3, 8, 3000, 4096, 8191, 8193, 300 * 4096 + 5])
def test_no_memory_beside_an_array_is_read(size, most, pages, monkeypatch):
    around = np.zeros(3 * size + 16, np.uint8)
    start = around.ctypes.data + size
    read = []
    string_at = _much_memory.ctypes.string_at
    monkeypatch.setattr(
        _much_memory.ctypes, "string_at", lambda i, n: read.append((i, n)) or string_at(i, n)
    )
    before = _much_memory.bits_of_much(start, size, most, pages)
    around[:size] += 1
    around[2 * size :] += 1
    assert _much_memory.bits_of_much(start, size, most, pages) == before
    assert all(start <= i and i + n <= start + size for i, n in read)
    assert sum(n for _, n in read) <= 2 * pages * 4096
    if size:
        for place in (0, -1) if size > max(most, pages * 4096) else range(0, size, size // 50 + 1):
            around[size : 2 * size][place] += 1
            assert _much_memory.bits_of_much(start, size, most, pages) != before
            around[size : 2 * size][place] -= 1


class Assigned(_within_reach.Reached):
    """Counts how often what is rare is another list."""

    __slots__ = ()
    times = 0

    def __setattr__(self, name, value):
        Assigned.times += name == "rare"
        super().__setattr__(name, value)


@pytest.mark.parametrize("size", [3000, 1 << 16, 1 << 20])
def test_what_is_read_of_many_arrays_has_a_bound(monkeypatch, size):
    arrays = [[np.empty(size, np.uint8) for _ in range(500)] for _ in range(3)]
    read = []
    bits = _large_arrays.bits_of_much

    def counted(start, size, most, pages):
        read.append(min(size, max(most, pages * 4096)))
        return bits(start, size, most, pages)

    monkeypatch.setattr(_large_arrays, "bits_of_much", counted)
    monkeypatch.setattr(_named_arrays.threading, "active_count", lambda: 1)
    monkeypatch.setattr(_within_reach, "Reached", Assigned)
    monkeypatch.setattr(Assigned, "times", 0)
    functx.remat(lambda x: x.sin() * len(arrays))(numbers(3).requires_grad_())
    assert len(read) == 2 * 64
    assert sum(read) <= 2 * ((1 << 22) + 256 * 4096)
    assert Assigned.times <= 2


def test_many_iterators_are_found_at_once(monkeypatch):
    monkeypatch.setattr(_within_reach, "Reached", Assigned)
    monkeypatch.setattr(Assigned, "times", 0)
    those = [iter([1]) for _ in range(100)]
    assert len(_within_reach.reach(lambda: those, []).rare) == 100
    assert Assigned.times == 1


class Actors:
    """What a thread fills while a region runs."""

    def __init__(self, where):
        self.where = where
        self.buffer, self.buffers = large(), [np.zeros(1 << 17), large()]
        self.go, self.done, self.end = (threading.Event() for _ in range(3))
        self.thread = threading.Thread(target=self.fill, daemon=True)

    def fill(self):
        self.go.wait()
        {"attribute": self.buffer, "list": self.buffers[1]}[self.where][...] += 1
        self.done.set()
        self.end.wait()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.end.set()
        self.thread.join()

    def region(self, x):
        self.go.set()
        assert self.done.wait(60)
        return x.sin() * float(self.buffers[0][0])


@pytest.mark.parametrize("where", ["attribute", "list"])
def test_what_another_thread_writes_to_is_no_error(where):
    """Neither an attribute that the region does not name, nor one of several that it does."""
    with Actors(where) as actors:
        x = numbers(3).requires_grad_()
        functx.remat(actors.region)(x).sum().backward()
        assert actors.done.is_set()
        assert (x.grad == 0).all()


class Holds:
    def __init__(self):
        self.history = large()
        self.several = [np.zeros(3), large()]


of_installed = pytest.MonkeyPatch()
of_installed.history = large()
get = operator.attrgetter("history")


class Slotted:
    __slots__ = ("history",)

    def __init__(self):
        self.history = large()


class OfClass:
    history = large()


def step_of(holder):
    held, slotted, module, history = Holds(), Slotted(), torch.nn.Identity(), large()
    module.history = large()
    fill, put = functools.partial(np.copyto, large(), np.ones(LARGE)), history.put

    def attribute(x):
        held.history[7] += 1
        return x.sin()

    def in_a_list(x):
        held.several[1][7] += 1
        return x.sin()

    def slot(x):
        slotted.history[7] += 1
        return x.sin()

    def of_a_class(x):
        OfClass.history[7] += 1
        return x.sin()

    def by_getattr(x, name="history"):
        getattr(held, name)[7] += 1
        return x.sin()

    def of_an_installed_package(x):
        get(of_installed)[7] += 1
        return x.sin()

    def of_a_module(x):
        module.history[7] += 1
        return x.sin()

    def by_a_partial(x):
        fill()
        return x.sin()

    def by_a_method(x):
        put(7, 3.0)
        return x.sin()

    def default(x, those=history):
        those[7] += 1
        return x.sin()

    return locals()[holder]


ALONE = ("in_a_list", "by_getattr", "of_an_installed_package")
TOLD = ("attribute", "slot", "of_a_class", "of_a_module", "by_a_partial", "by_a_method", "default")


@pytest.mark.parametrize(
    ("holder", "threads"), [*product((*ALONE, *TOLD), [False]), *product(TOLD, [True])]
)
def test_what_a_region_writes_to_is_an_error(holder, threads, monkeypatch):
    """Whoever holds it; with other threads, where the region can be told to be the one."""
    monkeypatch.setattr(_named_arrays.threading, "active_count", lambda: 1 + threads)
    y = functx.remat(step_of(holder))(numbers(3).requires_grad_()).sum()
    with pytest.raises(functx.ReplayError, match=r"NumPy array of 2,097,152 bytes.*outside"):
        y.backward()
