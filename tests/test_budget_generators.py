"""Recording a budgeted function leaves torch's generator alone, and refuses what sets it."""

import contextlib
import sys
import threading

import pytest
import torch
from references import assert_same
from torch.utils.checkpoint import checkpoint

import functx

WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) / 3
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
ENOUGH = 10**7


def gradients(f):
    """The value and its gradient, with a budget and without, from one seed."""
    found = []
    for g in (functx.remat(f, budget=ENOUGH), f):
        torch.manual_seed(3)
        x = X.clone().requires_grad_()
        out = g(x)
        found.append((out, *torch.autograd.grad(out.sum(), x), torch.get_rng_state()))
    return found


def in_threads(*functions):
    threads = [threading.Thread(target=f) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# A `FakeTensorMode` in one thread and then in another one is enough.
crashes = (
    torch.__version__.startswith("2.11.")
    and torch.version.cuda is not None
    and not torch.cuda.is_available()
)


@pytest.mark.skipif(crashes, reason="torch 2.11 built for CUDA crashes in threads without a device")
class TestThreads:
    def test_another_one_draws_from_the_seed_it_set(self):
        entered, drawn, found = threading.Event(), threading.Event(), []

        def f(x):
            entered.set()
            assert drawn.wait(30)
            return (x @ WEIGHT).cos()

        def draw():
            assert entered.wait(30)
            found.append(torch.rand(2))
            drawn.set()

        torch.manual_seed(5)
        expected = torch.rand(2), torch.rand(2)
        torch.manual_seed(5)
        in_threads(draw, lambda: found.append(functx.remat(f, budget=ENOUGH)(X)))
        assert_same(tuple(sorted(found, key=len)), ((X @ WEIGHT).cos(), expected[0])[::-1])
        assert_same(torch.rand(2), expected[1])  # what was drawn is not drawn again

    def test_another_one_may_seed(self):
        entered, seeded, found = threading.Event(), threading.Event(), []

        def f(x):
            entered.set()
            assert seeded.wait(30)
            return (x @ WEIGHT).cos()

        def seed():
            assert entered.wait(30)
            torch.manual_seed(11)
            seeded.set()

        torch.manual_seed(5)
        in_threads(seed, lambda: found.append(functx.remat(f, budget=ENOUGH)(X)))
        assert_same(found[0], (X @ WEIGHT).cos())
        assert torch.initial_seed() == 11

    def test_two_that_record_wait_for_each_other(self):
        inside, most, found, interval = [], [], [], sys.getswitchinterval()

        def f(x):
            inside.append(None)
            most.append(len(inside))
            for _ in range(5):
                x = (x @ WEIGHT).tanh()
            inside.pop()
            return x

        def call():
            for _ in range(5):
                x = X.clone().requires_grad_()
                functx.remat(f, budget=ENOUGH)(x).sum().backward()
                found.append(x.grad)

        torch.manual_seed(123)
        sys.setswitchinterval(1e-5)
        try:
            in_threads(call, call)
        finally:
            sys.setswitchinterval(interval)
        assert max(most) == 1
        assert torch.initial_seed() == 123
        assert len(found) == 10
        assert_same(found, found[:1] * 10)


def test_the_seed_is_torch_s():
    scaled = functx.remat(lambda x: x * (torch.initial_seed() % 7), budget=ENOUGH)
    for seed in (3, 4, 12):
        torch.manual_seed(seed)
        assert_same(scaled(X.clone().requires_grad_()), X * (seed % 7))


def test_a_generator_seeded_as_torch_s():
    def f(x):
        own = torch.Generator().manual_seed(torch.initial_seed())
        return x.sin() * torch.rand(4, 8, generator=own) * torch.rand(4, 8)

    assert_same(*gradients(f))


def set_back(x):
    state = torch.get_rng_state()
    noise = torch.rand(4, 8)
    torch.set_rng_state(state)
    return x * noise - torch.rand(4, 8)


def forked(x):
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(4, 8)
    return x * noise + torch.rand(4, 8)


def seeded_as_before(x):
    noise = torch.rand(4, 8)
    torch.manual_seed(3)
    return x * noise - torch.rand(4, 8)


def seeded_by_itself(x):
    noise = torch.rand(4, 8)
    torch.default_generator.manual_seed(4)
    return x * noise - torch.rand(4, 8)


def caught(x):
    try:
        return set_back(x)
    except functx.RematError:
        return x


@pytest.mark.parametrize("f", [set_back, forked, caught])
def test_states_are_refused(f):
    with pytest.raises(functx.RematError, match=r"state of the random generator .*own"):
        gradients(f)


@pytest.mark.parametrize("f", [seeded_as_before, seeded_by_itself])
def test_seeds_are_refused(f):
    with pytest.raises(functx.RematError, match="seeds a random generator"):
        gradients(f)


def test_seeding_as_before_by_the_generator_itself_is_refused():
    def f(x):
        torch.default_generator.manual_seed(3)
        return x * torch.rand(4, 8)

    torch.manual_seed(3)
    torch.rand(1)
    with pytest.raises(functx.RematError, match="seeds a random generator"):
        functx.remat(f, budget=ENOUGH)(X)


def test_nothing_is_left_behind():
    for f in (set_back, torch.sin):
        with contextlib.suppress(functx.RematError):
            functx.remat(f, budget=ENOUGH)(X)
        assert torch.random.default_generator is torch.default_generator


def test_torch_s_checkpoint_may_keep_the_state():
    def f(x):
        return checkpoint(lambda x: torch.dropout(x @ WEIGHT, 0.5, True), x, use_reentrant=False)

    assert_same(*gradients(f))
