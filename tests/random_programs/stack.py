"""Transforms around a whole program, and what is differentiated outside of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .world import numbers


def floats(tree: Any) -> list[torch.Tensor]:
    """The tensors in it that may have a gradient."""
    leaves = pytree.tree_leaves(tree)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def total(tree: Any) -> Any:
    """A number that every entry of every tensor contributes to, and not linearly."""
    return sum((torch.sin(t) * numbers(t.shape, 3)).sum() for t in floats(tree))


def layers(fx: Any) -> dict[str, Callable[..., Any]]:
    """Transforms of a function of a matrix and a vector into another one."""

    def gradient(f, argnums, form):
        if form == "has_aux":
            return fx.grad(lambda x, y: (total(out := f(x, y)), out), argnums, has_aux=True)
        return getattr(fx, form)(lambda x, y: total(f(x, y)), argnums)

    def pulled(f, times, x, y):
        out, pull = fx.vjp(f, x, y)
        cotangents = pytree.tree_map(lambda t: numbers(t.shape), out)
        return out, [pull(cotangents) for _ in range(times)]

    def mapped(f, in_dims, options, *given):
        batches = [
            t if dim is None else torch.stack([t, 0.5 * t + 0.1], dim)
            for t, dim in zip(given, in_dims)
        ]
        return fx.vmap(f, in_dims=in_dims, **options)(*batches)

    def pushed(f, x, y):
        return fx.jvp(f, (x, y), (numbers(x.shape, 20), numbers(y.shape, 40)))

    return {
        "gradient": gradient,
        "pullback": lambda f, times: partial(pulled, f, times),
        "pushforward": lambda f: partial(pushed, f),
        "jacobian": lambda f, mode, *args, **options: getattr(fx, mode)(f, *args, **options),
        "hessian": lambda f, argnums: fx.hessian(lambda x, y: total(f(x, y)), argnums),
        "per_example": lambda f, in_dims, **options: partial(mapped, f, in_dims, options),
    }


def finish(end: str, f: Callable[..., Any], world: dict[str, Any]) -> dict[str, Any]:
    """Call ``f``, and differentiate its result in plain autograd as ``end`` says.

    Returned is all that is to be the same with and without regions. Numbers are drawn in between.
    """
    x = (numbers((3, 3), 200) / 2).requires_grad_(end != "values")
    y = (numbers((3,), 220) / 2).requires_grad_(end != "values")
    net, generator = world["self"], world["generator"]
    leaves = {"x": x, "y": y, **dict(net.named_parameters())}
    out = f(x, y)
    found: dict[str, Any] = {"values": pytree.tree_map(_entries, out)}
    torch.rand(2)
    torch.rand(2, generator=generator)
    loss = total(floats(out)[:1] if end == "first only" else out)
    if end == "values" or not getattr(loss, "requires_grad", False):
        pass
    elif end in ("backward", "first only", "twice"):
        for _ in range(2 if end == "twice" else 1):
            loss.backward(retain_graph=end == "twice")
    else:
        of = [x] if end == "of the input only" else list(leaves.values())
        options = {"create_graph": True} if end == "double" else {}
        if end == "batched":
            options = {"grad_outputs": torch.arange(1.0, 4.0), "is_grads_batched": True}
        gradients = torch.autograd.grad(loss, of, allow_unused=True, **options)
        found["gradients"] = pytree.tree_map(_entries, gradients)
        if end == "double" and getattr(total(gradients), "requires_grad", False):
            torch.rand(2)
            total(gradients).backward()
    found |= {"gradient of " + name: _entries(t.grad) for name, t in leaves.items()}
    found |= {"buffer " + name: _entries(t) for name, t in net.named_buffers()}
    found["default generator"] = _entries(torch.get_rng_state())
    found["generator"] = _entries(generator.get_state())
    return found


def _entries(t: Any) -> Any:
    return t.detach().clone().numpy(force=True).copy() if isinstance(t, torch.Tensor) else t
