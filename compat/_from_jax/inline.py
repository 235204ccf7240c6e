"""A JAX program inside a function that goes to JAX: the program itself, in line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functx._errors import LoweringError
from functx.compat._bridge import current_settings
from functx.compat._from_jax.torch_operator import program_of
from functx.compat._to_jax import rule


@rule("functx::jax_call")
def _jax_call(arrays: Sequence[Any], handle: str) -> list[Any]:
    program = program_of(handle)
    if program.settings != current_settings():
        raise LoweringError(
            f"to_jax: {program.name}, made by from_jax, runs under other settings of JAX (64-bit"
            " types, precision) than the function around it; call both under the same"
        )
    return list(program.inner(*arrays))
