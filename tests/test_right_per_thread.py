"""What each thread or task has its own of: a replay finds what the forward found."""

import asyncio
import contextvars
import threading

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx

pytestmark = pytest.mark.usefixtures("forgotten")

STEPS = 7
LOCAL = threading.local()
VARIABLE = contextvars.ContextVar("VARIABLE")
WITH_DEFAULT = contextvars.ContextVar("WITH_DEFAULT", default=5.0)


class Own(threading.local):
    def __init__(self):
        self.ema = torch.full((3,), 7.0, dtype=torch.float64)
        self.scale = 7.0
        self.log = []


def one():
    return torch.ones(3, dtype=torch.float64)


class Holds:
    """A place for one thing, of one kind."""

    def __init__(self, kind):
        self.local = Own() if kind == "a class of the user's" else threading.local()
        self.variable = contextvars.ContextVar("own") if kind == "a variable" else None

    def get(self, *default):
        if self.variable is not None:
            return self.variable.get(*default)
        return getattr(self.local, "ema", *default)

    def set(self, x):
        if self.variable is not None:
            self.variable.set(x)
        else:
            self.local.ema = x


def advancing(held):
    def f(x):
        held.set(held.get() + 1)
        return (x * held.get()).sin()

    return f


def in_place(held):
    def f(x):
        ema = held.get()
        ema += 1
        held.set(ema)
        return (x * held.get().clone()).sin()

    return f


def of_a_number(held):
    def f(x):
        held.set(float(held.get().sum()) * one())
        return (x * float(held.get()[0])).sin()

    return f


def of_a_list(held):
    held.set([one()])

    def f(x):
        held.get().append(held.get()[-1] + 1)
        return (x * held.get()[-1]).sin()

    return f


def of_a_list_of_numbers(held):
    held.set([1])

    def f(x):
        held.get().append(1)
        return (x * len(held.get())).sin()

    return f


def put_back_itself(held):
    def f(x):
        before = held.get()
        held.set(before * 3)
        y = (x * held.get()).sin()
        held.set(before)
        return y

    return f


def made_by_the_region(held):
    def f(x):
        held.set(held.get(one() * 0) + 1)
        return (x * held.get()).sin()

    return f


BODIES = [
    *(advancing, in_place, of_a_number, of_a_list, of_a_list_of_numbers, put_back_itself),
    made_by_the_region,
]
WAYS = ["backward", "vjp", "grad"]
KINDS = ["a local", "a class of the user's", "a variable"]


def in_a_thread(f):
    found = []

    def run():
        try:
            found.append(f())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def here(f):
    return f()


def in_a_context(f):
    """As where the task of the forward has ended."""
    return contextvars.Context().run(f)


WHERE = [here, in_a_thread, in_a_context]


def steps(region, held, where, way):
    found = []
    for _ in range(STEPS):
        x = numbers(3).requires_grad_()
        if way == "backward":
            y = region(region(x)).sum()
            found += where(lambda x=x, y=y: torch.autograd.grad(y, x))
        elif way == "grad":
            found.append(functx.grad(lambda x: region(region(x)).sum())(x.detach()))
        else:
            y, pullback = functx.vjp(lambda x: region(region(x)).sum(), x.detach())
            found += where(lambda pullback=pullback, y=y: pullback(torch.ones_like(y)))
    return found, held.get()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("body", "way"),  # transforms refuse what writes to a tensor from outside
    [(b, w) for b in BODIES for w in WAYS if b is not in_place or w == "backward"],
)
def test_what_a_region_changes_there(body, kind, where, way):
    def program(remat):
        held = Holds(kind)
        if body is not made_by_the_region or kind == "a class of the user's":
            held.set(one())
        first = held.get(None)
        found = steps(remat(body(held)), held, where, way)
        assert body is not in_place or held.get() is first
        return found

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("kind", KINDS)
def test_results_that_a_region_puts_into_a_list_there(kind):
    def program(remat):
        held = Holds(kind)
        held.set([])

        def f(x):
            h = (x * 3).sin()
            held.get().append(h)
            return h * len(held.get())

        region, x = remat(f), numbers(3).requires_grad_()
        found = []
        for _ in range(STEPS):
            y = region(region(x))
            found += torch.autograd.grad(y.sum() + held.get()[-1].sum(), x)
        return found, len(held.get())

    assert_same(program(functx.remat), program(identity), eps=64)


