"""Transforms of forward mode: torch's, of what torch knows how to take apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from functx import _norms, _validate
from functx._validate import Argnums


@functools.wraps(torch.func.jacfwd)
def jacfwd(func: Callable[..., Any], argnums: Argnums = 0, *options: Any, **named: Any) -> Any:
    """As :func:`torch.func.jacfwd`."""
    _validate.check_argnums(argnums, "jacfwd")
    transformed = torch.func.jacfwd(func, argnums, *options, **named)
    if torch.compiler.is_dynamo_compiling():
        return transformed

    @functools.wraps(transformed)
    def jacobian(*args: Any) -> Any:
        positions = _validate.resolve_argnums(argnums, len(args), "jacfwd")
        _validate.check_primals([args[i] for i in positions], "jacfwd(f)(*args)")
        _validate.check_derivatives_exist("jacfwd")
        with _norms.around(args):
            return transformed(*args)

    return jacobian


@functools.wraps(torch.func.jvp)
def jvp(func: Callable[..., Any], primals: Any, *options: Any, **named: Any) -> Any:
    """As :func:`torch.func.jvp`."""
    if torch.compiler.is_dynamo_compiling():
        return torch.func.jvp(func, primals, *options, **named)
    _validate.check_primals(primals, "jvp(f, primals, tangents)")
    _validate.check_derivatives_exist("jvp")
    with _norms.around(primals):
        return torch.func.jvp(func, primals, *options, **named)
