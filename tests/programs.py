"""Run a program with and without remat, and compare: how the engine's tests are written."""

import torch
from cases import numbers
from references import assert_same
from torch.utils import _pytree as pytree

import functx


def identity(f, **options):
    """What stands for ``functx.remat`` in the reference."""
    return f


def body(x):
    """A function whose derivative reads an input and two intermediates."""
    return torch.sin(x) * torch.exp(x)


def check_program(program, eps=0.0, nonzero=True):
    """``program(remat)`` returns the same with and without remat, and not only zeros."""
    ours, expected = program(functx.remat), program(identity)
    assert_same(ours, expected, eps)
    if nonzero:
        assert all(leaf.abs().max() > 1e-3 for leaf in pytree.tree_leaves(expected))


def check_call(f, *args, **kwargs):
    """Values and gradients of ``remat(f)`` and ``f``, for all floating point tensors in args."""

    def run(f):
        flat, spec = pytree.tree_flatten((args, kwargs))
        flat = [
            leaf.detach().requires_grad_()
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            else leaf
            for leaf in flat
        ]
        new_args, new_kwargs = pytree.tree_unflatten(flat, spec)
        out = f(*new_args, **new_kwargs)
        leaves = [
            leaf
            for leaf in pytree.tree_leaves(out)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        inputs = [t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad]
        value = sum((leaf * numbers(*leaf.shape, start=2.0)).sum() for leaf in leaves)
        return out, torch.autograd.grad(value, inputs, allow_unused=True)

    assert_same(run(functx.remat(f)), run(f))
