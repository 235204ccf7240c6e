"""Running only what a pullback reads: memory nobody wrote to stands in for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functx import _torch
from functx._remat._ledger import DETACH, Step, empty, layout_of
from functx._remat._watch import Watcher


class Pruned(Watcher):
    """Runs what is live; in place of everything else, hands out memory nobody wrote to."""

    def __init__(self, steps: Sequence[tuple[Step, bool]]) -> None:
        super().__init__()
        self._steps = steps
        self._at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation of the replay."""
        if self.paused or func is DETACH:
            return func(*args, **(kwargs or {}))
        at = self._at
        step, runs = self._steps[at] if at < len(self._steps) else (None, False)
        if step is None or step.func is not func:
            was = "had ended" if step is None else f"ran {step.func}"
            raise Departed(f"it runs {func} where the forward {was}")
        self._at = at + 1
        if runs:
            args, kwargs = _torch.without_zero_tensors(func, args, kwargs or {})
            return func(*args, **kwargs)
        assert step.layouts is not None
        outs = [None if layout is None else empty(layout) for layout in step.layouts]
        if _torch.returns_one_list(func):
            return outs
        return outs[0] if _torch.returns_one(func) else tuple(outs)


class Departed(BaseException):
    """A replay runs other ATen operations than its forward; no body may swallow this."""


def placeholder(t: Tensor) -> Callable[[], Tensor]:
    """What makes a tensor like ``t``, at the same levels, in memory nobody wrote to.

    It stands for an input that a pullback does not read: its shape and layout still decide which
    operations run.
    """
    if _torch.is_wrapped(t):
        level = _torch.wrapper_level(t)
        inner = placeholder(_torch.get_unwrapped(t))
        if _torch.is_batched(t):
            dim = _torch.batch_dim(t)
            return lambda: _torch.add_batch_dim(inner(), dim, level)
        return lambda: _torch.wrap_for_grad(inner(), level)
    layout = layout_of(t)

    def make() -> Tensor:
        with _torch.cleared_interpreter_stack():
            return empty(layout)

    return make
