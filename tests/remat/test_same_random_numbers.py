"""Rule 1: a replay draws torch's random numbers as the forward did, and leaves no trace of it.

The reference is the same program without remat from the same seed: equal gradients mean that the
replay drew the same numbers, and `check` compares where the generator is left.
"""

import random

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

import functx

from .programs import STACKS, X, batch, by_backward, check, numbers, same

QUICK = ("backward", "grad(grad)", "vmap(grad)", "jvp(grad)")
every_stack = pytest.mark.parametrize(
    "stack", [pytest.param(s, marks=() if s in QUICK else pytest.mark.sweep) for s in STACKS]
)


def noisy(x):
    """Dropout, and noise that multiplies: the derivative reads both."""
    return dropout(torch.sin(x), 0.5) * torch.randn_like(x).exp()


@every_stack
class TestDefaultGenerator:
    def test_several_regions_with_draws_between_and_after(self, stack):
        def program(remat):
            def loss(x):
                for _ in range(2):
                    x = remat(noisy)(x) + torch.rand(8)
                return (x * torch.rand(8)).sum()

            return STACKS[stack](loss, numbers(8)), torch.rand(2)

        check(program)

    def test_regions_in_regions(self, stack):
        def program(remat):
            def inner(x):
                return remat(noisy)(x) + noisy(x)

            def loss(x):
                return remat(lambda x: noisy(remat(inner)(noisy(x))))(x).sum()

            return STACKS[stack](loss, numbers(8))

        check(program)

    def test_seeds_set_inside_and_between_forward_and_backward(self, stack):
        def program(remat):
            def f(x):
                torch.manual_seed(11)
                return noisy(x)

            def loss(x):
                y = remat(f)(x)
                torch.manual_seed(12)
                return y.sum()

            return STACKS[stack](loss, numbers(8)), torch.rand(2)

        check(program)


@every_stack
class TestOwnGenerators:
    def test_an_argument_and_a_captured_one(self, stack):
        """Also where it is used outside between forward and backward; its state is restored."""

        def program(remat):
            given, captured = (torch.Generator().manual_seed(i) for i in (5, 6))

            def f(x, generator):
                own = torch.Generator().manual_seed(5)
                x = x * torch.rand(3, generator=own, dtype=x.dtype)
                a = torch.rand(3, generator=generator, dtype=x.dtype)
                b = torch.rand(3, generator=captured, dtype=x.dtype)
                return (x * a).sin() * b * torch.rand_like(x)

            def loss(x):
                y = remat(f)(remat(f)(x, given), generator=given)
                torch.rand(2, generator=given)
                captured.manual_seed(7)
                return y.sum()

            return STACKS[stack](loss, X), given.get_state(), captured.get_state()

        check(program)


@pytest.mark.parametrize(
    ("stack", "randomness", "batched"),
    [
        ("vmap(grad)", "different", True),
        ("vmap(grad)", "same", False),
        ("grad(vmap)", "different", False),
        ("backward(vmap)", "same", True),
        ("backward(vmap)", "different", False),
        ("vmap", "same", False),
    ],
)
def test_both_kinds_of_randomness_of_vmap(stack, randomness, batched):
    """Also where no input of the region is batched: its random numbers may still be."""

    def program(remat):
        def loss(w, x):
            return (remat(noisy)(w) * x).sum()

        def mapped(f):
            dims = (0 if batched else None, 0)
            return lambda w: functx.vmap(f, dims, randomness=randomness)(w, batch(X))

        w = batch(X) if batched else X
        if stack == "vmap":
            return mapped(loss)(w)
        if stack == "vmap(grad)":
            return mapped(functx.grad(loss))(w)
        if stack == "grad(vmap)":
            return functx.grad(lambda w: mapped(loss)(w).sum())(w)
        return by_backward(lambda w: mapped(loss)(w).sum(), w)

    check(program, replays=stack != "vmap")


def test_masks_differ_between_examples_where_they_should():
    for randomness, distinct in (("different", 4), ("same", 1)):
        gradient = functx.grad(lambda x: functx.remat(noisy)(x).sum())
        found = functx.vmap(gradient, randomness=randomness)(torch.ones(4, 64))
        assert len(torch.unique(found, dim=0)) == distinct


@pytest.mark.parametrize("remat", [functx.remat, lambda f: f])
def test_randomness_error_raises_as_without_remat(remat):
    for f in (remat(noisy), functx.grad(lambda x: remat(noisy)(x).sum())):
        with pytest.raises(RuntimeError, match="randomness"):
            functx.vmap(f)(batch(X))


@pytest.mark.parametrize("jacobian", ["jacrev", "jacfwd", "hessian"])
def test_all_rows_of_a_jacobian_see_one_mask(jacobian):
    def program(remat):
        options = {} if jacobian == "jacrev" else {"randomness": "same"}
        f = remat(noisy) if jacobian != "hessian" else (lambda x: remat(noisy)(x).sum())
        transform = functx.jacfwd if jacobian == "jacfwd" else functx.jacrev
        if jacobian == "hessian":
            return functx.jacfwd(functx.jacrev(f), **options)(X)
        return transform(f, **options)(X)

    check(program, replays=jacobian != "jacfwd")


class TestPreserveRngState:
    """``True`` restores torch's generators, ``"all"`` Python's and NumPy's too, ``False`` none."""

    @staticmethod
    def gradient(f, **options):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        x = X.clone().requires_grad_()
        y = functx.remat(f, **options)(x)
        states = (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
        (gradient,) = torch.autograd.grad(y.sum(), x)
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return y.detach(), gradient, states == after

    def test_false_draws_anew(self):
        y, gradient, untouched = self.gradient(
            lambda x: x.sin() * torch.rand_like(x), preserve_rng_state=False
        )
        assert not torch.allclose(gradient, y / X.tan())
        assert not untouched

    @pytest.mark.parametrize("stack", QUICK)
    def test_all_restores_pythons_and_numpys(self, stack):
        def f(x):
            return (x * random.random()).sin() * np.random.rand() * torch.rand_like(x)

        def program(remat):
            def loss(x):
                y = remat(f, preserve_rng_state="all")(x)
                return y.sum() * random.random() * np.random.rand()

            return STACKS[stack](loss, X), random.random(), np.random.rand()

        check(program)

    @pytest.mark.parametrize(("draw", "preserve"), [(random.random, True), (np.random.rand, False)])
    def test_otherwise_a_number_drawn_from_them_departs(self, draw, preserve):
        with pytest.raises(functx.ReplayError):
            self.gradient(lambda x: (x * draw()).sin(), preserve_rng_state=preserve)


def test_the_comparison_can_fail():
    """A recompute that draws anew is seen."""
    redrawn = lambda f, **options: functx.remat(f, preserve_rng_state=False)  # noqa: E731

    def program(remat):
        return STACKS["vmap(grad)"](lambda x: remat(noisy)(x).sum(), X)

    torch.manual_seed(3)
    expected = program(lambda f: f)
    torch.manual_seed(3)
    with pytest.raises(AssertionError):
        same(program(redrawn), expected)
