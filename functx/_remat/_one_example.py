"""What one example of a batch would run, of a function that a body calls under ``vmap``.

NOTE [one example]
Below ``vmap`` operations are batched, and a policy is to be asked about one example. So each
function that the body calls is run once more, on meta tensors of one example's shapes, and the
policy is asked about the operations that this runs. Their results are found among those of the
real ones by order, kind and size; only what is kept depends on it, never a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_modules
from functx._policies import Value
from functx._remat._tracker import SILENT, tracking
from functx._torch_operators import argument_names

_META = torch.device("meta")


class _Recorder(_torch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Value] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = argument_names(func)
        # What is made of nothing is on the meta device, too: there nobody draws a random number.
        elsewhere = {"device": _META, "generator": None} if "device" in names else {}
        kwargs = {**kwargs, **{k: v for k, v in elsewhere.items() if k in names}}
        out = func(*args, **kwargs)
        self.ran.append(Value(func, args, kwargs, out, modules=_torch_modules.module_path))
        return out


def one_example(func: Any, args: Any, kwargs: Any) -> list[Value] | None:
    """The operations of a call; ``None`` where that can't be told."""
    try:
        with (
            tracking(SILENT),
            _torch.cleared_interpreter_stack(),
            _torch.without_modes(),
            torch.no_grad(),
            _Recorder() as recorder,
        ):
            func(*_meta(list(args)), **_meta(kwargs))
    except Exception:  # what has no shapes without values is judged as it ran
        return None
    return recorder.ran


def _meta(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return torch.empty(tree.shape, dtype=tree.dtype, device=_META)
    if isinstance(tree, dict):
        return {key: _meta(x) for key, x in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_meta(x) for x in tree])
    return tree
