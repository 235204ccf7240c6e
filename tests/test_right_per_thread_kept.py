"""What a node keeps of what each thread or task has: nothing that may hold its results."""

import contextvars
import gc
import weakref

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from test_right_per_thread import STEPS, Holds, in_a_thread

import functx

pytestmark = pytest.mark.usefixtures("forgotten")


def test_a_list_of_what_is_on_a_tape_is_not_kept():
    """A result of the region may be put there: nothing could free both."""
    variable = contextvars.ContextVar("losses")

    def body(x):
        return (x * len(variable.get())).sin()

    def elsewhere():
        variable.set([1])
        y.backward()

    x = numbers(3).requires_grad_()
    variable.set([x * 2])
    y = functx.remat(body)(x).sum()
    z = functx.remat(body)(x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(functx.ReplayError, match=r"'losses'.*may be put into"):
        in_a_thread(elsewhere)
    with pytest.raises(LookupError, match="losses"):  # as the body itself says
        in_a_thread(z.backward)


def test_a_list_that_is_there_for_the_forward_alone():
    """As where a library collects what layers compute: a replay has nobody to collect for."""
    collects = contextvars.ContextVar("collects", default=None)

    def body(x):
        h = x.sin()
        if (those := collects.get()) is not None:
            those.append(h)
        return h * 2

    def program(remat):
        x, found = numbers(3).requires_grad_(), []
        region = remat(body)
        for _ in range(STEPS):
            those = [x * 2]
            token = collects.set(those)
            y = region(region(x))
            collects.reset(token)
            found += [torch.autograd.grad(y.sum() + sum(those).sum(), x)[0], len(those)]
        return found

    assert_same(program(functx.remat), program(identity), eps=8)


class Holder:
    def __init__(self):
        self.those = []


@pytest.mark.parametrize("kind", ["a local", "a variable"])
@pytest.mark.parametrize("holder", [list, Holder])
def test_what_holds_a_result_goes_with_it(kind, holder):
    held = Holds(kind)

    def body(x):
        held.get()
        return x.sin()

    x = numbers(3).requires_grad_()
    held.set(holder())
    y = functx.remat(body)(x)
    getattr(held.get(), "those", held.get()).append(y)
    gone = weakref.ref(y)
    held.set(None)
    del y
    gc.collect()
    assert gone() is None
