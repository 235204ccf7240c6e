"""One tensor that the backward of a custom Function knows by two names.

NOTE [two names]
Some Functions differentiate in their backward, with respect to tensors that they were given, a
function that closes over the same tensors: solvers of differential equations and reversible layers
are given a module and its parameters. In a replay they are given stand-ins, and the function closes
over the originals: the gradient would be nothing, silently. So while the tape of a replay is pulled
back, a gradient with respect to a stand-in is that with respect to its original as well, and the
other way round: it is the sum of both, whichever is asked for. No input
can stand for itself instead: where a region inside is given it, and closes over it too, the forward
knew two tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx import _torch, _torch_compiler, _torch_observed

_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set "
    "allow_unused=True if this is the desired behavior."
)


class OtherNames(TorchFunctionMode):
    """Sees what is differentiated in a backward pass. ``NOTE [two names]``.

    Args:
        pairs: stand-ins of a replay, and what they stand for.
    """

    only_observes = True

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        # By the id of each, all names of a tensor: those of replays around this one, too.
        self._names: dict[int, tuple[Tensor, ...]] = {}
        for i in range(_torch.function_mode_depth()):
            mode = _torch.get_function_mode_at(i)
            if isinstance(mode, OtherNames):
                self._names |= mode._names
        self._own = [*pairs]
        for t, original in self._own:
            names = (*self._names.get(id(original), (original,)), t)
            self._names |= dict.fromkeys(map(id, names), names)

    @_torch_compiler.uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A derivative is taken by all names; anything else is as it is."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return self._grad(*args, **kwargs)
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        return func(*args, **kwargs)

    def _backward(
        self,
        tensor: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        with self:  # no mode is shown this, and Functions on the tape may differentiate as well
            torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def _grad(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Tensor | None, ...]:
        outs, asked = _sequence(outputs), _sequence(inputs)
        others = [
            (i, name)
            for i, t in enumerate(asked)
            for name in self._names.get(id(t), ())
            if name is not t
        ]
        names = [*asked, *(name for _, name in others)]
        given = [None] * len(outs) if grad_outputs is None else _sequence(grad_outputs)
        known = all(isinstance(t, Tensor) for t in (*outs, *asked)) and all(
            g is not None or o.numel() == 1 for o, g in zip(outs, given, strict=True)
        )
        found: Sequence[Tensor | None]
        if is_grads_batched or not known:
            found = torch.autograd.grad(
                outs,
                names,
                given,
                retain_graph,
                create_graph,
                allow_unused=True,
                is_grads_batched=is_grads_batched,
            )
        else:
            cotangents = [
                torch.ones_like(o) if g is None else g for o, g in zip(outs, given, strict=True)
            ]
            with self, _torch_observed.this_pass():
                found = _torch.run_backward(
                    tuple(outs),
                    tuple(cotangents),
                    create_graph if retain_graph is None else retain_graph,
                    create_graph,
                    tuple(names),
                    allow_unreachable=True,
                    accumulate_grad=False,
                )
        gradients = [*found[: len(asked)]]
        for (i, _), more in zip(others, found[len(asked) :], strict=True):
            first = gradients[i]
            gradients[i] = more if first is None else first if more is None else first + more
        if materialize_grads:
            return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(asked, gradients))
        if not allow_unused and any(g is None for g in gradients):
            raise RuntimeError(_UNUSED)
        return tuple(gradients)

    def pass_on(self) -> None:
        """A gradient that a Function accumulated in a stand-in was meant for what it stands for."""
        for t, original in self._own:
            if t.is_leaf and (gradient := t.grad) is not None:
                torch.autograd.backward(original, gradient, retain_graph=True)


def _sequence(tensors: Any) -> Sequence[Any]:
    return (tensors,) if not isinstance(tensors, Sequence) else tensors
