"""Forward mode inside of regions."""

import torch

import functx

from .programs import numbers


def test_zeros_without_memory_meet_an_operator_of_a_number():
    """Called from a dispatch mode, that ends the process."""

    def f(x, t):
        return (x - t).pow(2).sum()

    def g(t):
        zeros = torch.zeros_like(t)
        return functx.hessian(f)(zeros, t).sum(0) * functx.grad(f)(zeros, t)

    t = numbers(3)
    torch.testing.assert_close(functx.jacrev(functx.remat(g))(t), functx.jacrev(g)(t))
