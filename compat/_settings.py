"""JAX's settings of the calling thread, kept and put back.

A function's derivative runs later than the function, and maybe on a thread of torch's autograd
engine, where settings such as 64-bit types or the precision of matrix products are the process's
again. Both must see the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

# Each is the name of a public context manager ``jax.<name>`` and of ``jax.config.jax_<name>``,
# which reads what holds for the calling thread.
_NAMES = (
    "enable_x64",
    "disable_jit",
    "default_matmul_precision",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "default_prng_impl",
    "threefry_partitionable",
    "debug_nans",
)
_ATTRIBUTES = tuple(f"jax_{name}" for name in _NAMES)

Settings = tuple[Any, ...]


def current_settings() -> Settings:
    """What JAX's settings are on this thread."""
    config = jax.config
    return tuple([getattr(config, name) for name in _ATTRIBUTES])


def jit_is_off(settings: Settings) -> bool:
    """Whether functions run as they are under these settings, untraced."""
    return bool(settings[1])


def x64_of(settings: Settings) -> bool:
    """Whether 64-bit types are on in these settings."""
    return bool(settings[0])


def with_x64(settings: Settings) -> Settings:
    """These settings with 64-bit types on."""
    return (True, *settings[1:])


@contextmanager
def restored(settings: Settings) -> Iterator[None]:
    """Run with earlier settings; free where they hold anyway."""
    now = current_settings()
    if now == settings:
        yield
        return
    with ExitStack() as stack:
        for name, value, present in zip(_NAMES, settings, now, strict=True):
            if value != present:
                stack.enter_context(getattr(jax, name)(value))
        yield
