"""Control-flow operators of torch inside of regions: they run as the Python that they stand for.

Outside of a graph, ``torch.cond``, ``while_loop``, ``scan``, ``map`` and ``flex_attention`` call
the compiler. It would trace the modes of the region together with the operator, and keep this trace
for the rest of the process. A region does not need a graph, because its code runs in Python anyway.
The calls of a branch or a step are calls of the region, and the tensors that it closes over are
captured tensors of the region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx._core import uncompiled
from functx._remat.listener import listening
from functx._torch import control_flow, process_patches
from functx._torch.control_flow import pytree


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    if not process_patches.is_mapped(pred):
        return (true_fn if pred else false_fn)(*operands)
    # Under vmap examples take different branches: both run, as in torch.
    results = true_fn(*operands), false_fn(*operands)
    return pytree.tree_map(lambda one, other: torch.where(pred, one, other), *results)


def _while_loop(cond_fn: Any, body_fn: Any, carried: Any, additional: Any) -> Any:
    state: Any = tuple(carried)
    while cond_fn(*pytree.tree_leaves(state), *additional):
        state = body_fn(*pytree.tree_leaves(state), *additional)
    return state


def _map(f: Any, xs: Any, args: Any) -> Any:
    rows = [f(*row, *args) for row in zip(*xs, strict=True)]
    return pytree.tree_map(_stacked, *rows)


def _scan(combine_fn: Any, init: Any, xs: Any, additional_inputs: Any) -> Any:
    carry: Any = pytree.tree_unflatten(init, combine_fn.keywords["spec_init"])
    outputs = []
    for row in zip(*xs, strict=True):
        carry, y = combine_fn(*pytree.tree_leaves(carry), *row, *additional_inputs)
        outputs.append(y)
    return carry, pytree.tree_map(_stacked, *outputs)


def _stacked(*rows: Any) -> Any:
    return torch.stack(rows) if isinstance(rows[0], Tensor) else rows[0]


def _associative_scan(combine_fn: Any, xs: Any, additional_inputs: Any) -> Any:
    # (Asked for by ``combine_mode="pointwise"``; elementwise functions need no vmap.)
    leaves = control_flow.generic_associative_scan(combine_fn, xs, 0, additional_inputs)
    return pytree.tree_unflatten(leaves, combine_fn.keywords["spec"])


_IN_PYTHON: dict[Any, Callable[..., Any]] = {
    control_flow.cond_op: _cond,
    control_flow.while_loop_op: _while_loop,
    control_flow.map_op: _map,
    control_flow.scan_op: _scan,
    control_flow.associative_scan_op: _associative_scan,
    control_flow.flex_attention_op: control_flow.flex_attention,
}


class _InPython(TorchFunctionMode):
    """Runs control-flow operators as Python, above the mode that listens to the region."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _IN_PYTHON.get(func, func)(*args, **(kwargs or {}))


@uncompiled
def _in_python_in_regions() -> AbstractContextManager[None] | None:
    """The context in which an operator runs as Python; ``None`` outside of regions."""
    return None if listening(heard=True) is None else _in_python()


@contextmanager
def _in_python() -> Iterator[None]:
    with control_flow.compiler_off(), _InPython():
        yield


process_patches.run_control_flow(_in_python_in_regions)
