"""What torch asks while a region runs is answered by functx; beside `_torch`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import autograd as _autograd
from torch._functorch import eager_transforms as _eager_transforms
from torch.nested._internal import nested_tensor as _nested_tensor

from functx import _torch, _torch_compiler

_wrapping = threading.Lock()
_observing = 0


_any_torch_function = torch.overrides.has_torch_function
_NOT_OVERRIDDEN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None), int, float, bool}


def _has_torch_function(args: Iterable[Any]) -> bool:
    """As without modes that only observe: modules ask it whether their fused kernels may run."""
    modes = [_torch.get_function_mode_at(i) for i in range(_torch.function_mode_depth())]
    if modes and all(getattr(m, "only_observes", False) for m in modes):
        return not all(type(t) in _NOT_OVERRIDDEN for t in args)  # a Function, by its operator
    return _any_torch_function(args)


def observe_wrapping(wrap: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Until `stop_observing_wrapping`, what torch.func wraps for a level is wrapped by ``wrap``.

    And nothing is compiled, in no thread.
    """
    global _observing
    with _wrapping:
        _observing += 1
        if _observing == 1:
            _eager_transforms._wrap_for_grad = wrap  # type: ignore[assignment]
            torch.overrides.has_torch_function = _has_torch_function
            _torch_compiler.stay_eager()


def stop_observing_wrapping() -> None:
    """End one `observe_wrapping`."""
    global _observing
    with _wrapping:
        _observing -= 1
        if _observing == 0:
            _eager_transforms._wrap_for_grad = _torch.wrap_for_grad
            torch.overrides.has_torch_function = _any_torch_function
            _torch_compiler.compile_again()


class _OfThread(threading.local):
    around: Callable[[], AbstractContextManager[Any]] | None = None


_own = _OfThread()
_observed_passes = 0
_plain_pass = _autograd._engine_run_backward


def this_pass() -> AbstractContextManager[Any]:
    """What the pass that begins runs in. See `passes_in`."""
    around, _own.around = _own.around, None
    return nullcontext() if around is None else around()


def _run_pass(*args: Any, **kwargs: Any) -> Any:
    with this_pass():
        return _plain_pass(*args, **kwargs)


@contextmanager
def passes_in(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """The next pass of `torch.autograd.grad` in this thread runs in what ``around`` makes.

    Function modes are shown the call, and are not active any more when the pass begins.
    """
    global _observed_passes
    with _wrapping:
        _observed_passes += 1
        _autograd._engine_run_backward = _run_pass
    outer, _own.around = _own.around, around
    try:
        yield
    finally:
        _own.around = outer
        with _wrapping:
            _observed_passes -= 1
            if _observed_passes == 0:
                _autograd._engine_run_backward = _plain_pass


def observe_set(tell: Callable[[], None]) -> None:
    """Call ``tell`` before ``t.set_(other)``, the one method that function modes are not shown."""
    plain = torch.Tensor.set_

    @functools.wraps(plain)
    def set_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tell()
        return plain(self, *args, **kwargs)

    torch.Tensor.set_ = set_  # type: ignore[method-assign, assignment]


def wrap_what_is_made_once(wrap: Callable[[Callable[[], Any]], Callable[[], Any]]) -> None:
    """Wrap what makes the tensor that all ragged views are given; the first of them makes it."""
    _nested_tensor._nt_view_dummy = wrap(_nested_tensor._nt_view_dummy)
