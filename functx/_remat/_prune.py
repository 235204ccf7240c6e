"""Running only what a pullback reads: memory nobody wrote to stands in for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functx import _torch, _torch_operators
from functx._remat._ledger import Step, empty, layout_of
from functx._remat._watch import Watcher, watchers, watching


class Pruned(Watcher):
    """Runs what is live; in place of everything else, hands out memory nobody wrote to."""

    def __init__(self, steps: Sequence[tuple[Step, bool]]) -> None:
        super().__init__()
        self._steps = steps
        self._at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation of the replay."""
        runs = self.paused or _torch_operators.is_view(func)
        if not runs:
            step, runs = self._next(func)
        if runs:
            args, kwargs = _torch_operators.callable_arguments(func, args, kwargs or {})
            return func(*args, **kwargs)
        if not _torch.dispatch_mode_depth():
            return _stand_in(step, args)
        with watching(False):
            out = _stand_in(step, args)
        for watcher in watchers():
            watcher.skipped(func, args, kwargs or {}, out)
        return out

    def _next(self, func: Any) -> tuple[Step, bool]:
        at = self._at
        step, runs = self._steps[at] if at < len(self._steps) else (None, False)
        if step is None or step.func is not func:
            was = "had ended" if step is None else f"ran {step.func}"
            raise Departed(f"it runs {func} where the forward {was}")
        self._at = at + 1
        return step, runs

    def skipped(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """NOTE [what inner regions leave out] in `_watch`."""
        self._next(func)


def _stand_in(step: Step, args: Any) -> Any:
    """What a dead operation gives."""
    if step.writes:
        return args[0]
    assert step.layouts is not None
    outs = [None if layout is None else empty(layout) for layout in step.layouts]
    if _torch_operators.returns_one_list(step.func):
        return outs
    return outs[0] if _torch_operators.returns_one(step.func) else tuple(outs)


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
    if _torch_operators.is_zero_tensor(t):
        return lambda: t  # forward mode's zeros have no memory
    layout, conjugate, negative = layout_of(t), t.is_conj(), t.is_neg()

    def make() -> Tensor:
        with watching(False), _torch.cleared_interpreter_stack():
            made = empty(layout)
            made = made.conj() if conjugate else made
            return _torch_operators.neg_view(made) if negative else made

    return make
