"""Results that share memory with an input, or with each other, do so outside of the graph (J6).

A graph gives each result as a tensor of its own. To autograd, the result of ``x.t()`` would then be
no view of ``x``: a later write in place to one of them would not be seen by the other. So a trace
notes which results lie in the memory of an input, of another result, or of a tensor that several
results are views of, and a call makes these views again outside of the graph.
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
    """A result that is made of an input or of another result."""

    of_input: bool
    index: int  # of the input or of the result
    is_same: bool  # the same tensor, not a view of it
    # Shape, strides and offset, and the strides of what it is of; ``None`` for a result of the
    # graph, which has its own.
    geometry: Any
    tracked: bool  # with the history of what it is of
    is_whole: bool = False  # all of it, in its order
    is_leaf: bool = False  # a leaf that requires grad, in memory of what it is of
    conjugates: bool = False  # with another conj bit than what it is of, or another neg bit
    negates: bool = False

    def made_of(self, base: Tensor, result: Any) -> Tensor:
        """The result."""
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
    """Decides which results the graph returns, and how views of them are made outside."""

    def __init__(
        self,
        results: Sequence[Tensor],
        inputs: dict[int, Tensor],
        dynamic: bool,
        hooked: Container[int] = (),
    ) -> None:
        """``hooked`` is memory of tensors with hooks, which views made outside would leave out."""
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
        self.bases: list[Tensor] = []  # further results, of which several are views
        for places in own.values():
            if len(places) > 1:
                self._share(results, places, dynamic)
        aliases = [*self.aliases, *([None] * len(self.bases))]
        everything = [*results, *self.bases]
        # With sizes as symbols, a view is given by the graph too, for its sizes.
        self.kept = [i for i, a in enumerate(aliases) if a is None or not (a.is_same or a.geometry)]
        self.outputs = [everything[i] for i in self.kept]
        # Whether an output is given to the user, or views are made of it, rather than measured.
        self.gives = [aliases[i] is None for i in self.kept]
        self.is_plain = not any(self.aliases)

    def _share(self, results: Sequence[Tensor], places: list[int], dynamic: bool) -> None:
        """Results in one memory, of which no input is in it."""
        own = [i for i in places if results[i]._base is None]
        whole = [i for i in own if dynamic or _is_whole(results[i])]
        if any(results[i].requires_grad for i in places):  # of others no history can be made
            whole = [i for i in whole if results[i].requires_grad]
        first = min(whole, default=None)
        if first is None:
            self._share_base(results, places, dynamic)
            return
        for i in places:
            if i != first:
                self.aliases[i] = _alias(results[i], results[first], False, first, dynamic)

    def _share_base(self, results: Sequence[Tensor], places: list[int], dynamic: bool) -> None:
        """Results that are parts of one memory, which is not a result."""
        bases = [t._base for t in (results[i] for i in places) if t._base is not None]
        base = next((t for t in bases if t.requires_grad), bases[0] if bases else None)
        if base is not None and not dynamic and _overlap([results[i] for i in places]):
            for i in places:
                number = self.n_results + len(self.bases)
                self.aliases[i] = _alias(results[i], base, False, number, dynamic)
            self.bases.append(base)
            return
        for i in places:  # parts stay apart; one that is returned twice is the same tensor
            same = next((j for j in places if j < i and results[j] is results[i]), None)
            if same is not None:
                self.aliases[i] = Alias(False, same, True, None, results[i].requires_grad)

    def alone(self) -> Sharing:
        """This, without the tensors of the trace."""
        self.outputs, self.bases = [], []
        return self

    def again(self, results: Sequence[Tensor]) -> list[Any]:
        """The outputs of another run of the function, which has given these results."""
        own = {a.index: i for i, a in enumerate(self.aliases) if a is not None and not a.of_input}
        return [results[k] if k < self.n_results else results[own[k]]._base for k in self.kept]

    def renumber(self, new: Callable[[int], int]) -> None:
        """Give inputs other numbers."""
        self.aliases = [
            replace(a, index=new(a.index)) if a is not None and a.of_input else a
            for a in self.aliases
        ]

    def made(self, outputs: Sequence[Tensor], inputs: Sequence[Any]) -> list[Tensor]:
        """All results, of what the graph has given."""
        if self.is_plain:
            return [*outputs]
        known = dict(zip(self.kept, outputs))
        found = {i: t for i, t in known.items() if i >= self.n_results or not self.aliases[i]}
        for i, alias in enumerate(self.aliases):
            if alias is not None:
                base = inputs[alias.index] if alias.of_input else found.get(alias.index)
                if base is None:  # an alias of one that comes later
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
    """Whether a custom Function has given a tensor, whose backward a view would leave out."""
    return isinstance(t.grad_fn, torch.autograd.function.BackwardCFunction)


def _is_dense(t: Any) -> bool:
    return isinstance(t, Tensor) and t.layout is torch.strided


def _is_whole(t: Tensor) -> bool:
    """Whether a tensor fills its memory."""
    return t.storage_offset() == 0 and t.numel() * t.element_size() == t.untyped_storage().nbytes()


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether memory of two tensors may overlap, as far as first and last bytes tell."""
    spans = sorted(span(t) for t in tensors)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def span(t: Tensor) -> tuple[Any, Any]:
    """The first element of a tensor in its memory, and the one after the last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    start = t.storage_offset()
    return start, start + (last + 1 if t.numel() else 0)
