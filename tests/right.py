"""A program with and without remat: right everywhere, or an error that names the place.

``build(remat)`` makes a program: a function of one tensor, a module, or a pair of such a function
and the tensors it closes over that want a gradient.
"""

import gc

import torch
from cases import numbers
from programs import identity
from references import assert_same, no_garbage_collection
from torch import nn
from torch.utils import _pytree as pytree

import functx

WAYS = ("backward", "grad", "vmap")
X = numbers(4)


def weighted(tree):
    """One number from all floating point results, with a different weight for each entry."""
    leaves = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
    leaves = [t for t in leaves if t.is_floating_point() or t.is_complex()]
    return sum(
        (torch.view_as_real(t) if t.is_complex() else t).to(torch.float64).mul(w).sum()
        for i, t in enumerate(leaves)
        for w in [numbers(*(torch.view_as_real(t) if t.is_complex() else t).shape, start=2.0 + i)]
    )


def run(build, remat, way, x, mixed=True):
    """Results, gradients and state of one program, differentiated in one of `WAYS`."""
    torch.manual_seed(7)
    made = build(remat)
    f, leaves = made if isinstance(made, tuple) else (made, [])
    if isinstance(f, nn.Module):
        leaves = [p for p in f.parameters() if p.requires_grad]

    plain = []

    def loss(x):
        leaves, spec = pytree.tree_flatten(f(x))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        plain.append((spec, [None if isinstance(t, torch.Tensor) else t for t in leaves]))
        return weighted(tensors), tensors

    if way == "backward":
        x = x.detach().clone().requires_grad_()
        value, out = loss(x)
        wanted = [x, *leaves]
        gradients = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
    else:
        transformed = functx.grad(loss, has_aux=True)
        if way == "vmap":
            transformed = functx.vmap(transformed, randomness="different")
            x = torch.stack([x, x / 2, -x])
        gradient, out = transformed(x)
        gradients = [gradient]
        if leaves and mixed:
            gradients += torch.autograd.grad(
                weighted(gradient), leaves, allow_unused=True, materialize_grads=True
            )
    state = f.state_dict() if isinstance(f, nn.Module) else None
    return out, list(gradients), state, torch.get_rng_state(), plain


def check(build, x=X, ways=WAYS, eps=8.0, mixed=True):
    """Results bit by bit, gradients up to the order of a sum, state and generators as they were.

    ``mixed``: differentiate what comes out of a transform again, with respect to the leaves.
    """
    for way in ways:
        expected = run(build, identity, way, x, mixed)
        actual = run(build, functx.remat, way, x, mixed)
        assert_same((actual[0], actual[2:]), (expected[0], expected[2:]))
        assert_same(actual[1], expected[1], eps)
        assert any(g.abs().max() > 1e-3 for g in expected[1] if g.numel()) or not x.numel()


def right_or_raises(program, match=None, eps=8.0):
    """``program(remat)`` is as without remat, or raises functx's error with a full message.

    Where the program itself fails without remat, it has to fail with it.

    Args:
        program: takes ``remat``, returns a pytree of tensors.
        match: what an error must mention, beside the remedy.
        eps: as in `assert_same`.

    Returns:
        The error, if that is what came.
    """
    try:
        expected = program(identity)
    except RuntimeError:
        try:
            program(functx.remat)
        except RuntimeError as error:
            return error
        raise AssertionError("without remat it raises, with remat it does not") from None
    try:
        actual = program(functx.remat)
    except functx.RematError as error:
        message = str(error)
        assert len(message) > 80, f"says too little: {message}"
        assert match is None or match in message, f"does not mention {match!r}: {message}"
        return error
    assert_same(actual, expected, eps)
    return None


def freed(run, refs):
    """``run()`` adds weak references to ``refs``: nothing holds any of it, and no cycle does."""
    run()  # what is made at a first call
    refs.clear()
    gc.collect()
    with no_garbage_collection():
        run()
        assert refs
        assert not any(ref() is not None for ref in refs)


def settings():
    """Everything that an interrupted region might leave behind."""
    return {
        "levels": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward grad": torch.autograd.forward_ad._current_level,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hooks allowed": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "single level functions": torch._C._functorch.get_single_level_autograd_function_allowed(),
        "in-place requires grad": torch._C._functorch.get_inplace_requires_grad_allowed(),
        "garbage collector": gc.isenabled(),
    }
