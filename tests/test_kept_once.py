"""What a region closes over is its node's to keep: a closure that outlives it keeps nothing."""

import functools

import pytest
import torch
from cases import numbers
from programs import check_program
from references import Operations, no_garbage_collection

import functx

pytestmark = pytest.mark.usefixtures("hooks")

LARGE = numbers(8, 8)
WAYS = {
    "cell": lambda f, x: lambda: f(x),
    "default": lambda f, x: lambda x=x: f(x),
    "partial": lambda f, x: functools.partial(f, x),
    "keyword": lambda f, x: functools.partial(lambda *, x: f(x), x=x),
    "cell of a function inside": lambda f, x: (lambda g: lambda: g())(lambda: f(x)),
}


def chain(way, f, x):
    for _ in range(4):
        x = functx.remat(WAYS[way](f, x))()
    return x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", [True, False])
def test_bytes(way, read):
    """Inputs that are read until they have been, and no other ones."""
    x = LARGE.clone().requires_grad_()
    with no_garbage_collection(), Operations() as operations:
        out = chain(way, lambda x: torch.sin(x) if read else 2 * x, x)
        assert operations.live == x.nbytes * (4 if read else 1)
        out.backward(torch.ones_like(x))
        x.grad = None
        assert operations.live == x.nbytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stack", ["backward", "grad", "vmap(grad)", "grad(grad)"])
def test_values(way, stack):
    def program(remat):
        def f(x):
            for _ in range(3):
                x = remat(WAYS[way](remat(torch.sin), x))() * x.shape[0]
            return x.square().sum()

        grad = functx.grad(f)
        if stack == "backward":
            x = LARGE.clone().requires_grad_()
            f(x).backward()
            return x.grad
        if stack == "grad":
            return grad(LARGE)
        if stack == "vmap(grad)":
            return functx.vmap(grad)(LARGE[:, :, None] * LARGE[0])
        return functx.grad(lambda x: grad(x).square().sum())(LARGE)

    check_program(program, eps=8)


def test_who_looks_at_memory_finds_it():
    """A record of operations does not show it."""

    def program(remat):
        x = LARGE.clone().requires_grad_()
        h = x.sin()
        out = remat(lambda x: x.cos() * sum(h.untyped_storage().tolist()[:8]) + h)(x)
        return torch.autograd.grad(out.sum(), x)

    check_program(program)
