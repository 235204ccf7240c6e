"""Iterators, queues and files that a region takes from: a replay finds them as the forward did."""

import asyncio
import collections
import csv
import functools
import io
import itertools
import queue
import threading

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx

pytestmark = pytest.mark.usefixtures("forgotten")

STEPS = 7


def tensors(n=100):
    return [torch.full((3,), 0.1 + i, dtype=torch.float64) for i in range(n)]


def a_queue(kind):
    def make():
        q = kind()
        for i, t in enumerate(tensors()):
            q.put_nowait((i, t) if kind is queue.PriorityQueue else t)
        return q

    return make


ITERATORS = {
    "list": lambda: iter(tensors()),
    "tuple": lambda: iter((*tensors(),)),
    "range": lambda: iter(range(100)),
    "reversed": lambda: reversed(tensors()),
    "dict": lambda: iter(dict(enumerate(tensors())).values()),
    "set": lambda: iter({*range(100)}),
    "deque": lambda: iter(collections.deque(tensors())),
    "count": lambda: itertools.count(3),
    "cycle": lambda: itertools.cycle(tensors(3)),
    "chain": lambda: itertools.chain(tensors(3), tensors(), tensors()),
    "islice": lambda: itertools.islice(tensors(), 3, None, 2),
    "accumulate": lambda: itertools.accumulate(range(100)),
    "map": lambda: map(torch.Tensor.sin, tensors()),
    "filter": lambda: filter(lambda i: i % 3, range(100)),
    "map of map": lambda: map(abs, map(float, range(100))),
    "exhausted on the way": lambda: itertools.chain(iter(range(2 * STEPS - 1)), [5.0]),
}
QUEUES = {
    kind.__module__ + kind.__name__: a_queue(kind)
    for kind in (
        *(queue.Queue, queue.LifoQueue, queue.PriorityQueue),
        *(queue.SimpleQueue, asyncio.Queue),
    )
}


def taking(take, source):
    return lambda x: (x * take(source)).sin()


def from_queue(q):
    got = q.get_nowait()
    return got[1] if isinstance(got, tuple) else got


WAYS = {
    "backward": lambda f, x: torch.autograd.grad(f(x.requires_grad_()), x),
    "vjp": lambda f, x: functx.vjp(f, x)[1](torch.ones((), dtype=x.dtype)),
    "grad": lambda f, x: functx.grad(f)(x),
    "vmap(grad)": lambda f, x: functx.vmap(functx.grad(f))(torch.stack([x, x * 2])),
    "grad(grad)": lambda f, x: functx.grad(lambda x: functx.grad(f)(x).sin().sum())(x),
}


def of_steps(region, way):
    """Gradients of steps in which a region runs twice, the second after the first."""
    return [WAYS[way](lambda x: region(region(x)).sum(), numbers(3)) for _ in range(STEPS)]


