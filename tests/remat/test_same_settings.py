"""Rule 1: a replay finds the forward's settings and random numbers, and leaves no trace of it."""

import contextlib
import random

import numpy as np
import pytest
import torch
from cases import judged_by
from torch.nn.functional import dropout
from torch.utils import _pytree as pytree

import functx

from .programs import (
    QUICK,
    STACKS,
    X,
    batch,
    by_backward,
    check,
    every_stack,
    identity,
    numbers,
    same,
)

SOME = ["backward", "vmap(grad)", "grad(grad)"]
some_stacks = pytest.mark.parametrize("stack", SOME)


@contextlib.contextmanager
def flag(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


CUDA = torch.backends.cuda
FLAGS = {
    "default dtype": (torch, "get_default_dtype", "set_default_dtype", torch.float64),
    "deterministic": (
        torch,
        *("are_deterministic_algorithms_enabled", "use_deterministic_algorithms", True),
    ),
    "matmul precision": (
        torch,
        *("get_float32_matmul_precision", "set_float32_matmul_precision", "medium"),
    ),
    "flash attention": (CUDA, "flash_sdp_enabled", "enable_flash_sdp", False),
    "memory-efficient": (CUDA, "mem_efficient_sdp_enabled", "enable_mem_efficient_sdp", False),
    "cudnn attention": (CUDA, "cudnn_sdp_enabled", "enable_cudnn_sdp", False),
    "math attention": (CUDA, "math_sdp_enabled", "enable_math_sdp", False),
}


@pytest.mark.parametrize(
    ("name", "around", "stack"),
    [
        (name, around, SOME[(i + j) % 3])
        for i, name in enumerate(FLAGS)
        for j, around in enumerate(["forward", "backward"])
    ],
)
@judged_by(check)
def test_a_flag_reads_as_in_the_forward(remat, name, around, stack):
    module, *names, value = FLAGS[name]
    get, put = (getattr(module, name) for name in names)
    f = lambda x: x.sin() * x.sin() if get() == value else x.cos() * x.exp()

    with flag(get, put, get()):

        def loss(x):
            if around == "forward":
                with flag(get, put, value):
                    return remat(f)(x).sum()
            y = remat(f)(x)
            put(value)
            return y.sum()

        found = STACKS[stack](loss, X)
        assert (get() == value) is (around == "backward")
        return found


@some_stacks
@judged_by(check)
def test_the_default_device(remat, stack):
    f = lambda x: (x.sin() if torch.empty(1).device.type == "meta" else x).sin()

    def loss(x):
        with torch.device("meta"):
            y = remat(f)(x)
        return (y * remat(f)(x)).sum()

    found = STACKS[stack](loss, X)
    assert torch.empty(1).device.type == "cpu"
    return found


class TestAutocast:
    """Gradients that a cast weight gets in two places may be added in bfloat16 or float32."""

    W = numbers(4, 4, start=1.0).float()

    def program(self, remat, body, where, used_after=False, **options):
        def f(x, w):
            with (
                torch.autocast("cpu", **options) if where == "inside" else contextlib.nullcontext()
            ):
                return body(x, w)

        x, w = numbers(4, 4).float().requires_grad_(), self.W.clone().requires_grad_()
        with torch.autocast("cpu", **options) if where == "around" else contextlib.nullcontext():
            y = remat(f)(x, w)
            if used_after:
                y = torch.tanh(y @ w)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "backward"):
            return y, torch.autograd.grad(y.float().sum(), (x, w))

    @pytest.mark.parametrize(
        ("where", "cache"),
        [("inside", True), ("around", False), ("around", True), ("backward", True)],
    )
    def test_is_as_in_the_forward(self, where, cache):
        options = {"dtype": torch.bfloat16, "cache_enabled": cache}
        ours, plain = (
            self.program(remat, lambda x, w: torch.tanh(torch.tanh(x @ w)), where, **options)
            for remat in (functx.remat, identity)
        )
        assert ours[0].dtype == (torch.float32 if where == "backward" else torch.bfloat16)
        same(ours, plain, exact=True)
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()

    @pytest.mark.parametrize("used_after", [True, False])
    def test_a_cached_cast_loses_no_gradient(self, used_after):
        """The cast of a weight in a region is not what a later part of the forward uses."""

        body = lambda x, w: torch.tanh(torch.tanh(x @ w) @ w)
        ours, plain = (
            self.program(remat, body, "around", used_after, dtype=torch.bfloat16)
            for remat in (functx.remat, identity)
        )
        same(ours[0], plain[0], exact=True)
        torch.testing.assert_close(ours[1], plain[1], rtol=0.05, atol=0.05)


