"""Queues and iterators that others use as well, or that a region could reach only."""

import ctypes
import queue
import threading

import pytest
from cases import numbers

import functx

pytestmark = pytest.mark.usefixtures("forgotten")

STEPS = 7


class Fed:
    """A region in a program with other threads, which take what it puts, or put what is not its."""

    def __init__(self):
        self.q, self.unused = queue.Queue(), queue.Queue()
        self.key, self.others = id(self.q), ctypes.c_int(0)  # no replay puts that back
        self.found = []

    def take(self):
        while (got := self.q.get(timeout=9)) is not None:
            self.found.append(got)

    def step(self, x):
        self.q.put(1)
        self.others.value += id(self.q) != self.key
        return x.sin()


def test_queues_of_other_threads_are_left_alone():
    fed = Fed()
    thread = threading.Thread(target=fed.take)
    thread.start()
    region = functx.remat(fed.step)
    for i in range(2 * STEPS):
        region(numbers(3).requires_grad_()).sum().backward()
        fed.unused.put(i)
    fed.q.put(None)
    thread.join()
    assert fed.others.value == 0
    assert len(fed.found) >= 2 * STEPS
    assert fed.unused.qsize() == 2 * STEPS


class Counted:
    """An iterator of the user's, which counts what it is asked."""

    asked = 0

    def __iter__(self):
        return self

    def __next__(self):
        return 1.0

    def __reduce__(self):
        Counted.asked += 1
        return Counted, ()


class Holding:
    def __init__(self):
        self.it, self.locked = enumerate(Counted()), queue.Queue()

    def body(self, x):
        return (x * 2.0).sin() if self.it and self.locked else x


def test_iterators_of_the_users_are_not_asked_what_they_are_made_of():
    holding = Holding()
    with holding.locked.mutex:  # which nobody waits for
        y = functx.remat(holding.body)(numbers(3).requires_grad_()).sum()
    y.backward()
    assert Counted.asked == 0


def test_one_that_was_taken_from_is_an_error():
    it = enumerate(Counted())
    y = functx.remat(lambda x: (x * next(it)[0]).sin())(numbers(3).requires_grad_()).sum()
    with pytest.raises(functx.ReplayError, match="enumerate"):
        y.backward()


class WithLoader:
    def __init__(self):
        self.ids, self.loader = iter(range(9)), iter([1.0, 2.0])

    def body(self, x):
        return (x * float(next(self.ids))).sin()


def test_what_no_code_names_is_not_copied(monkeypatch):
    copied, copy = [], functx._remat._advanced._copied
    monkeypatch.setattr(
        functx._remat._advanced, "_copied", lambda x, memo: copied.append(x) or copy(x, memo)
    )
    one = WithLoader()
    y = functx.remat(one.body)(numbers(3).requires_grad_()).sum()
    assert copied == [one.ids]
    y.backward()
    assert next(one.ids) == 1
