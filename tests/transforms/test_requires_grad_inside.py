"""`requires_grad_()` inside of transforms: allowed where it loses no gradient, else an error.

The kind: torch refuses the call inside of every transform, and libraries make it all the same.
transformers and peft hang a hook on the embeddings that makes their output require grad, models of
forces call it on positions, meta-learning on clones. In functx's transforms it means what it means
in plain autograd. So here are: what it makes a leaf of, at each level and in replays; the ways in
which a gradient could get lost through it, each of which is an error or a warning; and that torch's
own transforms are as before when a call has ended.
"""

import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn

import functx
from functx import _torch

X = numbers(3, 4)
W = numbers(4, 4) / 2


def energy(x):
    return (x.sin() * x).sum()


def force_by_autograd(x, **options):
    x.requires_grad_()
    return torch.autograd.grad(energy(x), x, create_graph=True, **options)[0]


def force(x):
    return functx.grad(energy)(x)


STACKS = {
    "grad": lambda f: functx.grad(lambda x: f(x).square().sum()),
    "vmap(grad)": lambda f: functx.vmap(functx.grad(lambda x: f(x).square().sum())),
    "jacrev": lambda f: functx.jacrev(f),
    "grad(grad)": lambda f: functx.grad(
        lambda x: functx.grad(lambda x: f(x).square().sum())(x).sin().sum()
    ),
    "jvp": lambda f: lambda x: functx.jvp(f, (x,), (x.cos(),)),
    "hessian": lambda f: functx.hessian(lambda x: f(x).square().sum()),
    "vjp": lambda f: lambda x: functx.vjp(f, x)[1](x),
}


@pytest.mark.parametrize("stack", STACKS)
def test_forces_by_autograd_inside_are_those_of_grad(stack):
    assert_same(STACKS[stack](force_by_autograd)(X), STACKS[stack](force)(X), eps=32)


def test_a_detached_copy_is_a_leaf_of_its_own():
    def f(x):
        copy = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(energy(copy), copy)
        return (x * slope).sum()

    assert_same(functx.grad(f)(X), force(X), eps=4)
    assert_same(functx.vmap(functx.grad(f))(X), force(X), eps=4)


def test_a_captured_leaf_requires_grad_from_then_on():
    w = W.clone()

    def f(x):
        return (x @ w.requires_grad_()).square().sum()

    slope = functx.grad(f)(X)
    assert w.requires_grad
    assert slope.requires_grad
    plain = W.clone().requires_grad_()
    expected = functx.grad(lambda x: (x @ plain).square().sum())(X).sum()
    assert_same(*(torch.autograd.grad(s.sum(), t) for s, t in ((slope, w), (expected, plain))))


SWITCHED_OFF = {
    "requires_grad_(False)": lambda x: x.requires_grad_(False).square(),
    "an assignment": lambda x: setattr(x, "requires_grad", False) or x.square(),
    "one of several": lambda x: x[0].square() + x[1].requires_grad_(False),
}


@pytest.mark.parametrize("way", SWITCHED_OFF)
@pytest.mark.parametrize("api", ["grad", "vmap(grad)", "jacrev", "vjp"])
def test_what_is_differentiated_can_not_be_switched_off(way, api):
    f, x = SWITCHED_OFF[way], (X, X) if way == "one of several" else X
    scalar = lambda x: f(x).sum()
    call = {
        "grad": lambda: functx.grad(scalar)(x),
        "vmap(grad)": lambda: functx.vmap(functx.grad(scalar))(x),
        "jacrev": lambda: functx.jacrev(f)(x),
        "vjp": lambda: functx.vjp(f, x),
    }[api]
    with pytest.raises(RuntimeError, match=r"turned requires_grad off .*argnums="):
        call()


def test_a_result_that_a_backward_pass_made_a_constant_warns():
    def f(x):
        x.requires_grad_()
        return torch.autograd.grad(energy(x), x)[0].square().sum()  # create_graph is missing

    for transformed in (functx.grad(f), functx.vmap(functx.grad(f))):
        with pytest.warns(
            RuntimeWarning, match=r"all derivatives are zeros.*create_graph=True"
        ) as told:
            assert_same(transformed(X), torch.zeros_like(X))
        assert told[0].filename == __file__


def test_a_constant_without_a_backward_pass_is_zeros_as_in_torch():
    def f(x):
        functx.grad(energy)(x)  # functx's own backward passes do not count
        return W.sum()

    assert_same(functx.grad(f)(X), torch.zeros_like(X))


def layer(h, w):
    return (h @ w).sin()