def by_attribute(x):
    return (x * LOCAL.scale).sin()


def by_attribute_that_may_be_missing(x):
    return (x * getattr(LOCAL, "scale", 5.0)).sin()


def by_variable(x):
    return (x * VARIABLE.get()).sin()


def by_variable_with_a_default(x):
    return (x * WITH_DEFAULT.get()).sin()


READERS = {
    by_attribute: lambda value: setattr(LOCAL, "scale", value),
    by_attribute_that_may_be_missing: lambda value: setattr(LOCAL, "scale", value),
    by_variable: VARIABLE.set,
    by_variable_with_a_default: WITH_DEFAULT.set,
}


@pytest.mark.parametrize("value", [2.0, None])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("where", WHERE)
def test_what_others_change_between_forward_and_backward(where, reader, value):
    """The forward's is found, also if there was none; and what others have set stays set."""
    if value is None and reader not in (by_attribute_that_may_be_missing,):
        value = torch.full((3,), 2.0, dtype=torch.float64)
    change = READERS[reader]

    def program():
        vars(LOCAL).clear()
        if value is not None:
            change(value)
        x = numbers(3).requires_grad_()
        y = functx.remat(reader)(x).sum()
        change(3.0)
        where(y.backward)
        factor = 5.0 if value is None else value
        assert_same(x.grad, (x.detach() * factor).cos() * factor)
        y = functx.remat(reader)(x).sum()
        assert_same(y, (x.detach() * 3.0).sin().sum())

    contextvars.copy_context().run(program)


def test_a_variable_that_was_not_set_is_not_set_in_a_replay():
    def body(x):
        try:
            factor = VARIABLE.get()
        except LookupError:
            factor = 5.0
        VARIABLE.set(2.0)
        return (x * factor).sin()

    def program():
        x = numbers(3).requires_grad_()
        functx.remat(body)(x).sum().backward()
        assert_same(x.grad, (x.detach() * 5).cos() * 5)
        assert VARIABLE.get() == 2.0

    contextvars.Context().run(program)


def test_tasks():
    """Each has its own; they take turns, and what runs backward comes when all have ended."""

    def program(remat):
        region = remat(by_variable)
        x = numbers(3).requires_grad_()

        async def task(i):
            VARIABLE.set(float(i))
            await asyncio.sleep(0)
            y = region(x)
            await asyncio.sleep(0)
            VARIABLE.set(-1.0)
            return y

        async def tasks():
            return await asyncio.gather(*map(task, range(1, 5)))

        return torch.autograd.grad(sum(asyncio.run(tasks())).sum(), x)

    assert_same(program(functx.remat), program(identity), eps=8)


def test_threads_that_replay_what_another_ran():
    """Each leaves the attributes of its own as they are."""
    region = functx.remat(by_attribute)

    def forward(scale):
        LOCAL.scale = scale
        x = numbers(3).requires_grad_()
        return x, region(x).sum()

    those = [in_a_thread(lambda i=i: forward(float(i))) for i in range(1, 5)]

    def backward(i):
        LOCAL.other = i
        x, y = those[i - 1]
        y.backward()
        assert vars(LOCAL) == {"other": i}
        return x

    for i in range(1, 5):
        x = in_a_thread(lambda i=i: backward(i))
        assert_same(x.grad, (x.detach() * i).cos() * i)


def test_what_code_does_not_name_is_not_kept():
    held = threading.local()
    held.scale, held.unnamed = 2.0, [one()]
    seen = []
    seal = functx._remat._per_thread.PerThread.seal

    class Spying(functx._remat._per_thread.PerThread):
        def seal(self, written):
            seal(self, written)
            seen.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functx._remat._rare, "PerThread", Spying)
        x = numbers(3).requires_grad_()
        y = functx.remat(lambda x: (x * held.scale).sin())(x).sum()
    ((_, kept),) = seen[0]._locals
    assert kept["scale"] == 2.0
    assert not isinstance(kept["unnamed"], list)
    del held.unnamed
    y.backward()
    assert_same(x.grad, (x.detach() * 2).cos() * 2)
    assert not hasattr(held, "unnamed")
