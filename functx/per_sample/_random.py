"""Random numbers in chunks: what ``randomness`` means to ``vmap``, whatever the chunks are.

``"error"`` forbids them, ``"different"`` draws for each example, ``"same"`` gives every example the
same numbers: each chunk starts from the state in which the first one started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from functx import _torch

_FORBIDDEN = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
    "'different' randomness flags, or draw the random numbers outside and pass them in as arguments"
)

State = tuple[torch.Tensor, list[torch.Tensor]]


def state() -> State:
    """The states of torch's default generators, of those devices that are in use."""
    on_device = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), on_device


def restore(saved: State) -> None:
    """Puts the default generators back."""
    torch.set_rng_state(saved[0])
    if saved[1]:
        torch.cuda.set_rng_state_all(saved[1])


class _NoGenerators(_torch.TorchDispatchMode):
    """Forbids draws from a generator that is handed over: its state is not ours to compare."""

    only_observes = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise RuntimeError(_FORBIDDEN)
        return func(*args, **kwargs)


@contextmanager
def allowed(randomness: str, first: bool) -> Iterator[None]:
    """Raises, for ``"error"``, if what runs inside draws random numbers, as ``vmap`` does.

    Args:
        randomness: The mode.
        first: Look at every operation too, for generators that are handed over.
    """
    if randomness != "error":
        yield
        return
    before = state()
    with _NoGenerators() if first else nullcontext():
        yield
    after = state()
    if not all(map(torch.equal, (before[0], *before[1]), (after[0], *after[1]))):
        restore(before)
        raise RuntimeError(_FORBIDDEN)
