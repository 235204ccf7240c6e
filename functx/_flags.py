"""Settings of the process that operations read: autocast, the default dtype, allowed kernels.

NOTE [the autocast cache]
Autocast keeps casts of leaves until its outermost context ends. Those of tensors that stand in for
others, on a trial run, would stay as long as that, so they are cleared; what is cast after that is
cast again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from functx._torch_kernels import put_back, settings


class Flags(NamedTuple):
    """What they are at some moment: a value that compares and prints.

    Attributes:
        autocast: kind of device, whether it is on, its dtype, whether it keeps casts.
        settings: of `_torch_kernels`.
    """

    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]
    settings: tuple[Any, ...]

    @classmethod
    def now(cls) -> Flags:
        """Those of this moment."""
        kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        cache = torch.is_autocast_cache_enabled()
        states = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        return cls(tuple((*state, cache) for state in states), tuple(settings()))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same again."""
        now = Flags.now()
        with ExitStack() as stack:
            for state in self.autocast:
                if state not in now.autocast:
                    kind, enabled, dtype, cache = state
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
            if self.settings != now.settings:
                stack.callback(put_back, [*now.settings])
                put_back([*self.settings])
            yield


@contextmanager
def no_casts_kept() -> Iterator[None]:
    """What autocast cast in here is not kept. ``NOTE [the autocast cache]``."""
    try:
        yield
    finally:
        if any(enabled for _, enabled, _, _ in Flags.now().autocast):
            torch.clear_autocast_cache()
