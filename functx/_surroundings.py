"""The transforms around a call, and running something else under the same ones.

What a pullback peaks at depends on who asks for it: the derivative of a level of ``grad`` is itself
recorded by the levels around it, which makes autograd take other formulas than in plain autograd,
and batched operations have other intermediate results. So a plan is measured under the transforms
that it is for: each tensor is taken apart level by level, and levels of the same kinds are entered
anew around what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._transforms import jvp, vjp, vmap

Body = Callable[..., Sequence[Tensor]]
"""A function of tensors to tensors."""

Slots = tuple[Any, ...]
"""For each level, outermost first, what it is to a tensor: the dimension that ``vmap`` maps over,
whether it is differentiated; ``None`` if the level does not know it."""


@dataclass(frozen=True)
class _Level:
    kind: Any
    number: int
    batch_size: int = 0
    randomness: str = "error"


@dataclass(frozen=True)
class Surroundings:
    """The levels that are active at a call, outermost first."""

    levels: tuple[_Level, ...]

    @classmethod
    def now(cls) -> Surroundings:
        """Those that are active."""
        levels = []
        for interpreter in _torch.interpreters():
            level = _Level(interpreter.key(), interpreter.level())
            if level.kind == _torch.TransformType.Vmap:
                known: Any = _torch.coerced(interpreter)
                size, randomness = known.batch_size(), known.randomness()
                level = _Level(level.kind, level.number, size, randomness)
            levels.append(level)
        return cls(tuple(levels))

    def take_apart(self, t: Tensor) -> tuple[Tensor, Slots]:
        """The plain tensor in ``t``, and what ``t`` is to each level."""
        slots: list[Any] = []
        t = _torch.unwrap_if_dead(t)
        for level in reversed(self.levels):
            if not _torch.is_wrapped(t) or _torch.wrapper_level(t) != level.number:
                slots.append(None)
            elif _torch.is_batched(t):
                t, dim = _torch.unwrap_batched(t, level.number)
                slots.append(dim)
            else:
                slots.append(t.requires_grad or level.kind == _torch.TransformType.Jvp)
                t = _torch.get_unwrapped(t)
        return t, tuple(reversed(slots))

    def pulls_back(self, slots: Slots) -> bool:
        """Whether some level differentiates a tensor in reverse mode."""
        grad = _torch.TransformType.Grad
        return any(slot for level, slot in zip(self.levels, slots) if level.kind == grad)

    def under(self, body: Body, slots: Sequence[Slots]) -> Body:
        """A function of plain tensors that runs ``body`` under such levels, and differentiates.

        Args:
            body: a function of tensors as they are at the innermost level.
            slots: of its arguments.
        """
        for i in reversed(range(len(self.levels))):
            level, own = self.levels[i], [slot[i] for slot in slots]
            if level.kind == _torch.TransformType.Vmap:
                body = _batched(body, level, own)
            elif level.kind == _torch.TransformType.Grad:
                body = _pulled_back(body, [bool(slot) for slot in own])
            elif level.kind == _torch.TransformType.Jvp:
                body = _pushed_forward(body, [bool(slot) for slot in own])
        return body


UNDER_GRAD = Surroundings((_Level(_torch.TransformType.Grad, 1),))


def _batched(body: Body, level: _Level, dims: Sequence[int | None]) -> Body:
    def one(_: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(body(*tensors))

    batched = vmap(one, in_dims=(0, *dims), randomness=level.randomness)
    return lambda *tensors: batched(torch.empty(level.batch_size), *tensors)


def _pulled_back(body: Body, wanted: Sequence[bool]) -> Body:
    def gradients(*tensors: Tensor) -> Sequence[Tensor]:
        out, pullback = vjp(_of(body, tensors, wanted), *_which(tensors, wanted))
        return tuple(pullback(tuple(map(torch.ones_like, out)), retain_graph=False))

    return gradients if any(wanted) else body


def _pushed_forward(body: Body, wanted: Sequence[bool]) -> Body:
    def with_tangents(*tensors: Tensor) -> Sequence[Tensor]:
        primals = tuple(_which(tensors, wanted))
        ones = tuple(map(torch.ones_like, primals))
        pushed: Any = jvp(_of(body, tensors, wanted), primals, ones)
        out, tangents = pushed
        return (*out, *tangents)

    return with_tangents if any(wanted) else body


def _which(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [t for t, want in zip(tensors, wanted) if want]


def _of(body: Body, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Body:
    """``body`` as a function of some of its arguments, to those results that have derivatives."""

    def function(*some: Tensor) -> tuple[Tensor, ...]:
        given = iter(some)
        outs = body(*(next(given) if want else t for t, want in zip(tensors, wanted)))
        return tuple(o for o in outs if o.is_floating_point() or o.is_complex())

    return function
