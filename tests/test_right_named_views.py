"""A name given to a view: what the operation gave is kept, as that laid it out."""

import pytest
import torch
from cases import numbers
from references import Operations, assert_same, count, no_garbage_collection

import functx
from functx import _unwritten
from functx import checkpoint_name as name
from functx import checkpoint_policies as cp
from functx._unwritten import unwritten

X = numbers(3, 3)
PHASE = 1 + 2j
KEEP = cp.save_only_these_names("a")
OFFLOAD = cp.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["a"],
    offload_src="device",
    offload_dst="pinned_host",
)


def transposed(x):
    y = x.sin().exp()
    return name(y.t(), "a").sin() * y.cos()


def flat(x):
    y = x.sin().exp()
    return name(y.reshape(-1), "a").sin().reshape(y.shape) * y.cos()


def a_row_more(x):
    y = x.sin().exp()
    return (name(y[None], "a").sin() * y.cos())[0]


def a_part_as_large_as_the_whole(x):
    y = x.sin().exp()
    return name(y[:1].expand(3, 3), "a").sin() * y.cos()


def conjugate(x):
    y = torch.exp(x * PHASE)
    return (name(y.conj(), "a").sin() * y.cos()).real


def real_pairs(x):
    y = torch.exp(x * PHASE)
    return name(torch.view_as_real(y), "a")[..., 0].sin() * y.cos().real


def written_to_then_transposed(x):
    y = (x * 1).exp_()
    return name(y.t(), "a").sin() * y.cos()


def written_to_then_conjugate(x):
    y = (x * PHASE).exp_()
    return (name(y.conj(), "a").sin() * y.cos()).real


def written_to_through_a_conjugate(x):
    y = x * PHASE
    y.conj().copy_(torch.exp(y * 1))
    return (name(y.t(), "a").sin() * y.cos()).real


def written_to_through_the_real_part(x):
    y = x * PHASE
    y.real.exp_()
    return (name(y.t(), "a").sin() * y.cos()).real


def written_to_and_a_part_as_large(x):
    y = (x * 1).exp_()
    return name(y[:1].expand(3, 3), "a").sin() * y.cos()


def nothing_at_all(x):
    return name(x[:0].exp().t(), "a").sum() + x.sin()


def in_a_vmap_inside(x):
    """As a random nest had it: the replay saw another shape."""
    y = x.exp()
    return functx.vmap(lambda v: name(v, "a"))(y.reshape(-1, 9)).reshape(y.shape).sin() * y


@torch.library.custom_op("functx_tests::exp_in_more_memory", mutates_args=())
def exp_in_more_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:1], x.exp()])[1:]


def _cotangent(ctx, g):
    return g * ctx.saved_tensors[0].exp()


exp_in_more_memory.register_autograd(
    _cotangent, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def more_than_the_result(x):
    y = exp_in_more_memory(x.reshape(-1))
    return name(torch.as_strided(y.detach(), (10,), (1,), 0), "a")[1:].sin() * y.sin()


def written_to_through_a_negative_view(x):
    """Which `torch.vmap` has no rule for."""
    y = x * PHASE
    y.conj().imag.copy_(x.exp())
    return (name(y.t(), "a").sin() * y.cos()).real


PROGRAMS = [
    *(transposed, flat, a_row_more, a_part_as_large_as_the_whole, conjugate, real_pairs),
    *(written_to_then_transposed, written_to_then_conjugate, written_to_through_a_conjugate),
    *(written_to_through_the_real_part, written_to_and_a_part_as_large, nothing_at_all),
    in_a_vmap_inside,
]


@pytest.mark.parametrize("policy", [KEEP, OFFLOAD], ids=["kept", "offloaded"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_without_remat(program, policy):
    region = functx.remat(program, policy=policy)
    assert_same(base_level(region, X), base_level(program, X))
    batch = torch.stack([X, X * 0.5])
    ours, expected = (
        functx.vmap(functx.grad(lambda x, f=f: f(x).sum()))(batch) for f in (region, program)
    )
    assert_same(ours, expected)


@pytest.mark.parametrize(
    "program",
    [more_than_the_result, written_to_through_a_negative_view],
    ids=lambda p: p.__name__,
)
def test_as_without_remat_at_the_base_level(program):
    assert_same(base_level(functx.remat(program, policy=KEEP), X), base_level(program, X))


def base_level(f, x):
    """First and second derivatives, on plain autograd."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return gradient, *torch.autograd.grad(gradient.square().sum(), x)


@pytest.mark.parametrize(
    ("program", "exponentials"),
    [(transposed, 0), (flat, 0), (a_row_more, 0), (a_part_as_large_as_the_whole, 1)],
    ids=lambda p: getattr(p, "__name__", None),
)
def test_what_is_named_does_not_run_again(program, exponentials):
    """A view that is all of a value names the value; a part of one is kept by itself."""
    region = functx.remat(program, policy=KEEP)
    x = X.clone().requires_grad_()
    out = region(x).sum()
    with Operations() as pullback:
        torch.autograd.grad(out, x)
    assert pullback.counts["exp"] == exponentials
    twice = count(functx.grad(lambda x: region(x).sum()), X)["exp"]
    assert twice == 1 + exponentials


def test_a_name_on_a_view_holds_nothing():
    """What no pullback comes by is let go, though it had a name."""

    def f(x):
        y = name(x.sin().t(), "a")
        return name(y.exp().t(), "a") * 1.5

    region = functx.remat(f, policy=KEEP)
    x = X.clone().requires_grad_()
    with no_garbage_collection(), Operations() as forward:
        out = region(x)
        assert forward.live == 2 * x.nbytes
    assert_same(base_level(region, X), base_level(f, X))
    del out


def test_several_that_were_written_to_have_memory_of_their_own_in_replays(monkeypatch):
    """What a replay leaves out is all over one stretch of memory, where nobody may write."""
    monkeypatch.setattr(_unwritten, "unwritten", unwritten)

    def f(x, y):
        a, b = x.sin().mul_(2), y.cos().mul_(3)
        return name(a, "a").cos() * name(b, "a").cos()

    given = numbers(100).requires_grad_(), numbers(100, start=2.0).requires_grad_()
    both = f, functx.remat(f, policy=KEEP)
    assert_same(*(torch.autograd.grad(g(*given).sum(), given) for g in both))
