"""Keeps modules and tensors of user code intact during a trace.

NOTE [intact]
The tensors of a trace have no values. If ``.data`` of a parameter is set to such a tensor, the
parameter has no values from then on, and a module that keeps such a tensor can't run any more. So
functx refuses operations that change a tensor itself rather than its values, before they happen.
It sees those that torch shows to a function mode. Torch does not show assignments to attributes of
a module. So functx notes the contents of modules before a trace. If they hold a tensor of the trace
afterwards, functx restores the old contents.

Limits: functx looks only into containers that are attributes of a module, and it finds only modules
that `State` reaches.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functx import _torch
from functx._core import TracingError, is_internal, is_of

_MISSING: Any = object()
_ATTRIBUTES: Any = Tensor  # ``Any``, since type checkers don't know attributes as descriptors
_SET_DATA = _ATTRIBUTES.data.__set__
_SET_GRAD = _ATTRIBUTES.grad.__set__
_SET_REQUIRES_GRAD = _ATTRIBUTES.requires_grad.__set__
# These work in place on the shape or strides of a tensor rather than on its values.
_RESHAPES = """resize_ resize_as_ as_strided_ t_ transpose_ swapaxes_ swapdims_ squeeze_
unsqueeze_"""
_OF_TENSORS = {getattr(Tensor, name) for name in _RESHAPES.split()}
_OF_TORCH = {getattr(torch, name) for name in _RESHAPES.split() if hasattr(torch, name)}
_INSTEAD = (
    "A graph can't do that. Compute a new tensor and return it; or write the new values into the "
    "old tensor, w.copy_(new) or w.mul_(0.9) under torch.no_grad(); or do it outside the function"
)


def is_traced(t: Tensor) -> bool:
    """Whether a tensor is one of a trace, this one or an earlier one."""
    return isinstance(_unwrapped(t), _torch.FakeTensor)


def _unwrapped(t: Tensor) -> Tensor:
    while _torch.is_wrapped(t):
        t = _torch.inner_of(t)
    return t


class RefusedChanges(TorchFunctionMode):
    """Refuses operations that change a tensor of user code itself; see NOTE [intact].

    ``requires_grad`` of the ``frozen`` tensors may not change.
    """

    def __init__(self, frozen: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.frozen = {id(t) for t in frozen}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (said := self._refused(func, args, kwargs)) is not None:
            raise TracingError(f"functx.jit: at {_line()} the function {said}.")
        return func(*args, **kwargs)

    def _refused(self, func: Any, args: Any, kwargs: Any) -> str | None:
        """Words for what a call would do, if a graph can't do it; ``None`` if it may go on."""
        if func == _SET_DATA:
            return None if _are_alike(*args) else f"sets .data of {_shown(args[0])}. {_INSTEAD}"
        if (func in _OF_TENSORS or func in _OF_TORCH) and not is_traced(args[0]):
            return f"calls {func.__name__} of {_shown(args[0])}. {_INSTEAD}"
        if func is _torch.ASKED_BY_CONVERSIONS and args[0] is not args[1] and is_traced(args[1]):
            return (
                f"converts the parameters of a module, {_shown(args[0])} to {args[1].dtype} on "
                f"{args[1].device} (by module.to() or the like). Convert the module outside, "
                "before the call"
            )
        if func == _SET_GRAD and not is_traced(args[0]) and args[0].grad is not args[1]:
            return (
                f"sets .grad of {_shown(args[0])}. Take gradients by functx.grad or "
                "torch.autograd.grad, and set .grad outside"
            )
        if func != _SET_REQUIRES_GRAD and func is not Tensor.requires_grad_:
            return None
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if id(args[0]) not in self.frozen or bool(wanted) is args[0].requires_grad:
            return None
        return (
            f"sets requires_grad of {_shown(args[0])} to {wanted}. Set it outside the function. "
            "Inside, use t.detach() to stop derivatives"
        )


def _line(error: BaseException | None = None) -> str:
    """The line of user code that runs now, or that raised ``error``."""
    frames = [(frame.f_lineno, frame) for frame in _running()]
    traceback = error.__traceback__ if error is not None else None
    while traceback is not None:
        frames.insert(0, (traceback.tb_lineno, traceback.tb_frame))
        traceback = traceback.tb_next
    outside = ((line, frame) for line, frame in frames if not _is_ours(frame))
    line, frame = next(outside, frames[-1])
    return f"{frame.f_code.co_filename}:{line}"


