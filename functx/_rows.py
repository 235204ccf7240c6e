"""How many rows a Jacobian has, before its function has run: a budget inside depends on that.

The function is run on fake tensors of its arguments' shapes, as budgeted ones are at each call.
Where that can't be done (control flow that depends on values), it is not known, and the pullback is
planned for one row at a time.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_fake, _tree
from functx._errors import RematError
from functx._flags import no_casts_kept
from functx._pullback import AGAIN, Rows
from functx._record import fake_of, unchanged
from functx._remat._function import recording
from functx._remat._tapes import tensors_of
from functx._remat._tracker import SILENT, tracking
from functx._remat._within_reach import reachable


@dataclass(frozen=True)
class Chunks:
    """That the record of a level is read for so many rows, so many of them at a time."""

    rows: int
    size: int
    keeps: bool = False  # also after the last ones
    but: str = ""  # how it was thought to be read


def chunks_of(wanted: Rows) -> Chunks | str:
    """How the record of a Jacobian's function will be read.

    Raises:
        RematError: the function keeps a tensor otherwise than by return, or rebinds attributes.
    """
    if wanted.total is None:
        wanted.total = _total(wanted)
    if wanted.total < 0:
        return AGAIN
    size = wanted.total if wanted.chunk_size is None else min(wanted.chunk_size, wanted.total)
    return Chunks(wanted.total, size)


class _Made(_torch.TorchDispatchMode):
    """Notes what is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(t) for t in tensors_of(out)]
        return out


def _total(wanted: Rows) -> int:
    """Numbers in the output; -1 if that can't be found out."""
    func, args, kwargs = wanted.call
    name = getattr(func, "__qualname__", type(func).__qualname__)
    leaves, spec = _tree.flatten((args, kwargs))
    seen = _Made()
    with (
        tracking(SILENT),
        _torch.without_dispatch_modes(),
        unchanged(reachable(func, leaves), name),
        torch.random.fork_rng(devices=[]),
        no_casts_kept(),
        _torch_fake.FakeTensorMode(allow_non_fake_inputs=True),
        recording(),
    ):
        with _torch.cleared_interpreter_stack():  # in which leaves of a tape can be made
            fakes = {id(x): fake_of(x) for x in leaves if isinstance(x, Tensor)}
        fake_args, fake_kwargs = _tree.unflatten(spec, [fakes.get(id(x), x) for x in leaves])
        try:
            with seen:
                out: Any = func(*fake_args, **fake_kwargs)
            total = sum(t.numel() for t in _tree.leaves(out[0] if wanted.has_aux else out))
        except Exception:  # whatever it is, the function itself will say it, if it happens again
            total = -1
        del fakes, fake_args, fake_kwargs
        out = None
    if any(ref() is not None for ref in seen.made):
        gc.collect()
        if any(ref() is not None for ref in seen.made):
            raise RematError(
                f"remat: a budget inside of jacrev can't be kept, because {name!r} keeps a tensor "
                "otherwise than by return (in a list, an attribute, a cache). Return it, with "
                "has_aux=True."
            )
    return total
