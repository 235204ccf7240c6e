"""The JAX half of functx: functions and arrays across frameworks.

Importing this package does not import JAX, and changes nothing in torch. Using a name of it without
JAX raises an ``ImportError`` that says what to install. :mod:`functx.compat.random` needs no JAX.

Example:
    >>> import torch, jax, jax.numpy as jnp
    >>> from functx.compat import to_jax
    >>> jax.grad(to_jax(lambda x: torch.sin(x).sum()))(jnp.zeros(2)).tolist()
    [1.0, 1.0]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from functx._core import add_internal
from functx.compat import random as random
from functx.compat import testing

if TYPE_CHECKING:
    from functx.compat._crosscheck import Crosscheck as Crosscheck
    from functx.compat._crosscheck import crosscheck as crosscheck
    from functx.compat._from_jax import from_jax as from_jax
    from functx.compat._from_jax import module_from_jax as module_from_jax
    from functx.compat._to_jax import to_jax as to_jax

add_internal(__file__)  # in a clone this folder is not below functx/

_WHERE = {
    "Crosscheck": "_crosscheck",
    "crosscheck": "_crosscheck",
    "from_jax": "_from_jax",
    "module_from_jax": "_from_jax",
    "to_jax": "_to_jax",
}

__all__ = ["Crosscheck", "crosscheck", "from_jax", "module_from_jax", "random", "testing", "to_jax"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from functx.compat import _jax

    _jax.require(name)
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
