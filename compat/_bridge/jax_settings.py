"""Save and restore the JAX settings of the calling thread.

The derivative of a function runs later than the function, perhaps on a thread of torch's autograd
engine. There, settings such as 64-bit types or the precision of matrix products have the values of
the process. The derivative must run with the settings of the function.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import jax

# For each name there is a public context manager ``jax.<name>``, and ``jax.config.jax_<name>``,
# which reads the value for the calling thread.
Settings = namedtuple(
    "Settings",
    "enable_x64 disable_jit default_matmul_precision numpy_dtype_promotion numpy_rank_promotion"
    " default_prng_impl threefry_partitionable debug_nans",
)
_ATTRIBUTES = tuple(f"jax_{name}" for name in Settings._fields)


def current_settings(enable_x64: bool = False) -> Settings:
    """The JAX settings of this thread; with ``enable_x64``, as if 64-bit types were on."""
    x64, *others = [getattr(jax.config, name) for name in _ATTRIBUTES]
    return Settings(x64 or enable_x64, *others)


@contextmanager
def restored(settings: Settings) -> Iterator[None]:
    """A context with earlier settings."""
    with ExitStack() as stack:
        for name, value, present in zip(Settings._fields, settings, current_settings()):
            if value != present:
                stack.enter_context(getattr(jax, name)(value))
        yield