def assert_right(build, way, rest):
    """What steps give, and what is left, are as without remat."""

    def program(remat):
        body, left = build()
        return of_steps(remat(body), way), [left() for _ in range(rest)]

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ITERATORS)
def test_iterators(kind, way):
    def build():
        it = ITERATORS[kind]()
        return taking(next, it), lambda: next(it, -1)

    assert_right(build, way, 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", QUEUES)
def test_queues(kind, way):
    def build():
        q = QUEUES[kind]()

        def body(x):
            q.put_nowait((200, x.detach() * 0 + 2) if "Priority" in kind else x.detach() * 0 + 2)
            return (x * from_queue(q)).sin()

        return body, lambda: (from_queue(q), q.qsize())

    assert_right(build, way, 3)


COUNTER = itertools.count(1)


class Owner:
    ids = None

    def __init__(self, it):
        self.it = it


class Slots:
    __slots__ = ("it",)


class Layer(torch.nn.Module):
    def __init__(self, it):
        super().__init__()
        self.it = it

    def forward(self, x):
        return (x * next(self.it)).sin()


def by_closure(it):
    return taking(next, it)


def by_inner_closure(it):
    def inner():
        return next(it)

    return lambda x: (x * inner()).sin()


def by_default(it):
    return lambda x, it=it: (x * next(it)).sin()


def by_partial(it):
    return functools.partial(lambda it, x: (x * next(it)).sin(), it)


def by_attribute(it):
    owner = Owner(it)
    return lambda x: (x * next(owner.it)).sin()


def by_slot(it):
    owner = Slots()
    owner.it = it
    return lambda x: (x * next(owner.it)).sin()


def by_class(it):
    Owner.ids = it
    return lambda x: (x * next(Owner.ids)).sin()


def by_module(it):
    return Layer(it)


def by_list(it):
    held = [it, None]
    return lambda x: (x * next(held[0])).sin()


def by_dict_of_object(it):
    owner = Owner({"it": it})
    return lambda x: (x * next(owner.it["it"])).sin()


def by_method(it):
    take = it.__next__
    return lambda x: (x * take()).sin()


def by_method_of_object(it):
    owner = Owner(it.__next__)
    return lambda x: (x * owner.it()).sin()


def by_global(it):
    global COUNTER
    COUNTER = it
    return lambda x: (x * next(COUNTER)).sin()


def by_two_names(it):
    owner = Owner(it)
    return lambda x: (x * next(it) + next(owner.it)).sin()


def in_a_zip(it):
    both = zip(it, itertools.count())
    return lambda x: (x * next(both)[0] + next(it)).sin()


HOLDERS = [
    *(by_closure, by_inner_closure, by_default, by_partial, by_attribute, by_slot, by_class),
    *(by_module, by_list, by_dict_of_object, by_method, by_method_of_object, by_global),
    *(by_two_names, in_a_zip),
]


@pytest.mark.parametrize("way", ["backward", "vjp"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_where_iterators_are_held(holder, way):
    def build():
        it = iter(range(1, 100))
        return holder(it), lambda: next(it)

    assert_right(build, way, 2)


def test_an_iterator_that_is_an_argument():
    def program(remat):
        it, region = iter(tensors()), remat(lambda x, it: (x * next(it)).sin())
        return of_steps(lambda x: region(x, it), "backward"), next(it)

    assert_same(program(functx.remat), program(identity))


def test_what_nothing_is_computed_with_counts_once():
    """As names that are made of a counter."""
    counter = itertools.count()

    def body(x):
        next(counter)
        return x.sin()

    for _ in range(3):
        functx.remat(body)(numbers(3).requires_grad_()).sum().backward()
    assert next(counter) == 3


def generator():
    n = 0
    while True:
        n += 1
        yield float(n)


def forever():
    while True:
        yield 1.0


def rows():
    return csv.reader(iter("123456789"))


@pytest.mark.parametrize("make", [generator, lambda: (i for i in range(9)), rows])
def test_generators_are_an_error_where_they_move(make):
    """Also where nothing is computed with what they give."""
    it = make()

    def body(x):
        next(it)
        return x.sin()

    y = functx.remat(body)(numbers(3).requires_grad_()).sum()
    following = next(it)
    with pytest.raises(functx.ReplayError, match=r"takes from.*'it' .*take from it outside"):
        y.backward()
    assert next(it) != following


@pytest.mark.parametrize("touched", [True, False])
def test_what_does_not_move_is_no_error(touched):
    """A generator that gives the same for ever; and one that a region reaches and leaves alone."""
    it = forever() if touched else generator()
    if touched:
        next(it)
    x = numbers(3).requires_grad_()
    functx.remat(lambda x: (x * next(it)).sin() if touched else x.sin())(x).sum().backward()
    assert_same(x.grad, x.detach().cos())
    assert next(it) == 1.0


class Ones:
    def __getitem__(self, i):
        return 1.0


@pytest.mark.parametrize("held", [(iter(tensors()),), [iter(Ones())]], ids=["tuple", "user's"])
def test_an_iterator_that_nobody_can_put_there_is_an_error(held):
    """It is in a tuple, and a forward's items hide what is taken; or it runs code of the user's."""
    region = functx.remat(lambda x: (x * next(held[0])).sin())
    with pytest.raises(functx.ReplayError, match=r"takes from.*'held' \((list_)?iterator\)"):
        region(numbers(3).requires_grad_()).sum().backward()


def lines(tmp_path, kind):
    text = "".join(f"{i}.5\n" for i in range(100))
    if kind == "StringIO":
        return io.StringIO(text)
    (tmp_path / "lines").write_text(text)
    return open(tmp_path / "lines", "rb" if kind == "binary" else "r")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["StringIO", "text", "binary"])
def test_files(tmp_path, kind, way):
    files = []

    def build():
        file = lines(tmp_path, kind)
        files.append(file)
        return taking(lambda file: float(file.readline()), file), file.readline

    assert_right(build, way, 2)
    for file in files:
        file.close()


def test_a_file_that_can_not_tell_where_it_is(tmp_path):
    with lines(tmp_path, "text") as file:
        y = functx.remat(taking(lambda file: float(next(file)), file))(numbers(3).requires_grad_())
        with pytest.raises(functx.ReplayError, match=r"TextIOWrapper.*take from it outside"):
            y.sum().backward()


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue])
def test_a_queue_that_others_fill_meanwhile_does_not_wait(kind):
    """The forward took what came while it ran: before and after it, the queue is empty."""
    q, asked = kind(), threading.Event()

    def fill():
        asked.wait()
        q.put(torch.ones(3))

    def body(x):
        asked.set()
        return (x * q.get(timeout=9)).sin()

    thread = threading.Thread(target=fill)
    thread.start()
    y = functx.remat(body)(numbers(3).requires_grad_())
    thread.join()
    with pytest.raises(functx.ReplayError, match="would wait for ever"):
        y.sum().backward()
    assert q.empty()


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue])
def test_a_queue_in_a_tuple_is_an_error(kind, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # those of who runs the tests aside
    q = kind()
    for t in tensors(9):
        q.put(t)
    held = (q,)
    region = functx.remat(lambda x: (x * held[0].get()).sin())
    with pytest.raises(functx.ReplayError, match=r"takes from.*Queue"):
        region(numbers(3).requires_grad_()).sum().backward()


def test_nothing_is_kept_of_what_does_not_move(monkeypatch):
    it = iter(tensors())
    kept = []
    seal = functx._remat._advanced.Advanced.seal
    monkeypatch.setattr(
        functx._remat._advanced.Advanced, "seal", lambda self: (seal(self), kept.append(self))
    )
    region = functx.remat(lambda x: (x * 2).sin() if it is not None else next(it))
    region(numbers(3).requires_grad_()).sum().backward()
    assert len(kept) == 1
    assert not kept[0].any()


def test_no_warning_comes_of_looking(recwarn):
    it = itertools.count()
    functx.remat(taking(next, it))(numbers(3).requires_grad_()).sum().backward()
    assert not [w for w in recwarn if issubclass(w.category, DeprecationWarning)]
