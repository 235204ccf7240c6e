"""What a body does about gradients, by name: ``.grad``, ``retain_grad``, ``torch.autograd.grad``.

A body works on stand-ins. So what it asks of a tensor that it did not make is asked of the tensor
itself, and what it hangs on one that leaves the region is hung on what the caller has. What can't
be passed on so, an assignment or a gradient that a replay would not find, is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx._errors import RematError
from functx._remat._holders import base_of
from functx._remat._hung_on_given import HANGING
from functx._remat._tapes import edges_below, leaves_below, nodes_of, of_ended_level
from functx._torch_memory import key_of_storage
from functx._torch_nodes import ABOUT_ITS_TAPE

RETAIN_GRAD = Tensor.retain_grad
_GET_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRAD = Tensor.grad.__set__  # type: ignore[union-attr]
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

GRADIENTS = torch.autograd.grad

ABOUT_GRADIENTS = (
    *(RETAIN_GRAD, _GET_GRAD, _SET_GRAD, SET_DATA, GRADIENTS),
    *(*HANGING, *ABOUT_ITS_TAPE),
)


def refuse_if_lost(func: Any, t: Tensor, args: Any, name: str) -> None:
    """Raise for what a stand-in can't do for ``t``, which the region ``name`` did not make."""
    if func == SET_DATA:
        value = args[1]
        if not isinstance(value, Tensor) or not t.requires_grad:
            return
        if t.is_leaf and _memory(value) != _memory(args[0]):
            raise RematError(
                f"remat: the region {name!r} assigns the .data of a parameter, or another tensor, "
                f"of shape {tuple(t.shape)} that it did not make and that requires grad (as a "
                "module does that is cast by .to(), .half() or .double()); what it assigns would "
                "be lost. Make or cast the module outside of the region, make it as it is to be "
                "(dtype=...), or compute with a copy: weight.to(dtype)."
            )
        if value.dtype != t.dtype:
            raise RematError(
                f"remat: the region {name!r} assigns {value.dtype} to the .data of an argument "
                f"that is {t.dtype}; that would be lost. Return a tensor instead."
            )
        return
    gradient = t.grad if t.is_leaf or t.retains_grad else None
    if func == _GET_GRAD and gradient is not None:
        raise RematError(
            f"remat: the region {name!r} reads the .grad of a tensor of shape {tuple(t.shape)} "
            "that it did not make and that has a gradient already; a replay would not find it as "
            "it is now. Read it outside of the region and pass it as an argument."
        )
    if func == _SET_GRAD and not (gradient is None and args[1] is None):
        raise RematError(
            f"remat: the region {name!r} assigns the .grad of a tensor of shape {tuple(t.shape)} "
            "that it did not make; it would be lost. Assign it outside of the region."
        )


def refuse_if_partial(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    foreign: Sequence[tuple[Tensor, Tensor]],
    name: str,
) -> None:
    """Raise where derivatives flow by a way that stand-ins do not have.

    Args:
        outputs: what is differentiated in the region ``name``, as it knows it.
        inputs: by what, as it is outside: tensors that the region did not make.
        foreign: these and all others, each with its stand-in.
        name: of the region.
    """
    wanted = {_edge(t): t for t in inputs}
    computed = [(t, standin) for t, standin in foreign if t.grad_fn is not None]
    if not computed:
        return
    leaves = {id(t) for t in leaves_below(*nodes_of(outputs))} | {id(t) for t in outputs}
    for t, standin in computed:
        if id(standin) not in leaves and id(t) not in leaves:
            continue
        for edge in edges_below(_edge(t)):
            y = wanted.get(edge)
            if y is not None and y is not t:
                raise RematError(
                    f"remat: the region {name!r} asks for the gradient (torch.autograd.grad) with "
                    f"respect to a tensor of shape {tuple(y.shape)} that it did not make, of "
                    f"something that depends on another one, of shape {tuple(t.shape)}, which was "
                    "computed from that outside of the region. In the region both are inputs, so "
                    "part of the gradient would be missing. Compute both in the region, take the "
                    "gradient outside of it, or detach what is to be constant."
                )


def _edge(t: Tensor) -> tuple[Any, int]:
    """Where the tape of a tensor begins, of its own level."""
    return (t, 0) if t.grad_fn is None else (t.grad_fn, t.output_nr)


def retain(retained: Sequence[Any], results: Sequence[Tensor | None]) -> None:
    """Retain gradients that a body wanted retained, of what the caller has.

    Args:
        retained: positions of results, and what to ask for other tensors.
        results: of the region.
    """
    for one in retained:
        t = results[one] if isinstance(one, int) else one()
        if t is not None and t.requires_grad:
            t.retain_grad()


def _memory(t: Tensor) -> int | None:
    try:
        return key_of_storage(base_of(t).untyped_storage())
    except (RuntimeError, NotImplementedError):  # it has none: sparse, opaque
        return None


_RECORDED_OUTSIDE = (
    "remat: a region calls the pullback of a vjp, or the result of a linearize, that was made "
    "outside of it and depends on a tensor of shape {shape} that is mapped over or differentiated "
    "there. That would be lost. Call functx.vjp inside of the region, or what it returns outside."
)


def on_the_tape(given: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """`torch.autograd.grad` and its arguments, without outputs whose stand-ins are on no tape.

    A captured tensor of an outer level is on that level's tape, and its stand-in is on none of the
    levels inside. Such outputs have no derivative here.

    Raises:
        RematError: what is pulled back was recorded by a transform outside of the region: no tape
            leads from, or to, stand-ins.
    """
    for theirs, ours in zip(given, args):
        if isinstance(theirs, (list, tuple)):
            for t, standin in zip(theirs, ours):
                if t is not standin and isinstance(t, Tensor) and of_ended_level(t):
                    raise RematError(_RECORDED_OUTSIDE.format(shape=tuple(t.shape)))
    cotangents = kwargs.get("grad_outputs") if len(args) == 2 else None
    if not (isinstance(cotangents, (list, tuple)) and isinstance(args[0], (list, tuple))):
        return args, kwargs, torch.autograd.grad  # not as torch calls itself
    taped = [
        not isinstance(g, Tensor) or not g.requires_grad or o.requires_grad
        for g, o in zip(given[0], args[0])  # else an edge, which has no stand-in
    ]
    if not any(taped) and kwargs.get("allow_unused"):
        return args, kwargs, lambda outputs, inputs, **_: (None,) * len(inputs)
    if not all(taped):
        args = [[x for x, t in zip(args[0], taped) if t], args[1]]
        kwargs = {**kwargs, "grad_outputs": [x for x, t in zip(cotangents, taped) if t]}
    return args, kwargs, torch.autograd.grad
