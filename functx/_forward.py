"""Transforms of forward mode: torch's, of what torch knows how to take apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from functx import _validate
from functx._statistics import forward_mode
from functx._validate import Argnums

_forward_jacobian = forward_mode(torch.func.jacfwd)
_forward_product = forward_mode(torch.func.jvp)


@functools.wraps(torch.func.jacfwd)
def jacfwd(func: Callable[..., Any], argnums: Argnums = 0, *options: Any, **named: Any) -> Any:
    """As :func:`torch.func.jacfwd`."""
    _validate.check_argnums(argnums, "jacfwd")
    transformed = _forward_jacobian(func, argnums, *options, **named)
    if torch.compiler.is_dynamo_compiling():
        return transformed

    @functools.wraps(transformed)
    def jacobian(*args: Any) -> Any:
        positions = _validate.resolve_argnums(argnums, len(args), "jacfwd")
        _validate.check_primals([args[i] for i in positions], "jacfwd(f)(*args)")
        return transformed(*args)

    return jacobian


@functools.wraps(torch.func.jvp)
def jvp(func: Callable[..., Any], primals: Any, *options: Any, **named: Any) -> Any:
    """As :func:`torch.func.jvp`."""
    if not torch.compiler.is_dynamo_compiling():
        _validate.check_primals(primals, "jvp(f, primals, tangents)")
    return _forward_product(func, primals, *options, **named)
