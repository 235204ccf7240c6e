"""The transforms around a call, and running something else under the same ones.

What a pullback peaks at depends on who asks for it: the derivative of a level of ``grad`` is itself
recorded by the levels around it, which makes autograd take other formulas than in plain autograd,
and batched operations have other intermediate results. So a plan is measured under the transforms
that it is for: each tensor is taken apart level by level, and levels of the same kinds are entered
anew around what is measured.

NOTE [who pulls back]
The pullback of a level is called in different ways. ``grad`` lets everything go as it is read;
``vjp`` gives it to somebody who may call it again, so that its residuals stay; ``jacrev`` calls it
for several rows at a time, and holds all rows in the end; `torch.func.grad` runs it inside of the
level, which records it. What a level around another one reads is the
gradients of that one, and it makes a number of them before it pulls back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from functx import _torch
from functx._pullback import AGAIN, INSIDE, ONCE, Rows, how_pulled_back
from functx._rows import Chunks, chunks_of
from functx._torch_norms import mend_batching_rules
from functx._transforms import grad, jvp, vjp, vmap

Body = Callable[..., Sequence[Tensor]]
"""A function of tensors to tensors."""

Slots = tuple[Any, ...]
"""For each level, outermost first, what it is to a tensor: the dimension that ``vmap`` maps over,
whether it is differentiated; ``None`` if the level does not know it."""


@dataclass(frozen=True)
class Level:
    """One transform: its kind, its number, how its record is read. NOTE [who pulls back]."""

    kind: Any
    number: int
    batch_size: int = 0
    randomness: str = "error"
    pulled_back: Any = ""  # NOTE [who pulls back]


@dataclass(frozen=True)
class _Tangent:
    """That a tensor has one, and the levels of ``vmap`` that map over it, by number."""

    batched: frozenset[int]


@dataclass(frozen=True)
class Surroundings:
    """The levels that are active at a call, outermost first."""

    levels: tuple[Level, ...]

    @classmethod
    def now(cls) -> Surroundings:
        """Those that are active."""
        levels = []
        for interpreter in _torch.interpreters():
            level = Level(interpreter.key(), interpreter.level())
            if level.kind == _torch.TransformType.Vmap:
                known: Any = _torch.coerced(interpreter)
                size, randomness = known.batch_size(), known.randomness()
                level = replace(level, batch_size=size, randomness=randomness)
            elif level.kind == _torch.TransformType.Grad:
                how = how_pulled_back(level.number)
                how = chunks_of(how) if isinstance(how, Rows) else how
                level = replace(level, pulled_back=how)
            levels.append(level)
        return cls(tuple(levels))

    def take_apart(self, t: Tensor) -> tuple[Tensor, Slots]:
        """The plain tensor in ``t``, and what ``t`` is to each level."""
        slots: list[Any] = []
        t = _torch.unwrap_if_dead(t)
        with ExitStack() as below:
            for level in reversed(self.levels):
                if not _torch.is_wrapped(t) or _torch.wrapper_level(t) != level.number:
                    slots.append(None)
                elif _torch.is_batched(t):
                    t, dim = _torch.unwrap_batched(t, level.number)
                    slots.append(dim)
                elif level.kind == _torch.TransformType.Jvp:
                    tangent = forward_ad.unpack_dual(t).tangent
                    slots.append(None if tangent is None else _Tangent(_batched_at(tangent)))
                    t = _torch.get_unwrapped(t)
                else:
                    slots.append(t.requires_grad)
                    t = _torch.get_unwrapped(t)
                below.enter_context(_torch.current_interpreter().lower())
        return t, tuple(reversed(slots))

    def pulls_back(self, slots: Slots) -> bool:
        """Whether some level differentiates a tensor in reverse mode."""
        grad = _torch.TransformType.Grad
        return any(slot for level, slot in zip(self.levels, slots) if level.kind == grad)

    def differentiates(self, slots: Sequence[Slots]) -> bool:
        """Whether what comes out of the outermost level are gradients, or depends on some."""
        return any(map(self.pulls_back, slots))

    def under(self, body: Body, slots: Sequence[Slots]) -> Body:
        """A function of plain tensors that runs ``body`` under such levels, and differentiates.

        Args:
            body: a function of tensors as they are at the innermost level.
            slots: of its arguments.
        """
        examples: dict[int, Tensor] = {}  # a number that is batched, for each level that maps
        read = False
        for i in reversed(range(len(self.levels))):
            level, own = self.levels[i], [slot[i] for slot in slots]
            if level.kind == _torch.TransformType.Vmap:
                body = _batched(body, level, own, examples)
            elif level.kind == _torch.TransformType.Grad and any(own):
                body = _pulled_back(body, [bool(slot) for slot in own], level.pulled_back, read)
                read = True
            elif level.kind == _torch.TransformType.Jvp and any(own):
                body = _pushed_forward(body, own, examples)
        return body


UNDER_GRAD = Surroundings((Level(_torch.TransformType.Grad, 1, pulled_back=ONCE),))


def _batched_at(t: Tensor) -> frozenset[int]:
    found = set()
    while _torch.is_wrapped(t):
        if _torch.is_batched(t):
            found.add(_torch.wrapper_level(t))
        t = _torch.get_unwrapped(t)
    return frozenset(found)


def _batched(
    body: Body, level: Level, dims: Sequence[int | None], examples: dict[int, Tensor]
) -> Body:
    def one(example: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        examples[level.number] = example
        return tuple(body(*tensors))

    batched = vmap(one, in_dims=(0, *dims), randomness=level.randomness)
    return functools.partial(batched, torch.zeros(level.batch_size))  # made before it is measured


def _pulled_back(body: Body, wanted: Sequence[bool], how: Any, read: bool) -> Body:
    """The gradients of what ``body`` returns.

    Args:
        body: as for `Surroundings.under`.
        wanted: which of its arguments have one.
        how: by whom. NOTE [who pulls back]
        read: whether the results are gradients, of which a number is made.
    """

    def gradients(*tensors: Tensor) -> Sequence[Tensor]:
        outs, some = _of(body, tensors, wanted), _which(tensors, wanted)
        if how == INSIDE or (read and how == ONCE):
            transform = torch.func.grad if how == INSIDE else grad
            number = lambda *some: number_of(outs(*some))  # noqa: E731
            return tuple(transform(number, tuple(range(len(some))))(*some))
        # Who asks for the pullback holds the result, and the cotangents.
        if isinstance(how, Chunks):
            made: Any = torch.func.vjp(outs, *some) if how.but == INSIDE else vjp(outs, *some)
            return _all_rows(made[1], made[0], how)
        out, pullback = vjp(outs, *some)
        return tuple(pullback(tuple(map(torch.ones_like, out)), retain_graph=how == AGAIN))

    return gradients


def _all_rows(pullback: Any, outs: Sequence[Tensor], how: Chunks) -> Sequence[Tensor]:
    """The gradients for every row of a Jacobian, as `jacrev` gets them."""
    mend_batching_rules()
    chunks = []
    for start in range(0, how.rows, how.size):
        n, last = min(how.size, how.rows - start), start + how.size >= how.rows
        pull = functools.partial(pullback, retain_graph=how.keeps or not last)
        if how.size == 1 or how.rows == 1:
            found = [g.unsqueeze(0) for g in pull(tuple(map(torch.ones_like, outs)))]
        else:
            found = list(vmap(pull)(tuple(o.new_ones(n, *o.shape) for o in outs)))
        chunks.append(found)
    return chunks[0] if len(chunks) == 1 else [torch.cat(parts) for parts in zip(*chunks)]


def number_of(tensors: Sequence[Tensor]) -> Tensor:
    """A number that depends on all of them, as a loss does."""
    reals = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.stack([t.square().sum() for t in reals]).sum()


def _pushed_forward(body: Body, slots: Sequence[Any], examples: dict[int, Tensor]) -> Body:
    wanted = [slot is not None for slot in slots]

    def with_tangents(*tensors: Tensor) -> Sequence[Tensor]:
        primals = tuple(_which(tensors, wanted))
        tangents = [
            sum((examples[n].to(t.dtype) for n in slot.batched), torch.ones_like(t))
            for t, slot in zip(primals, filter(None, slots))
        ]
        pushed: Any = jvp(_of(body, tensors, wanted), primals, tuple(tangents))
        out, tangents = pushed
        return (*out, *tangents)

    return with_tangents


def _which(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [t for t, want in zip(tensors, wanted) if want]


def _of(body: Body, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Body:
    """``body`` as a function of some of its arguments, to those results that have derivatives."""

    def function(*some: Tensor) -> tuple[Tensor, ...]:
        given = iter(some)
        outs = body(*(next(given) if want else t for t, want in zip(tensors, wanted)))
        return tuple(o for o in outs if o.is_floating_point() or o.is_complex())

    return function