def _running() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return is_internal(frame.f_code.co_filename) or name.startswith("functx.")


def _shown(t: Tensor) -> str:
    return f"a tensor ({t.dtype}, of shape {(*t.shape,)})"


def _are_alike(t: Tensor, value: Any) -> bool:
    """Whether ``t.data = value`` changes nothing.

    ``module.to(dtype)`` does this if the module has that dtype already.
    """
    if t is value:
        return True
    if not isinstance(value, Tensor) or _torch.is_wrapped(t) or _torch.is_wrapped(value):
        return False
    if _torch.storage_of(t) != _torch.storage_of(value) or _torch.storage_of(t) == -1:
        return False
    first, second = (
        (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in (t, value)
    )
    return first == second


@contextmanager
def refused_changes() -> Iterator[None]:
    """Run under the mode `RefusedChanges`, below all others: some transforms need theirs on top."""
    with placed_below(RefusedChanges()):
        yield


@contextmanager
def placed_below(mode: TorchFunctionMode) -> Iterator[None]:
    """Run under a function mode that is below all others on the stack."""
    before = _modes()
    _set_modes([mode, *before], otherwise=before)
    try:
        yield
    finally:
        others = [m for m in _modes() if m is not mode]
        _set_modes(others, otherwise=others)


def _modes() -> list[Any]:
    return [_torch.function_mode_at(i) for i in range(_torch.function_depth())]


def _set_modes(modes: list[Any], otherwise: list[Any]) -> None:
    """Replace the stack of function modes; if interrupted, set the stack to ``otherwise``."""
    try:
        while _torch.function_depth():
            _torch.pop_function_mode()
        for mode in modes:
            _torch.push_function_mode(mode)
    except BaseException:
        _set_modes(otherwise, otherwise)
        raise


class KeptByModules:
    """The contents of modules, noted before a trace.

    ``reaches`` returns the tensors that objects hold.
    """

    def __init__(
        self,
        held: Iterable[Any],
        tensors: Iterable[Tensor],
        reaches: Callable[[Iterable[Any]], Iterable[Tensor]],
    ) -> None:
        self._reaches = reaches
        self._before: list[tuple[Any, Any]] = []
        for module in held:
            if is_of(module, nn.Module):  # isinstance would load a lazy Python module
                inside = vars(module)
                others = [x for x in inside.values() if type(x) in (dict, OrderedDict, list)]
                self._before += [(x, x.copy()) for x in (inside, *others)]
        # torch.utils.swap_tensors raises an error for tensors with weak references. So these block
        # it during the trace.
        self._refs = [ref(t) for t in tensors]

    def put_back(self) -> None:
        """Remove tensors of the trace from modules, and restore the old contents."""
        for container, before in self._before:
            if type(container) is list:
                known = {id(x) for x in before}
                if self._are_traced(x for x in container if id(x) not in known):
                    container[:] = before
                continue
            for name, value in [*container.items()]:
                own = before.get(name, _MISSING)
                if value is own or not self._are_traced([value]):
                    continue
                if own is _MISSING:
                    del container[name]
                else:
                    container[name] = own

    def _are_traced(self, objects: Iterable[Any]) -> bool:
        new = [x for x in objects if not is_of(x, (int, float, str, type(None)))]
        return bool(new) and any(map(is_traced, self._reaches(new)))


# Maps words of torch's own errors to what the function does.
_REFUSED_BY_TORCH = {
    "Cannot swap t": "swaps tensors (torch.utils.swap_tensors)",
    "metadata mutating ops on non-Fake": "changes the memory or the shape of a tensor in place, by "
    "set_() or the like",
}


def refused_by_torch(error: BaseException) -> str | None:
    """Words for what the function did, if torch itself refused it; ``None`` for other errors."""
    return next((said for words, said in _REFUSED_BY_TORCH.items() if words in str(error)), None)


@contextmanager
def in_words() -> Iterator[None]:
    """Replace torch's own errors about refused changes by ones that name the line and remedy."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        if (said := refused_by_torch(error)) is None:
            raise
        where = _line(error)
        raise TracingError(f"functx.jit: at {where} the function {said}. {_INSTEAD}.") from error
