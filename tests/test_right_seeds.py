"""A region that seeds a generator: replayed with the same seed, and an error with another one."""

import os

import pytest
import torch
from cases import DTYPE
from right import X
from torch.nn.functional import dropout

import functx
from functx._remat import _code_names


def seeded_anew(x):
    torch.seed()
    return dropout(x)


def seeded_by_the_system(x):
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    return dropout(x)


def generator_seeded_anew(x):
    generator = torch.Generator()
    generator.seed()
    return x * torch.rand(x.shape, generator=generator, dtype=DTYPE)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("f", [seeded_anew, seeded_by_the_system, generator_seeded_anew])
def test_another_seed_in_each_run_is_an_error(f, nested):
    x = X.clone().requires_grad_()
    body = functx.remat(lambda x: functx.remat(f)(x).sin()) if nested else functx.remat(f)
    y = body(x)
    state = torch.get_rng_state()
    with pytest.raises(functx.RematError, match=r"seeds a generator|called with|other numbers"):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_seed_in_each_run():
    def f(x):
        torch.manual_seed(5)
        return dropout(x) * torch.rand(x.shape, generator=torch.Generator().manual_seed(3))

    def gradient(f):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)[0]

    assert torch.equal(gradient(functx.remat(f)), gradient(f))


def test_code_that_lies_where_other_code_lay():
    """What code names, the generators among it, is remembered by where the code lies."""
    names = _code_names.OfGlobals(lambda names, values: names)
    for i in range(20):
        f = eval(f"lambda x: x.name{i}")
        assert names(f)[1] == (f"name{i}",)
        del f
        _code_names._known.clear()  # as when there is much code


def forked(x):
    with torch.random.fork_rng():
        torch.seed()
        return dropout(x)


def forked_around_a_region(x):
    with torch.random.fork_rng():
        torch.seed()
        return functx.remat(dropout)(x)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("f", [forked, forked_around_a_region])
def test_another_seed_that_is_gone_again(f, nested):
    body = functx.remat(lambda x: functx.remat(f)(x).sin()) if nested else functx.remat(f)
    y = body(X.clone().requires_grad_())
    with pytest.raises(functx.ReplayError, match="departed"):
        y.sum().backward()


def test_the_same_seed_that_is_gone_again():
    """And a seed of the caller's between forward and backward is no matter."""
    torch.get_device_module.cache_clear()  # it makes a device the first time, and knows it later

    def body(x, training=True):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return dropout(x, training=training) * torch.rand(x.shape, dtype=DTYPE)

    for training in (True, False):
        x = X.clone().requires_grad_()
        y = functx.remat(lambda x, training=training: body(x, training))(x)
        torch.manual_seed(5)
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(body(x, training).sum(), x)[0])