def noisy(x):
    """Dropout, and noise that multiplies: the derivative reads both."""
    return dropout(torch.sin(x), 0.5) * torch.randn_like(x).exp()


@every_stack
class TestDefaultGenerator:
    @judged_by(check)
    def test_several_regions_with_draws_between_and_after(self, remat, stack):
        def loss(x):
            for _ in range(2):
                x = remat(noisy)(x) + torch.rand(8)
            return (x * torch.rand(8)).sum()

        return STACKS[stack](loss, numbers(8)), torch.rand(2)

    @judged_by(check)
    def test_seeds_set_inside_and_between_forward_and_backward(self, remat, stack):
        def f(x):
            torch.manual_seed(11)
            return noisy(x)

        def loss(x):
            y = remat(f)(x)
            torch.manual_seed(12)
            return y.sum()

        return STACKS[stack](loss, numbers(8)), torch.rand(2)


@every_stack
class TestOwnGenerators:
    @judged_by(check)
    def test_an_argument_and_a_captured_one(self, remat, stack):
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
        loss = lambda w, x: (remat(noisy)(w) * x).sum()

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
    @judged_by(check)
    def test_all_restores_pythons_and_numpys(self, remat, stack):
        f = lambda x: (x * random.random()).sin() * np.random.rand() * torch.rand_like(x)

        def loss(x):
            y = remat(f, preserve_rng_state="all")(x)
            return y.sum() * random.random() * np.random.rand()

        return STACKS[stack](loss, X), random.random(), np.random.rand()

    @pytest.mark.parametrize(
        ("draw", "preserve"), [(random.random, True), (lambda: np.random.rand(), False)]
    )
    def test_otherwise_a_number_drawn_from_them_departs(self, draw, preserve, speed):
        f = lambda x: (x * draw()).sin()
        options = {"preserve_rng_state": preserve}
        speed.prepare(lambda: functx.remat(f, **options)(X.clone().requires_grad_()))
        with speed, pytest.raises(functx.ReplayError):
            self.gradient(f, **options)


class TestGradModeThatARegionLeaves:
    """A function may return with grad mode switched off, or on: rule 4 loses no gradient of it."""

    def off(x):
        y = x.sin() * x
        torch.set_grad_enabled(False)
        return y

    def off_and_a_constant(x):
        y = x.exp()
        torch.set_grad_enabled(False)
        return y, y * 2

    def within_a_region(x):
        y = functx.remat(TestGradModeThatARegionLeaves.off)(x.sin())
        torch.set_grad_enabled(True)
        return y.exp()

    LEAVING = (off, off_and_a_constant)

    @pytest.fixture(autouse=True)
    def _on(self):
        yield
        torch.set_grad_enabled(True)

    @pytest.mark.parametrize("f", LEAVING, ids=lambda f: f.__name__)
    def test_is_left_as_without_remat_and_results_keep_their_history(self, f):
        for _ in range(3):
            x = X.clone().requires_grad_()
            found, expected = [], []
            for remat, into in ((functx.remat, found), (identity, expected)):
                out = pytree.tree_leaves(remat(f)(x))
                into += [torch.is_grad_enabled(), [t.requires_grad for t in out]]
                torch.set_grad_enabled(True)
                into.append(torch.autograd.grad(out[0].sum(), x)[0])
                assert torch.is_grad_enabled()
            assert found[:2] == expected[:2]
            assert torch.equal(found[2], expected[2])

    @pytest.mark.parametrize("stack", ["backward", "double backward", "grad", "vmap(grad)"])
    @pytest.mark.parametrize("f", [*LEAVING, within_a_region], ids=lambda f: f.__name__)
    def test_under_transforms(self, f, stack):
        def loss(remat):
            def of(x):
                y = remat(f)(x)
                torch.set_grad_enabled(True)
                return pytree.tree_leaves(y)[0].sum()

            return of

        for _ in range(2):
            same(STACKS[stack](loss(functx.remat), X), STACKS[stack](loss(identity), X))
