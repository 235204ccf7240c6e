"""Rule 1: random numbers are replayed whatever draws them, and from whatever object of a generator.

The kind: draws that no mode sees (custom operators that do not declare them, compiled kernels), and
a generator that torch hands out as several Python objects. Each program runs three times, so that
later runs follow the first one.
"""

from types import SimpleNamespace

import pytest
import torch
from cases import identity, numbers
from torch.utils._python_dispatch import _disable_current_modes

import functx

from .programs import STACKS, X, same, seeded

RUNS = 3


@torch.library.custom_op("functx_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws, and does not say so by a tag."""
    return x * torch.rand(x.shape, dtype=x.dtype)


@noisy.register_fake
def _(x):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def _backward(ctx, cotangent):
    x, output = ctx.saved_tensors
    return cotangent * output / x


noisy.register_autograd(_backward, setup_context=_save)
noisy.register_vmap(lambda info, dims, x: (noisy(x), 0))


@torch.library.custom_op("functx_tests::quiet", mutates_args=())
def quiet(x: torch.Tensor) -> torch.Tensor:
    """Does not draw."""
    RAN.append("quiet")
    return x.exp()


quiet.register_autograd(
    lambda ctx, cotangent: cotangent * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
RAN = []


def kernel(x):
    """A mask, as a kernel of an extension draws it: no mode sees it."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return torch.rand(x.shape, dtype=torch.float64)


class FusedDropout(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        mask = kernel(x)
        return x * mask, mask

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, cotangent, _):
        return cotangent * ctx.saved_tensors[0]


def later_draw(x):
    """Comes after the draw, so that a draw left out would shift it."""
    return x.sin() * torch.rand(x.shape, dtype=x.dtype)


UNSEEN = {
    "a custom operator": lambda x: later_draw(noisy(x.exp())),
    "a custom operator whose result nothing reads": lambda x: (noisy(x), later_draw(x))[1],
    "a kernel in a custom Function": lambda x: later_draw(FusedDropout.apply(x.exp())[0]),
    "a kernel on its own": lambda x: later_draw(x.exp() * kernel(x)),
    "the default generator under two names": lambda x: (
        later_draw(x) * torch.rand(3, generator=torch.default_generator, dtype=x.dtype)
    ),
    "the default generator, by name first": lambda x: (
        torch.rand(3, generator=torch.default_generator, dtype=x.dtype) * later_draw(x)
    ),
}
# torch has no transforms of custom operators with a backward, and this Function has one derivative.
WITHOUT_GRAD = {"a custom operator", "a custom operator whose result nothing reads"}
CASES = [
    *((name, "backward") for name in UNSEEN),
    *((name, "grad") for name in UNSEEN if name not in WITHOUT_GRAD),
    *((name, "double backward") for name in UNSEEN if "Function" not in name),
]


@pytest.mark.parametrize(("name", "stack"), CASES)
def test_what_a_replay_draws_is_what_the_forward_drew(name, stack):
    for _ in range(RUNS):
        program = lambda remat: STACKS[stack](lambda x: remat(UNSEEN[name])(x).sum(), X)
        exact = stack != "double backward"  # which adds up in another order
        same(seeded(program, functx.remat), seeded(program, identity), exact)


now = SimpleNamespace(dropped=0.0)


def drop_in_place(y):
    """What a kernel of an extension does to memory, past all modes; it may draw nothing."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        if now.dropped:
            y.mul_(torch.rand(y.shape, dtype=y.dtype) > now.dropped)


@pytest.mark.parametrize("stack", ["backward", "double backward"])
def test_a_kernel_may_begin_to_draw_in_a_run_that_follows_one_that_drew_nothing(stack):
    def f(x):
        y = x * 1
        drop_in_place(y)
        return y.sin()

    region = functx.remat(f)
    for now.dropped in (0.0, 0.0, 0.5, 0.5, 0.0):
        program = lambda remat: STACKS[stack](lambda x: remat(f)(x).sum(), X)
        same(seeded(program, lambda f: region), seeded(program, identity))
    now.dropped = 0.0


@pytest.mark.parametrize("check", ["default", "none"])
def test_one_generator_under_two_names_is_one_with_any_check(check):
    region = lambda f: functx.remat(f, determinism_check=check)
    program = lambda remat: STACKS["backward"](
        lambda x: remat(UNSEEN["the default generator under two names"])(x).sum(), X
    )
    same(seeded(program, region), seeded(program, identity), exact=True)


def test_in_a_region_in_a_region():
    outer = lambda remat: lambda x: remat(UNSEEN["a custom operator"])(x.cos()).exp()
    for _ in range(RUNS):
        program = lambda remat: STACKS["backward"](lambda x: remat(outer(remat))(x).sum(), X)
        same(seeded(program, functx.remat), seeded(program, identity), exact=True)


def test_a_custom_operator_that_does_not_draw_is_left_out_where_nothing_reads_it():
    """Rule 6: the pullback recomputes nothing that it does not read."""
    x = numbers(3).requires_grad_()
    for _ in range(RUNS):
        y = functx.remat(lambda x: x.sin() + quiet(x.detach()))(x)
        RAN.clear()
        y.sum().backward()
        assert RAN == []


def noisy_draw(x):
    return noisy(x.exp())


@pytest.mark.parametrize(
    ("draw", "stack"),
    [
        (later_draw, "backward"),
        (later_draw, "grad"),
        (later_draw, "double backward"),
        (noisy_draw, "backward"),
    ],
)
def test_what_is_drawn_from_a_forked_generator_is_drawn_again(draw, stack):
    """``fork_rng`` puts the state back, so entry and exit of the region look alike."""

    def forked(x):
        with torch.random.fork_rng():
            return draw(x)

    def program(remat):
        def loss(x):
            y = remat(forked)(x).sum()
            torch.rand(7)  # the replay finds the generator elsewhere
            return y

        return STACKS[stack](loss, X)

    for _ in range(RUNS):
        same(seeded(program, functx.remat), seeded(program, identity), stack != "double backward")


def test_a_generator_that_a_region_does_not_touch_is_not_set_back():
    x = numbers(3).requires_grad_()
    y = functx.remat(torch.sin)(x)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    y.sum().backward()
    assert torch.equal(torch.rand(2), expected)
