"""Lists, dicts and objects that a region makes, and that hooks read or change. See `_bound`."""

import pytest
import torch
from bound import DEPTHS, identity
from cases import numbers
from references import assert_same
from states import HOOKS, MEMORY, PAIRS
from torch.autograd import grad

import functx


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("number", [float, torch.tensor])
@pytest.mark.parametrize(("state", "hook"), PAIRS)
def test_that_the_program_changes(state, number, hook, depth):
    """Between forward and backward, and between two backward passes."""

    def program(remat):
        handed_out = []

        def f(x):
            s, read, write = state(number(2.0))
            handed_out.append(lambda k: write(s, number(k)))
            h = x.sin()
            h.register_hook(hook(s, lambda s, g: g * read(s)))
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        first = grad(y, x, retain_graph=True)
        handed_out[0](5.0)
        second = grad(y, x, retain_graph=True)
        handed_out[0](7.0)
        return first, second, grad(y, x)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("is_handed_out", [False, True])
@pytest.mark.parametrize(("state", "hook"), PAIRS)
def test_that_hooks_change(state, is_handed_out, hook, depth):
    """What a hook leaves there, the next one finds, and so does the program."""

    def program(remat):
        handed_out, found = [], []

        def f(x):
            s, read, write = state(2.0)
            if is_handed_out:
                handed_out.append(lambda: read(s))

            def doubles(s, g):
                write(s, read(s) * 2)
                return g * read(s)

            h = x.sin()
            z = h * 3
            z.register_hook(hook(s, doubles))
            h.register_hook(hook(s, lambda s, g: g + read(s)))
            return z.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        for _ in range(3):
            found += grad(y, x, retain_graph=True)
            found += [torch.as_tensor(get()) for get in handed_out[:1]]
        return found

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("is_handed_out", [False, True])
def test_gradients_that_hooks_keep(is_handed_out, hook, depth):
    def program(remat):
        handed_out = []

        def f(x):
            s = []
            if is_handed_out:
                handed_out.append(s)

            def keeps(s, g):
                s.append(g)
                return g * len(s) + s[0]

            h = x.sin()
            h.register_hook(hook(s, keeps))
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        found = [grad(y, x, retain_graph=True) for _ in range(3)]
        return found, handed_out[:1]

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("is_handed_out", [False, True])
def test_an_exponential_average(is_handed_out, depth):
    """In a variable, of a tensor that the hook binds again."""

    def program(remat):
        handed_out, found = [], []

        def f(x):
            average = torch.zeros_like(x)

            def hook(g):
                nonlocal average
                average = average * 0.5 + g
                return average

            if is_handed_out:
                handed_out.append(lambda: average)
            h = x.sin()
            h.register_hook(hook)
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        for _ in range(3):
            found += grad(y, x, retain_graph=True)
            found += [get() for get in handed_out[:1]]
        return found

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_tensor_in_a_variable_that_the_program_binds_again(depth):
    def program(remat):
        handed_out, found = [], []

        def f(x):
            w = torch.full_like(x, 2.0)

            def bind(new):
                nonlocal w
                w = new

            handed_out.append(bind)
            h = x.sin()
            h.register_hook(lambda g: g * w)
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        for k in range(3):
            found += grad(y, x, retain_graph=True)
            handed_out[0](torch.full_like(x, float(k)))
        return found

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("state", "hook"), PAIRS)
def test_the_programs_own_in_place_of_another_one(state, hook, depth):
    """The hook reads what the region has reached in the forward; what is there now is untouched."""

    def program(remat):
        s, read, write = state(2.0)
        there = [s]

        def f(x):
            h = x.sin()
            h.register_hook(hook(there[0], lambda s, g: g * read(s)))
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        there[0], _, _ = state(5.0)
        write(s, 7.0)
        return grad(y, x), [torch.as_tensor(read(one)) for one in (there[0], s)]

    if state in MEMORY:  # of which there may be much: it is compared, and not exchanged
        with pytest.raises(functx.ReplayError, match=r"in the forward|other values|other numbers"):
            program(functx.remat)
    else:
        assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_object_of_a_class_that_each_run_makes(depth):
    def program(remat):
        handed_out = []

        def f(x):
            class Settings:
                k = 2.0

            s = Settings()
            s.k = 2.0
            handed_out.append(s)
            h = x.sin()

            def hook(g):
                s.k += 1
                return g * s.k

            h.register_hook(hook)
            return h.exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        first = grad(y, x, retain_graph=True)
        handed_out[0].k = 7.0
        return first, grad(y, x), torch.tensor(handed_out[0].k)

    assert_same(program(functx.remat), program(identity), eps=64)
