"""Private JAX API in one place, each name with its reason, and the check that JAX is installed.

Invariant: a module of ``compat`` that imports ``jax`` at module level is imported only after
:func:`require` has succeeded. So ``functx.compat`` can be imported without JAX, and using it
without JAX raises an error that says what to install.
"""

from __future__ import annotations

import importlib.util
from typing import Any


def require(what: str) -> None:
    """Raise an ImportError that says how to install JAX, if it is not installed.

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

    # ``jax.config.jax_enable_x64`` is public but untyped. It reads the setting of this thread,
    # which ``jax.enable_x64(...)`` changes.
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def is_tracing() -> bool:
    """Whether a transform of JAX is running a function on this thread.

    ``trace_state_clean`` is private; no public function answers this without a tracer.
    """
    from jax._src.core import trace_state_clean

    return not trace_state_clean()


def concrete(x: Any) -> Any:
    """The array behind a batching tracer of an eager ``jax.vmap``.

    ``BatchTracer.val`` is private. A custom derivative rule inside ``vmap`` gets such tracers, and
    ``crosscheck`` needs the buffer behind them.
    """
    import jax

    while isinstance(x, jax.core.Tracer) and hasattr(x, "val"):
        x = x.val
    return x


def static_arguments(
    f: Any, argnums: Any, argnames: Any
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the static arguments of ``jax.jit(f, argnums, argnames)``.

    If ``f`` is jitted already, its own static arguments are included. ``_jit_info`` of a jitted
    function is private; with it, names are inferred from positions exactly as JAX does it.

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
    """A number as a weakly typed array, whose dtype does not promote arrays, as in ``jax.jit``.

    The public ``lax.convert_element_type`` makes only strongly typed arrays.
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

    Saved bytes are counted once per buffer, and only ``unsafe_buffer_pointer`` shows whether two
    ``jax.Array`` objects share a buffer.
    """
    return int(x.unsafe_buffer_pointer())


# An option for XLA: its CPU compiler then keeps the barriers that make ``jax.checkpoint``
# recompute. By default, it merges the recomputation with the forward pass.
KEEP_RECOMPUTE = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def saved_residuals(f: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, str]]:
    """The values that a pullback saves: abstract values, each with JAX's description of its source.

    ``saved_residuals`` is private; the public function only prints the list.
    """
    from jax._src.ad_checkpoint import saved_residuals as found

    return found(f, *args, **kwargs)


# The scope in the names of operations that ``jax.checkpoint`` runs again. A compiled program marks
# recomputation in no other way.
RECOMPUTED = "rematted_computation"
