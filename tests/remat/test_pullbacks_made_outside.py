"""A region may call a pullback that was made outside, where nothing is lost (rule 4)."""

import pytest
import torch
from cases import numbers
from references import assert_same

import functx

MATRIX = numbers(4, 4) @ numbers(4, 4).T + torch.eye(4, dtype=torch.float64) * 3


def energy(matrix, p):
    return 0.5 * p @ matrix @ p + 0.1 * (matrix @ p).pow(4).sum()


def by_vjp(library, matrix, p):
    pullback = library.vjp(library.grad(lambda p: energy(matrix, p)), p)[1]
    return lambda v: pullback(v)[0]


def by_linearize(library, matrix, p):
    return functx.linearize(functx.grad(lambda p: energy(matrix, p)), p)[1]


def by_a_tape(library, matrix, p):
    p = p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(matrix, p), p, create_graph=True)
    return lambda v: torch.autograd.grad(gradient, p, v, retain_graph=True)[0]


def by_an_edge(library, matrix, p):
    p = p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(matrix, p), p, create_graph=True)
    edge = torch.autograd.graph.get_gradient_edge(gradient)
    return lambda v: torch.autograd.grad(
        outputs=edge, inputs=[p], grad_outputs=v, retain_graph=True
    )[0]


def solved(product, b, steps=3):
    """Conjugate gradients."""
    x, r = torch.zeros_like(b), b
    d = r
    for _ in range(steps):
        along = product(d)
        rate = (r @ r) / (d @ along)
        x, new = x + rate * d, r - rate * along
        d, r = new + (new @ new) / (r @ r) * d, new
    return x


PRODUCTS = [by_vjp, by_linearize, by_a_tape, by_an_edge]


@pytest.mark.parametrize("library", [functx, torch.func], ids=["functx", "torch.func"])
@pytest.mark.parametrize("make", PRODUCTS, ids=lambda make: make.__name__)
def test_a_solver_with_a_product_made_outside(make, library):
    product = make(library, MATRIX, numbers(4, start=1.0))

    def results(region):
        solve = region(lambda b: solved(product, b) * b)
        b = numbers(4, start=2.0).requires_grad_()
        plain = torch.autograd.grad(solve(b).sum(), b)
        if make in (by_a_tape, by_an_edge):
            return plain
        loss = lambda b: solve(b).square().sum()
        bs = numbers(3, 4, start=2.0)
        return (
            *(plain, functx.grad(loss)(b), functx.vmap(functx.grad(loss))(bs)),
            functx.hessian(loss)(bs[0]),
        )

    assert_same(results(functx.remat), results(lambda f: f), eps=1024)


@pytest.mark.parametrize("differentiated", ["matrix", "point"])
@pytest.mark.parametrize("make", PRODUCTS, ids=lambda make: make.__name__)
def test_a_gradient_through_that_tape_is_refused_or_right(make, differentiated):
    matrix, p, b = MATRIX.clone(), numbers(4, start=1.0), numbers(4, start=2.0).requires_grad_()
    leaf = (matrix if differentiated == "matrix" else p).requires_grad_()
    product = make(functx, matrix, p)
    if make in (by_a_tape, by_an_edge):  # a constant, also without remat
        y = functx.remat(lambda b: solved(product, b) * b)(b)
        assert torch.autograd.grad(y.sum(), leaf, allow_unused=True) == (None,)
    else:
        with pytest.raises(functx.RematError, match="calls a pullback that was made outside"):
            functx.remat(lambda b: solved(product, b) * b)(b)


def test_a_pullback_of_a_level_that_has_ended_is_an_error():
    """The replay comes when the transform in which the pullback was made has ended."""

    def loss(b):
        product = by_vjp(functx, b * 0 + MATRIX.detach(), b.detach())
        return functx.remat(lambda v: solved(product, v))(b).sum()

    with pytest.raises(functx.RematError, match=r"has ended|made outside"):
        functx.grad(loss)(numbers(4, start=2.0))


def test_backward_of_a_tape_made_outside_is_refused():
    p, x = numbers(4).requires_grad_(), numbers(4).requires_grad_()
    y = energy(MATRIX, p)

    def f(x):
        y.backward(retain_graph=True)
        return x.sin()

    with pytest.raises(functx.RematError, match="differentiates a tensor that was computed"):
        functx.remat(f)(x)
