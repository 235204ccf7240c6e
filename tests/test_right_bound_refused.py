"""What hooks find changed, and a replay's can't find: an error. See `_bound`."""

import numpy as np
import pytest
import torch
from bound import DEPTHS
from cases import numbers
from references import assert_same
from torch.autograd import grad

import functx


def keyed_by_tensors(h):
    s = {h.detach(): 2.0}
    return s, lambda s: sum(s.values()), lambda s, k: s.__setitem__(next(iter(s)), k)


def keyed_by_ids(h):
    s = {id(h): 2.0}
    return s, lambda s: sum(s.values()), lambda s, k: s.__setitem__(next(iter(s)), k)


def in_a_set(h):
    s = {h.detach()}
    return s, lambda s: float(len(s)), lambda s, k: s.add(torch.tensor(k))


STATES = [keyed_by_tensors, keyed_by_ids, in_a_set]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("state", STATES[:2])
def test_that_the_program_changes(state, depth):
    handed_out = []

    def f(x):
        h = x.sin()
        s, read, write = state(h)
        handed_out.append(lambda k: write(s, k))
        h.register_hook(lambda g: g * read(s))
        return h.exp()

    def run(**options):
        handed_out.clear()
        x = numbers(3).requires_grad_()
        y = depth(f)(lambda f: functx.remat(f, **options))(x).sum()
        handed_out[0](5.0)
        return grad(y, x)

    with pytest.raises(functx.ReplayError, match="in the forward of the region"):
        run()
    run(determinism_check="none")


def test_a_result_that_the_program_writes_to():
    def f(x):
        h = x.sin()
        y = h.exp()
        h.register_hook(lambda g: g * y.detach())
        return y

    x = numbers(3).requires_grad_()
    y = functx.remat(f)(x)
    loss = (y * 2).sum()
    with torch.no_grad():
        y.add_(5.0)
    with pytest.raises(functx.ReplayError, match="in the forward of the region"):
        grad(loss, x)


def test_ids_of_a_run_are_its_own():
    """What is keyed by them is left as it is, if nobody changes it."""

    def f(x):
        h = x.sin()
        scales = {id(h): 2.0}
        h.register_hook(lambda g: g * scales[id(h)])
        return h.exp()

    x = numbers(3).requires_grad_()
    y = functx.remat(f)(x).sum()
    for _ in range(2):
        assert_same(grad(y, x, retain_graph=True), grad(f(x).sum(), x), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("is_handed_out", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_that_hooks_change(state, is_handed_out, depth):
    """Whoever else has it would not find that, nor would the next backward pass."""
    handed_out = []

    def f(x):
        h = x.sin()
        s, read, write = state(h)
        if is_handed_out:
            handed_out.append(s)

        def hook(g):
            write(s, 3.0)
            return g * read(s)

        h.register_hook(hook)
        return h.exp()

    x = numbers(3).requires_grad_()
    y = depth(f)(functx.remat)(x).sum()
    if is_handed_out:
        with pytest.raises(functx.RematError, match="held outside of it"):
            grad(y, x)
        return
    grad(y, x, retain_graph=True)
    with pytest.raises(functx.ReplayError, match="in the forward of the region"):
        grad(y, x)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_key_of_the_region_that_the_program_has_taken_away(depth):
    """The hook of a replay puts its own there."""
    handed_out = []

    def f(x):
        key, s = object(), {}
        s[key] = 1.0
        handed_out.append(s)
        h = x.sin()

        def hook(g):
            s[key] = 3.0
            return g * s[key]

        h.register_hook(hook)
        return h.exp()

    x = numbers(3).requires_grad_()
    y = depth(f)(functx.remat)(x).sum()
    handed_out[0].clear()
    with pytest.raises(functx.RematError, match="held outside of it"):
        grad(y, x)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_tensor_that_a_recorded_gradient_was_added_to(depth):
    """A derivative may be taken of what is there: no number for the next pass to find."""

    def f(x):
        s = torch.zeros_like(x).detach()
        h = x.sin()

        def hook(g):
            s.add_(g)
            return g + s.clone()

        h.register_hook(hook)
        return h.exp()

    x = numbers(3).requires_grad_()
    y = depth(f)(functx.remat)(x).sum()
    grad(y, x, create_graph=True)
    with pytest.raises(functx.ReplayError, match="in the forward of the region"):
        grad(y, x)


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_array_that_has_another_shape_now(depth):
    handed_out = []

    def f(x):
        s = np.ones(3)
        handed_out.append(s)
        h = x.sin()
        h.register_hook(lambda g: g * torch.as_tensor(s * 1).sum(-1))
        return h.exp()

    x = numbers(3).requires_grad_()
    y = depth(f)(functx.remat)(x).sum()
    handed_out[0].resize((3, 1), refcheck=False)
    with pytest.raises(functx.ReplayError, match="in the forward of the region"):
        grad(y, x)
