"""Hooks on what tapes save, entered in a body: second derivatives, and what such hooks hold."""

import gc
import weakref

import pytest
import torch
from programs import check_program
from right import X

import functx

BODIES = {
    "the result": lambda x: x.sin().exp(),
    "what is between": lambda x: x.exp().sin(),
    "several": lambda x: (x.tanh() * x.sigmoid()).exp() * x,
    "a view": lambda x: x.exp().view(2, 2).mT.tanh().reshape(4),
}
HOOKS = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "another dtype": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.float(), lambda t: t.double()
    ),
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("order", [2, 3])
def test_derivatives(hooks, body, nested, order):
    """They keep the very tensors that nodes give, which hold these nodes."""

    def program(remat):
        def f(x):
            with HOOKS[hooks]():
                return BODIES[body](x)

        x = X.clone().requires_grad_()
        value = remat(lambda x: remat(f)(x).sin() if nested else f(x))(x)
        for _ in range(order - 1):
            (value,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
        return torch.autograd.grad(value.sin().sum(), x)

    check_program(program, eps=512)


def test_nothing_is_left():
    """Torch frees such a tape when it is pulled back; here nobody pulls back the tapes in it."""
    made = []

    def f(x):
        with torch.autograd.graph.save_on_cpu():
            h = x.exp()
            made.append(weakref.ref(h))
            return h.sin()

    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(functx.remat(f)(x).sum(), x, create_graph=True)
    torch.autograd.grad(first.sum(), x)
    gc.collect()
    assert len(made) > 1
    assert [ref() for ref in made] == [None] * len(made)


def test_what_a_hook_on_a_gradient_keeps_is_an_error():
    """What is held otherwise is not taken for what the tape holds."""

    def collect():
        kept = []
        while True:
            kept.append((yield))

    collector = collect()
    next(collector)

    def f(x):
        with torch.autograd.graph.save_on_cpu():
            h = x.exp()
            h.register_hook(lambda g: collector.send(g * x))
            return h.sin()

    x = X.clone().requires_grad_()
    out = functx.remat(f)(x)
    with pytest.raises(functx.RematError, match="otherwise than by return"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
