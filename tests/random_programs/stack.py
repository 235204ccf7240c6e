"""Transforms around a whole program, and what is differentiated outside of them."""

from __future__ import annotations

from collections.abc import Callable
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

    def gradient(f, argnums=0, form="grad"):
        def scalar(x, y):
            out = f(x, y)
            return (total(out), out) if form == "has_aux" else total(out)

        if form == "has_aux":
            return fx.grad(scalar, argnums, has_aux=True)
        return getattr(fx, form)(scalar, argnums)

    def pullback(f, times=1):
        def transformed(x, y):
            out, pull = fx.vjp(f, x, y)
            pulled = [
                pull(pytree.tree_map(lambda t: numbers(t.shape, n), out)) for n in range(times)
            ]
            return out, pulled

        return transformed

    def pushforward(f):
        def transformed(x, y):
            return fx.jvp(f, (x, y), (numbers(x.shape, 20), numbers(y.shape, 40)))

        return transformed

    def jacobian(f, mode, argnums=0, **options):
        return getattr(fx, mode)(f, argnums, **options)

    def hessian(f, argnums=0):
        return fx.hessian(lambda x, y: total(f(x, y)), argnums)

    def per_example(f, in_dims, **options):
        def transformed(x, y):
            given = [
                t if dim is None else torch.stack([t, 0.5 * t + 0.1], dim)
                for t, dim in zip((x, y), in_dims)
            ]
            return fx.vmap(f, in_dims=in_dims, **options)(*given)

        return transformed

    made = (gradient, pullback, pushforward, jacobian, hessian, per_example)
    return {f.__name__: f for f in made}


def _between(generator: torch.Generator) -> None:
    """Draw numbers between forward and backward: a replay is to draw what the forward drew."""
    torch.rand(2)
    torch.rand(2, generator=generator)


def _gradients(out: Any, of: Any, **options: Any) -> Any:
    if not getattr(out, "requires_grad", False):
        return None
    return torch.autograd.grad(out, of, allow_unused=True, **options)


def finish(end: str, f: Callable[..., Any], world: dict[str, Any]) -> dict[str, Any]:
    """Call ``f``, and differentiate its result in plain autograd as ``end`` says.

    Returns:
        Everything that is to be the same with and without regions.
    """
    x = (numbers((3, 3), 200) / 2).requires_grad_(end != "values")
    y = (numbers((3,), 220) / 2).requires_grad_(end != "values")
    net = world["self"]
    leaves = {"x": x, "y": y, **dict(net.named_parameters())}
    of = list(leaves.values())
    out = f(x, y)
    found: dict[str, Any] = {"values": pytree.tree_map(_copied, out)}
    _between(world["generator"])
    if end == "first only":
        out = floats(out)[:1]
    loss = total(out)
    if end in ("backward", "first only") and getattr(loss, "requires_grad", False):
        loss.backward()
    elif end == "twice" and getattr(loss, "requires_grad", False):
        loss.backward(retain_graph=True)
        loss.backward()
    elif end == "autograd.grad":
        found["gradients"] = _gradients(loss, of)
    elif end == "of the input only":
        found["gradients"] = _gradients(loss, [x])
    elif end == "batched":
        seeds = torch.arange(1.0, 4.0)
        found["gradients"] = _gradients(loss, of, grad_outputs=seeds, is_grads_batched=True)
    elif end == "double":
        del out
        first = _gradients(loss, of, create_graph=True)
        found["first"] = pytree.tree_map(_copied, first)
        _between(world["generator"])
        second = total(first)
        if getattr(second, "requires_grad", False):
            second.backward()
    found |= {"gradient of " + name: _copied(t.grad) for name, t in leaves.items()}
    found |= {"buffer " + name: _copied(t) for name, t in net.named_buffers()}
    found["default generator"] = torch.get_rng_state()
    found["generator"] = world["generator"].get_state()
    return found


def _copied(t: Any) -> Any:
    return t.detach().clone() if isinstance(t, torch.Tensor) else t
