"""Whether a function that is recorded sets, or asks for the state of, torch's own generator.

On fake tensors nothing is drawn, so such a state would be that from before the function. The
generator is the whole process's: it is watched without a change to it, and others draw meanwhile.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from functx._torch_modules import frame_above

_ROUNDABOUT = ("torch.random", "contextlib")


class Watch:
    """Within it, what `torch.random` offers refuses to touch the generator, on this thread.

    What calls the methods of `torch.default_generator` itself is found by `check`, if it seeds it.

    Args:
        refuse: makes an error from a reason.
    """

    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        self._refuse = refuse
        self._thread = threading.get_ident()
        self._generator = torch.default_generator
        self._error: Exception | None = None
        self._others_seeded = False
        self._seed = self._generator.initial_seed()
        self._was_fresh = self._fresh()

    def __enter__(self) -> Watch:
        self._before = torch.random.default_generator
        torch.random.default_generator = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        torch.random.default_generator = self._before

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._thread:
            self._others_seeded |= name in ("manual_seed", "seed", "set_state")
        elif name in ("manual_seed", "seed"):
            self._raise("it seeds a random generator; seed it before")
        elif name in ("get_state", "set_state") and not _allowed(name, frame_above(1)):
            self._raise(
                "it asks for, or sets, the state of the random generator (get_rng_state, "
                "set_rng_state, fork_rng); do so outside, or draw from a torch.Generator that is "
                "the function's own"
            )
        return getattr(self._before, name)

    def check(self) -> None:
        """Raise what was refused, also if the function caught it.

        Raises:
            functx.RematError: the function has touched the generator.
        """
        if self._error is not None:
            raise self._error
        if not self._others_seeded and (
            self._generator.initial_seed() != self._seed or (self._fresh() and not self._was_fresh)
        ):
            self._raise("it seeds a random generator; seed it before")

    def _raise(self, why: str) -> None:
        self._error = self._refuse(why)
        raise self._error

    def _fresh(self) -> bool:
        """Whether nothing was drawn since it was seeded; no operation that a mode could see."""
        as_seeded = torch.Generator().manual_seed(self._generator.initial_seed())
        return bytes_of(as_seeded.get_state()) == bytes_of(self._generator.get_state())


def bytes_of(state: torch.Tensor) -> bytes:
    """What is in it."""
    return ctypes.string_at(state.data_ptr(), state.numel())  # no operation that a mode could see


def _allowed(name: str, frame: Any) -> bool:
    """Torch's checkpoint keeps a state to recompute from; its compiler puts back what it takes."""
    while frame is not None and frame.f_globals.get("__name__") in _ROUNDABOUT:
        frame = frame.f_back
    caller = "" if frame is None else frame.f_globals.get("__name__", "")
    return caller.startswith("torch._dynamo.") or (
        name == "get_state" and caller.startswith("torch.utils.checkpoint")
    )