@pytest.mark.parametrize("whole", [False, True], ids=["beside a region", "inside of a region"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_hook_that_calls_it_changes_no_gradient(whole, frozen):
    plain, hooked = (nn.Linear(4, 4).double().requires_grad_(not frozen) for _ in range(2))
    hooked.load_state_dict(plain.state_dict())

    def hook(module, args, output):
        output.requires_grad_(True)  # its result is no output of the module

    hooked.register_forward_hook(hook)

    def loss(embed):
        if whole:
            return functx.remat(lambda w, x: layer(embed(x), w).square().sum())
        return lambda w, x: functx.remat(layer)(embed(x), w).square().sum()

    batch = lambda f: lambda w: functx.vmap(f, (None, 0))(w, X)
    stacks = [
        lambda f: functx.grad(f)(W, X),
        lambda f: functx.vmap(functx.grad(f), (None, 0))(W, X),
        lambda f: functx.grad(lambda w: batch(f)(w).sum())(W),
        lambda f: functx.jacrev(batch(f))(W),
        lambda f: functx.grad(lambda w: functx.grad(f, 1)(w, X).sin().sum())(W),
        lambda f: functx.jvp(lambda w: functx.grad(f)(w, X), (W,), (W.cos(),)),
        lambda f: functx.per_sample.grads(f)(W, X),
        lambda f: functx.per_sample.clipped_sum(f, max_norm=0.1, chunk_size=2)(W, X),
        lambda f: torch.autograd.grad(batch(f)(w := W.clone().requires_grad_()).sum(), w),
        lambda f: batch(f)(W),
    ]
    for stack in stacks:
        assert_same(stack(loss(hooked)), stack(loss(plain)))


def test_a_region_in_forward_mode_refuses_what_requires_grad_there():
    """A region has no tape at a level of jvp, so a part of the gradient would be missing."""

    def slope(x, f):
        x = (x * 1).requires_grad_()
        return torch.autograd.grad((f(x) + x.cos()).sum(), x)[0]

    ours = functx.jvp(lambda x: slope(x, torch.sin), (X,), (X,))
    assert_same(ours, functx.jvp(lambda x: x.cos() - x.sin(), (X,), (X,)))
    for f in (functx.remat(torch.sin), lambda x: functx.remat(torch.sin)(x * 1)):
        with pytest.raises(functx.RematError, match="disable_input_require_grads"):
            functx.jvp(lambda x: slope(x, f), (X,), (X,))  # noqa: B023


def test_a_mapped_value_still_has_no_tape():
    def f(x):
        x.requires_grad_()
        return torch.autograd.grad(energy(x), x)[0]

    with pytest.raises(RuntimeError, match="does not require grad"):
        functx.vmap(f)(X)
    with pytest.raises(RuntimeError, match="does not require grad"):
        functx.grad(lambda x: functx.vmap(f)(x).sum())(X)


def test_transforms_inside_leave_it_allowed():
    def f(x):
        for inner in (functx.grad(energy), functx.jacrev(torch.sin), functx.vmap(torch.sin)):
            inner(x)
        functx.remat(torch.sin)(x)
        return force_by_autograd(x).sum()

    assert_same(functx.grad(f)(X), functx.grad(lambda x: force(x).sum())(X), eps=8)


def test_torchs_error_after_a_backward_pass_inside_names_grad():
    def f(x):
        return force_by_autograd(x.detach()) + force_by_autograd(x)

    with pytest.raises(RuntimeError, match=r"to call Tensor\.requires_grad_") as caught:
        functx.grad(lambda x: f(x).sum())(X)
    assert "Use functx.grad there" in caught.value.__notes__[0]
    assert "disable_input_require_grads" in caught.value.__notes__[0]


@pytest.mark.parametrize("fails", [False, True])
def test_torchs_own_transforms_refuse_it_as_before(fails):
    def f(x):
        assert _torch.requires_grad_is_allowed()
        return 1 / 0 if fails else x.sum()

    for call in (
        lambda: functx.grad(f)(X),
        lambda: functx.vmap(f)(X),
        lambda: functx.jvp(f, (X,), (X,)),
        lambda: functx.jacfwd(f)(X),
        lambda: functx.vmap(functx.grad(functx.remat(f)))(X),
    ):
        try:
            call()
        except ZeroDivisionError:
            assert fails
        assert not _torch.requires_grad_is_allowed()
    with pytest.raises(RuntimeError, match="requires_grad_"):
        torch.func.grad(lambda x: x.requires_grad_().sum())(X)
