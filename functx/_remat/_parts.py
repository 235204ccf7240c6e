"""What an operator of the user's, made of others in Python, runs: a replay has to run the same.

The mode that shows a region its operations is not active inside of one, and which ATen operations
run is no evidence: that depends on tapes, kernels and caches. But here it is the user's code, which
may read a flag. So what it calls is written down as the operations of the body are: what, with
which arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from functx import _torch, _torch_compiler, _torch_operators, _tree
from functx._errors import ReplayError
from functx._places import describe_place, where
from functx._remat._arguments import SCALARS, same
from functx._remat._entry import Entry, describe
from functx._remat._tapes import tensors_of
from functx._remat._tracker import RegionMode

Part = tuple[Any, list[Any]]


class Parts(TorchFunctionMode):
    """Writes down what an operator calls, and compares it.

    Args:
        operator: which is running.
        region: its name, for messages.
        forward: what the operator called in the forward; ``None`` if this is the forward.
    """

    def __init__(self, operator: Any, region: str, forward: Sequence[Part] | None = None) -> None:
        super().__init__()
        self._operator = operator
        self._region = region
        self._forward = forward
        self.ran: list[Part] = []

    @_torch_compiler.uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call; the inside of what it calls is not shown."""
        kwargs = kwargs or {}
        given = [x for x in _tree.leaves((args, kwargs)) if isinstance(x, SCALARS)]
        self.ran.append((func, given))
        at = len(self.ran) - 1
        if self._forward is not None and not self._as_before(at):
            self._depart(at, f"at {describe_place(where())}, it runs {_shown(self.ran[at])}")
        return func(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator; what it calls is not shown to it where others are to see the operator.

        Raises:
            ReplayError: it does not call what it called in the forward.
        """
        modes = map(_torch.get_function_mode_at, range(_torch.function_mode_depth()))
        overload = None
        if all(isinstance(mode, RegionMode) for mode in modes):
            overload = _torch_operators.composite(self._operator, args, kwargs)
        if overload is None:
            return self._operator(*args, **kwargs)
        with self:
            out = _torch_operators.run_inside(overload, args, kwargs, tensors_of(args, kwargs))
        if self._forward is not None and len(self.ran) < len(self._forward):
            self._depart(len(self.ran), "it ended")
        return out

    def _as_before(self, at: int) -> bool:
        if self._forward is None or at >= len(self._forward):
            return False
        (was, given), (now, gives) = self._forward[at], self.ran[at]
        return bool(was == now) and same(given, gives)

    def _depart(self, at: int, how: str) -> None:
        assert self._forward is not None
        was = f"ran {_shown(self._forward[at])}" if at < len(self._forward) else "had ended"
        raise ReplayError(
            f"remat: the replay of the region {self._region!r} departed from its forward in "
            f"{self._operator}: {how} where the forward {was}. An operator must do the same each "
            "time it runs, so something it reads (a flag, a counter, a global) changed between "
            "forward and backward. Pass what changes as an argument, or keep it until the backward "
            "has run."
        )


def noting_parts(func: Any, entries: Sequence[Entry], region: str) -> Any:
    """What runs ``func``, the last of ``entries``, and notes what an operator of the user's runs.

    Where nothing is recorded, nothing is compared either.
    """
    if not entries or not _torch_operators.is_foreign(func):
        return func
    parts = Parts(func, region)
    entries[-1].parts = parts.ran
    return parts


def _shown(part: Part) -> str:
    func, scalars = part
    return f"{describe(func)}({', '.join(map(str, scalars))})" if scalars else describe(func)
