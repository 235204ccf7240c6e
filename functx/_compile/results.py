"""Makes results share memory with inputs and with each other, as in eager (J6).

A graph returns each result as a separate tensor. Then autograd would not see the result of
``x.t()`` as a view of ``x``, and a later in-place write to one of them would not reach the other.
So a trace notes which results lie in the memory of an input, of another result, or of a tensor of
which several results are views. A call makes these views again outside of the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._core import TracingError


@dataclass(frozen=True)
class Alias:
    """A result that is a view of its base, an input or another result, or is the base itself."""

    of_input: bool
    index: int  # of the input or of the result
    is_same: bool  # the result is the base itself, not a view of it
    # Shape, strides and offset of the view, and the strides of the base. ``None`` if the graph
    # returns the view too, whose own geometry is used then.
    geometry: Any
    tracked: bool  # whether the view has the history of the base
    is_whole: bool = False  # whether the view has the shape and strides of the base
    is_leaf: bool = False  # whether the result is a leaf that requires grad
    conjugates: bool = False  # whether its conj bit differs from that of the base
    negates: bool = False  # whether its neg bit differs from that of the base

    def made_of(self, base: Tensor, result: Any) -> Tensor:
        """Make the result from its base; ``result`` is the one that the graph returned, if any."""
        if self.is_same:
            return base
        if self.is_leaf:
            leaf = replace(self, is_leaf=False, tracked=False)
            return leaf.made_of(base.detach(), result).detach().requires_grad_()
        if not self.tracked and base.requires_grad:
            base = base.detach()
        shape, stride, offset, expected = self.geometry or (
            result.shape,
            result.stride(),
            result.storage_offset() - base.storage_offset(),
            base.stride(),
        )
        if self.conjugates:
            base = base.conj()
        if self.negates:
            base = _torch.negated_view(base)
        if self.is_whole:
            return base.view_as(base)
        if base.stride() != expected:
            raise TracingError(
                "functx.jit: the function returns a view of another result. The kernel has given "
                f"that result strides {base.stride()}, but the trace expected {expected}. Return a "
                "copy of the view (clone), or only one of the two results."
            )
        return base.as_strided(shape, stride, base.storage_offset() + offset)


class Sharing:
    """Decides which results the graph returns, and which are made as views outside."""

    def __init__(
        self,
        results: Sequence[Tensor],
        inputs: dict[int, Tensor],
        dynamic: bool,
        hooked: Container[int] = (),
    ) -> None:
        """``hooked`` has the storages of tensors with hooks. Views made outside would skip them."""
        self.n_results = len(results)
        self.aliases: list[Alias | None] = [None] * len(results)
        of_inputs = {_torch.storage_of(t): number for number, t in inputs.items() if _is_dense(t)}
        own: dict[int, list[int]] = {}
        for i, t in enumerate(results):
            storage = _torch.storage_of(t) if _is_dense(t) else -1
            is_input = storage in of_inputs and inputs[of_inputs[storage]] is t
            if storage in hooked or (_is_of_function(t) and not is_input):
                storage = -1
            if storage == -1:
                same = next((j for j in range(i) if results[j] is t), None)
                if same is not None:
                    self.aliases[i] = Alias(False, same, True, None, t.requires_grad)
            elif storage in of_inputs:
                number = of_inputs[storage]
                self.aliases[i] = _alias(t, inputs[number], True, number, dynamic)
            else:
                own.setdefault(storage, []).append(i)
        self.bases: list[Tensor] = []  # further outputs: common bases of several results
        for places in own.values():
            if len(places) > 1:
                self._share(results, places, dynamic)
        aliases = [*self.aliases, *([None] * len(self.bases))]
        everything = [*results, *self.bases]
        # With symbolic sizes the graph returns the view too, since its sizes are known only then.
        self.kept = [i for i, a in enumerate(aliases) if a is None or not (a.is_same or a.geometry)]
        self.outputs = [everything[i] for i in self.kept]
        # False for an output that the graph returns only so that its sizes can be read.
        self.gives = [aliases[i] is None for i in self.kept]
        self.is_plain = not any(self.aliases)

    def _share(self, results: Sequence[Tensor], places: list[int], dynamic: bool) -> None:
        """Decide for results that share memory with each other, but not with an input."""
        own = [i for i in places if results[i]._base is None]
        whole = [i for i in own if dynamic or _is_whole(results[i])]
        # If a view requires grad, its base must too: a view of another base gets no history.
        if any(results[i].requires_grad for i in places):
            whole = [i for i in whole if results[i].requires_grad]
        first = min(whole, default=None)
        if first is None:
            self._share_base(results, places, dynamic)
            return
        for i in places:
            if i != first:
                self.aliases[i] = _alias(results[i], results[first], False, first, dynamic)

    def _share_base(self, results: Sequence[Tensor], places: list[int], dynamic: bool) -> None:
        """Decide for results that are parts of one tensor which is not a result itself."""
        bases = [t._base for t in (results[i] for i in places) if t._base is not None]
        base = next((t for t in bases if t.requires_grad), bases[0] if bases else None)
        if base is not None and not dynamic and _overlap([results[i] for i in places]):
            for i in places:
                number = self.n_results + len(self.bases)
                self.aliases[i] = _alias(results[i], base, False, number, dynamic)
            self.bases.append(base)
            return
        # Parts that don't overlap stay separate; only a repeated result is the same tensor again.
        for i in places:
            same = next((j for j in places if j < i and results[j] is results[i]), None)
            if same is not None:
                self.aliases[i] = Alias(False, same, True, None, results[i].requires_grad)

    def alone(self) -> Sharing:
        """Drop the tensors of the trace, and return this object."""
        self.outputs, self.bases = [], []
        return self

    def again(self, results: Sequence[Tensor]) -> list[Any]:
        """The outputs that correspond to the results of another run of the function."""
        own = {a.index: i for i, a in enumerate(self.aliases) if a is not None and not a.of_input}
        return [results[k] if k < self.n_results else results[own[k]]._base for k in self.kept]

    def renumber(self, new: Callable[[int], int]) -> None:
        """Renumber inputs."""
        self.aliases = [
            replace(a, index=new(a.index)) if a is not None and a.of_input else a
            for a in self.aliases
        ]

    def made(self, outputs: Sequence[Tensor], inputs: Sequence[Any]) -> list[Tensor]:
        """All results, from the outputs of the graph."""
        if self.is_plain:
            return [*outputs]
        known = dict(zip(self.kept, outputs))
        found = {i: t for i, t in known.items() if i >= self.n_results or not self.aliases[i]}
        for i, alias in enumerate(self.aliases):
            if alias is not None:
                base = inputs[alias.index] if alias.of_input else found.get(alias.index)
                if base is None:  # the base is a result that is made later in this loop
                    base = known[alias.index]
                found[i] = alias.made_of(base, known.get(i))
        return [found[i] for i in range(self.n_results)]


def _alias(t: Tensor, base: Tensor, of_input: bool, index: int, dynamic: bool) -> Alias | None:
    if t is base:
        return Alias(of_input, index, True, None, t.requires_grad)
    if t.dtype != base.dtype:
        return None
    alias = Alias(
        of_input,
        index,
        False,
        None,
        t.requires_grad,
        is_leaf=t.is_leaf and t.requires_grad,
        conjugates=t.is_conj() is not base.is_conj(),
        negates=t.is_neg() is not base.is_neg(),
    )
    if dynamic:
        return alias
    offset = t.storage_offset() - base.storage_offset()
    geometry = torch.Size(t.shape), t.stride(), offset, base.stride()
    is_whole = (t.shape, t.stride(), offset) == (base.shape, base.stride(), 0)
    return replace(alias, geometry=geometry, is_whole=is_whole)


def _is_of_function(t: Tensor) -> bool:
    """Whether a custom Function returned a tensor: a view made outside would skip its backward."""
    return isinstance(t.grad_fn, torch.autograd.function.BackwardCFunction)


def _is_dense(t: Any) -> bool:
    return isinstance(t, Tensor) and t.layout is torch.strided


def _is_whole(t: Tensor) -> bool:
    """Whether a tensor fills its memory."""
    return t.storage_offset() == 0 and t.numel() * t.element_size() == t.untyped_storage().nbytes()


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether the memory of two tensors may overlap, judging by first and last elements."""
    spans = sorted(span(t) for t in tensors)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def span(t: Tensor) -> tuple[Any, Any]:
    """The first element of a tensor in its memory, and the one after the last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    start = t.storage_offset()
    return start, start + (last + 1 if t.numel() else 0)
