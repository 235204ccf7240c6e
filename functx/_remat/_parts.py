"""What operations run that is the user's code: a replay has to run the same.

Of an operator of the user's, made of others in Python, that is all of it. The mode that shows a
region its operations is not active inside of one, and which ATen operations run is no evidence:
that depends on tapes, kernels and caches. But here it is the user's code, which may read a flag. So
what it calls is written down as the operations of the body are: what, with which arguments.

And so is what hooks and the backwards of custom Functions call where a body takes gradients itself,
by ``torch.autograd.grad``: in the pass, that mode is not active either.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx import _torch, _torch_compiler, _torch_observed, _torch_operators, _tree
from functx._errors import ReplayError
from functx._places import describe_place, is_ours, where
from functx._remat._answers import who_asks
from functx._remat._arguments import SCALARS
from functx._remat._entry import Calls, Entry, called, how_many_are_read
from functx._remat._functions import known_of
from functx._remat._gradients import GRADIENTS
from functx._remat._tapes import tensors_of
from functx._remat._tracker import RegionMode, Silent, tracking


class Parts(TorchFunctionMode):
    """Writes down what an operator, or a backward pass, calls, and compares it.

    Args:
        operator: which is running; `torch.autograd.grad` for a backward pass.
        region: its name, for messages.
        forward: what was called in the forward; ``None`` if this is the forward.
    """

    def __init__(self, operator: Any, region: str, forward: Calls | None = None) -> None:
        super().__init__()
        self._operator = operator
        self._region = region
        self._forward = forward
        self.ran = Calls(())
        self._at = 0

    @_torch_compiler.uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call; the inside of what it calls is not shown."""
        kwargs = kwargs or {}
        self.note(func, [x for x in _tree.leaves((args, kwargs)) if isinstance(x, SCALARS)])
        return func(*args, **kwargs)

    def note(self, func: Any, given: list[Any], may_go: bool = False) -> None:
        """``func`` is called with some numbers and the like."""
        self.ran.add(func, given, may_go)
        if self._forward is not None:
            at = self._forward.after(self._at, func, given)
            if at is None:
                self._depart(f"at {describe_place(where())}, it runs {called(func, given)}")
            self._at = at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator; what it calls is not shown to it where others are to see the operator.

        Raises:
            ReplayError: it does not call what it called in the forward.
        """
        if self._operator is GRADIENTS:
            out = _InBackward(self).differentiate(args, kwargs)
        else:
            modes = map(_torch.get_function_mode_at, range(_torch.function_mode_depth()))
            overload = None
            if all(isinstance(mode, RegionMode) for mode in modes):
                overload = _torch_operators.composite(self._operator, args, kwargs)
            if overload is None:
                return self._operator(*args, **kwargs)
            with self:
                out = _torch_operators.run_inside(overload, args, kwargs, tensors_of(args, kwargs))
        if self._forward is not None and self._forward.next(self._at) is not None:
            self._depart("it ended")
        return out

    def _depart(self, how: str) -> NoReturn:
        must = None if self._forward is None else self._forward.next(self._at)
        was = "had ended" if must is None else f"ran {called(must.func, must.scalars)}"
        where, what = str(self._operator), "An operator"
        if self._operator is GRADIENTS:
            where, what = "torch.autograd.grad", "A hook, or the backward of a custom Function,"
        raise ReplayError(
            f"remat: the replay of the region {self._region!r} departed from its forward in "
            f"{where}: {how} where the forward {was}. {what} must do the same each time it runs, "
            "so something it reads (a flag, a counter, a global) changed between forward and "
            "backward. Pass what changes as an argument, or keep it until the backward has run."
        )


class _InBackward(Silent):
    """What hooks and backwards run while a body takes a gradient, which is one operation of it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts
        self._idle: dict[int, weakref.ref[Tensor]] = {}  # `may_go`, of what they gave

    def resolve(self, t: Tensor) -> Tensor:
        """The tape is of stand-ins."""
        return t

    def compared(self, func: Any, *numbers: Any) -> None:
        """A region inside of the pass has ended."""
        self._parts.note(func, [*numbers])

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Note the numbers that it is called with."""
        if known_of(func).passive or is_ours(who_asks()):
            return func(*args, **kwargs)
        self.swap_all(args)
        self.swap_named(kwargs)
        given, self._scalars = self._scalars, []
        read = tensors_of(args, kwargs)[: how_many_are_read(func)]
        may_go = all((ref := self._idle.get(id(t))) is not None and ref() is t for t in read)
        self._parts.note(func, given, may_go)
        out = self.differentiate(args, kwargs) if func is GRADIENTS else func(*args, **kwargs)
        if may_go:
            self._idle |= {id(t): weakref.ref(t) for t in tensors_of(out)}
        return out

    def differentiate(self, args: Any, kwargs: Any) -> Any:
        """`torch.autograd.grad`."""
        self.modes = _torch.dispatch_mode_depth()
        with _torch_observed.passes_in(functools.partial(tracking, self)):
            return GRADIENTS(*args, **kwargs)


def noting_parts(func: Any, entries: Sequence[Entry], region: str) -> Any:
    """What runs ``func``, the last of ``entries``, and notes what it runs of the user's code.

    Where nothing is recorded, nothing is compared either.
    """
    if not entries or not (func is GRADIENTS or _torch_operators.is_foreign(func)):
        return func
    parts = Parts(func, region)
    entries[-1].parts = parts.ran
    return parts
