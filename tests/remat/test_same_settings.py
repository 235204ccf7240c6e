"""Rule 1: a replay finds the forward's autocast, grad mode, default device and dtype, SDPA
backends, deterministic and matmul-precision flags; and afterwards they are the user's again.

Each loss enters a setting for the forward only, and is differentiated when it has returned.
"""

import contextlib

import pytest
import torch
from references import count
from torch.nn.attention import SDPBackend, sdpa_kernel

import functx

from .programs import STACKS, X, Y, check, identity, numbers, same

some_stacks = pytest.mark.parametrize("stack", ["backward", "vmap(grad)", "grad(grad)"])


@contextlib.contextmanager
def flag(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype):
    return flag(torch.get_default_dtype, torch.set_default_dtype, dtype)


CUDA = torch.backends.cuda
FLAGS = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
    ),
    "flash attention": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, False),
    "memory-efficient attention": (
        CUDA.mem_efficient_sdp_enabled,
        CUDA.enable_mem_efficient_sdp,
        False,
    ),
    "math attention": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp, False),
}
SOME = ["backward", "vmap(grad)", "grad(grad)"]


@pytest.mark.parametrize(
    ("name", "around", "stack"),
    [
        (name, around, SOME[(i + j) % 3])
        for i, name in enumerate(FLAGS)
        for j, around in enumerate(["forward", "backward"])
    ],
)
def test_a_flag_reads_as_in_the_forward(name, around, stack):
    """Set around the forward only, or for the backward only; and it stays as it was set."""
    get, put, value = FLAGS[name]

    def f(x):
        return x.sin() * x.sin() if get() == value else x.cos() * x.exp()

    def program(remat):
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

    check(program)


@some_stacks
def test_the_default_device(stack):
    def f(x):
        return (x.sin() if torch.empty(1).device.type == "meta" else x).sin()

    def program(remat):
        def loss(x):
            with torch.device("meta"):
                y = remat(f)(x)
            return (y * remat(f)(x)).sum()

        found = STACKS[stack](loss, X)
        assert torch.empty(1).device.type == "cpu"
        return found

    check(program)


class TestGradMode:
    @some_stacks
    def test_a_part_without_it_stays_one(self, stack):
        def f(x):
            with torch.no_grad():
                scale = x.exp()
                assert not torch.is_grad_enabled()
            return (x.sin() if torch.is_grad_enabled() else x).sin() * scale

        check(lambda remat: STACKS[stack](lambda x: remat(f)(x).sum(), X))

    def test_a_region_without_it_records_nothing(self):
        x = X.clone().requires_grad_()
        with torch.no_grad():
            y = functx.remat(lambda x: x.sin() * float(torch.is_grad_enabled()))(x)
        assert not y.requires_grad
        same(y, torch.zeros(3, dtype=y.dtype))


def attention(x):
    q = x * torch.ones(1, 2, 4, 1, dtype=x.dtype)
    return torch.nn.functional.scaled_dot_product_attention(q, q.sin(), q.cos())


@pytest.mark.parametrize("stack", ["double backward", "vmap(grad)"])
def test_attention_runs_by_the_backend_chosen_around_the_forward(stack):
    def program(remat):
        def loss(x):
            with sdpa_kernel(SDPBackend.MATH):
                return remat(attention)(x).sin().sum()

        return STACKS[stack](loss, X)

    check(program)
    counts = count(program, functx.remat)
    assert not any("flash" in name for name in counts)


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

        def body(x, w):
            return torch.tanh(torch.tanh(x @ w))

        ours, plain = (
            self.program(remat, body, where, **options) for remat in (functx.remat, identity)
        )
        assert ours[0].dtype == (torch.float32 if where == "backward" else torch.bfloat16)
        same(ours, plain, exact=True)
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()

    @pytest.mark.parametrize("used_after", [True, False])
    def test_a_cached_cast_loses_no_gradient(self, used_after):
        """The cast of a weight in a region is not what a later part of the forward uses."""

        def body(x, w):
            return torch.tanh(torch.tanh(x @ w) @ w)

        ours, plain = (
            self.program(remat, body, "around", used_after, dtype=torch.bfloat16)
            for remat in (functx.remat, identity)
        )
        same(ours[0], plain[0], exact=True)
        torch.testing.assert_close(ours[1], plain[1], rtol=0.05, atol=0.05)

    @pytest.mark.parametrize("stack", ["vmap(grad)", "backward(vmap)"])
    def test_under_transforms(self, stack):
        def program(remat):
            w = numbers(3, 3).float()

            def loss(x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y = remat(lambda x: torch.tanh(torch.tanh(x @ w)))(x)
                assert y.dtype == torch.bfloat16
                return y.float().sum()

            return STACKS[stack](loss, Y.float())

        check(program, exact=True)
