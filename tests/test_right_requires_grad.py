"""``requires_grad_`` in the body of a region: of what it is given, and of what it closes over."""

import pytest
import torch
from cases import numbers
from programs import check_program, identity
from references import assert_same
from torch import nn

import functx


def asks(x):
    return x.requires_grad_().sin()


def sets(x):
    x.requires_grad = True
    return x.sin()


def forces(x):
    """As a net does that gives forces: the gradient of an energy."""
    x.requires_grad_(True)
    energy = (x**3).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0].cos()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("f", [asks, sets, forces])
def test_of_an_argument(f, nested):
    def program(remat):
        x, w = numbers(4, 3), numbers(3, start=0.5).requires_grad_()

        def body(x):
            return remat(lambda x: f(x) * w)(x) if nested else f(x) * w

        for _ in range(5):  # known from the third on
            remat(body)(x).sum().backward()
        return x.requires_grad, x.grad, w.grad

    assert_same(program(functx.remat), program(identity), 8.0)


def test_used_by_another_region():
    def program(remat):
        x, w = numbers(4, 3), numbers(3, start=0.5).requires_grad_()
        y = remat(lambda x: asks(x) * w)(x)
        z = remat(lambda x: x.cos() * w)(x)
        return torch.autograd.grad((y * z).sum(), [x, w])

    assert_same(program(functx.remat), program(identity), 8.0)


def test_twice_differentiated():
    def program(remat):
        x = numbers(4, 3)
        y = remat(lambda x: asks(x) * x)(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)

    assert_same(program(functx.remat), program(identity), 8.0)


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_closed_over_is_frozen_meanwhile(nested):
    def program(remat):
        torch.manual_seed(0)
        net = nn.Linear(3, 3).double()
        x = numbers(4, 3).requires_grad_()

        def body(x):
            y = net(x).sin()
            net.requires_grad_(False)
            z = net(y).sin()
            net.requires_grad_(True)
            return z

        remat((lambda x: remat(body)(x)) if nested else body)(x).sum().backward()
        return x.grad, [p.grad for p in net.parameters()]

    assert_same(program(functx.remat), program(identity), 8.0)


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_closed_over_stays_frozen(nested):
    def program(remat):
        torch.manual_seed(0)
        net, head = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
        x = numbers(4, 3).requires_grad_()

        def body(x):
            net.requires_grad_(False)
            return head(net(x).sin())

        remat((lambda x: remat(body)(x)) if nested else body)(x).sum().backward()
        flags = [p.requires_grad for p in net.parameters()]
        return x.grad, flags, [p.grad for p in (*net.parameters(), *head.parameters())]

    assert_same(program(functx.remat), program(identity), 8.0)


def test_of_a_constant_raises():
    x, w = numbers(3), numbers(3).requires_grad_()
    with pytest.raises(functx.RematError, match=r"sets requires_grad=True.*before the region"):
        functx.remat(lambda: x.requires_grad_() * w)()
    assert not x.requires_grad


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_a_leaf_of_its_own_that_results_depend_on(order, nested):
    def program(remat):
        x = numbers(4, 3).requires_grad_()

        def body(x):
            v = torch.ones(3, dtype=x.dtype).requires_grad_()
            (g,) = torch.autograd.grad((v**4 * x).sum(), v, create_graph=True)
            return g * v.exp() * x

        y = remat((lambda x: remat(body)(x)) if nested else body)(x).sum()
        for _ in range(order):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = (g**2 * x).sum()
        return y, g

    check_program(program, eps=64.0)
