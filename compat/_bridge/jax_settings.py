"""JAX's settings of the calling thread, kept and put back.

A function's derivative runs later than the function, and maybe on a thread of torch's autograd
engine, where settings such as 64-bit types or the precision of matrix products are the process's
again. Both must see the same.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import jax

# Each is the name of a public context manager ``jax.<name>`` and of ``jax.config.jax_<name>``,
# which reads what holds for the calling thread.
Settings = namedtuple(
    "Settings",
    "enable_x64 disable_jit default_matmul_precision numpy_dtype_promotion numpy_rank_promotion"
    " default_prng_impl threefry_partitionable debug_nans",
)
_ATTRIBUTES = tuple(f"jax_{name}" for name in Settings._fields)


def current_settings(enable_x64: bool = False) -> Settings:
    """JAX's settings on this thread, if asked with 64-bit types on."""
    x64, *others = [getattr(jax.config, name) for name in _ATTRIBUTES]
    return Settings(x64 or enable_x64, *others)


@contextmanager
def restored(settings: Settings) -> Iterator[None]:
    """Run with earlier settings."""
    with ExitStack() as stack:
        for name, value, present in zip(Settings._fields, settings, current_settings()):
            if value != present:
                stack.enter_context(getattr(jax, name)(value))
        yield
