"""Every touch of JAX that could break: one import point, and the private names with reasons.

Invariant: no other module of ``compat`` imports ``jax`` at module level except those that are only
ever imported after :func:`require` has succeeded.  Importing ``functx.compat`` therefore works
without JAX, and using it without JAX says what to install.
"""

from __future__ import annotations

import importlib.util
from typing import Any


def require(what: str) -> None:
    """Raise an ImportError that says how to install JAX, unless it is there.

    ``what`` is the public name that was used, for the message.
    """
    if importlib.util.find_spec("jax") is None:
        raise ImportError(
            f"functx.compat.{what} needs JAX, which is not installed: pip install 'functx[jax]'"
            " (or, for CUDA, pip install 'functx[cuda]')",
            name="jax",
        )


def x64_enabled() -> bool:
    """Whether 64-bit types are on for the calling thread."""
    import jax

    # ``jax.config.jax_enable_x64`` is public but reads the process-wide flag through the thread's
    # context, which is what ``jax.enable_x64(...)`` changes.
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def is_tracing() -> bool:
    """Whether a transform of JAX is running a function on this thread.

    ``trace_state_clean`` is private; nothing public tells, before a tracer is at hand.
    """
    from jax._src.core import trace_state_clean

    return not trace_state_clean()


def concrete(x: Any) -> Any:
    """The array behind a batching tracer of an eager ``jax.vmap``.

    ``BatchTracer.val`` is private; a custom derivative rule inside ``vmap`` gets such tracers, and
    ``crosscheck`` wants the buffer that really enters a region.
    """
    import jax

    while isinstance(x, jax.core.Tracer) and hasattr(x, "val"):
        x = x.val
    return x


def static_arguments(
    f: Any, argnums: Any, argnames: Any
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the static arguments of ``jax.jit(f, argnums, argnames)``.

    Those of an ``f`` that is jitted already are its own, too. ``_jit_info`` of a jitted function is
    private; asking JAX means that names are inferred from positions exactly as it does.

    Raises:
        TypeError: the options are of a wrong type.
        ValueError: they name arguments that ``f`` does not have.
    """
    import jax

    jitted: Any = jax.jit(f, static_argnums=argnums, static_argnames=argnames)
    infos = [info._jit_info for info in (f, jitted) if hasattr(info, "_jit_info")]
    return (
        tuple({i for info in infos for i in info.static_argnums}),
        tuple({name for info in infos for name in info.static_argnames}),
    )


def weakly_typed(x: Any) -> Any:
    """A number as ``jax.jit`` takes it: its dtype gives way to those of arrays.

    The public ``lax.convert_element_type`` makes strongly typed arrays only.
    """
    import jax.numpy as jnp
    from jax._src.lax.lax import _convert_element_type

    return x if x.dtype == jnp.bool_ else _convert_element_type(x, x.dtype, weak_type=True)


def batch_dim_of(x: Any) -> int | None:
    """The dimension over which an eager or traced ``jax.vmap`` maps ``x``; ``None`` if it doesn't.

    ``BatchTracer.batch_dim`` is private; without it, results that are the same for the whole batch
    would be repeated for each example.
    """
    return getattr(x, "batch_dim", None)


def buffer_pointer(x: Any) -> int:
    """The address of a committed single-device array's buffer.

    ``unsafe_buffer_pointer`` is the only way to tell two ``jax.Array`` objects that share one
    buffer from two that don't; bytes kept are counted once a buffer.
    """
    return int(x.unsafe_buffer_pointer())


# Passed to XLA so that its CPU compiler keeps the barriers that make ``jax.checkpoint`` recompute;
# without it the recomputation is merged with the forward pass again.
KEEP_RECOMPUTE = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def saved_residuals(f: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, str]]:
    """What a pullback keeps: abstract values, and where they come from in JAX's words.

    ``saved_residuals`` is private; the public function prints it.
    """
    from jax._src.ad_checkpoint import saved_residuals as found

    return found(f, *args, **kwargs)


# What ``jax.checkpoint`` calls the scope of what it runs again, in the names of operations; a
# compiled program says nowhere else what is a recomputation.
RECOMPUTED = "rematted_computation"
