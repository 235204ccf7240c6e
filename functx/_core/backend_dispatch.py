"""Whose arrays a transform is given: torch tensors are functx's, JAX arrays are JAX's.

NOTE [whose arrays]
A transform can't know when it is made, so it asks at each call; without JAX in the process that is
one look into a dict. If JAX arrays are among the arguments, JAX's transform of that name is given
the untransformed function. A function that is itself such a transform asks again, with the tracers
it gets: `functx.vmap(functx.grad(functx.remat(g)))` is `jax.vmap(jax.grad(jax.checkpoint(g)))`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from functx._core import tree, validate

T = TypeVar("T", bound=Callable[..., Any])


def backend_of(api: str, args: Any, kwargs: Any) -> Any:
    """The module whose transforms these arguments need, ``None`` for torch; NOTE [whose arrays].

    Arrays of both kinds are a ``TypeError`` that names ``api``.
    """
    if torch.compiler.is_dynamo_compiling() or sys.modules.get("jax") is None:
        return None
    return importlib.import_module("functx.compat._backend.backend").find(api, args, kwargs)


def dispatches_on_arguments(transform: T) -> T:
    """A transform of functions that looks at the arguments of the function it makes."""
    name = transform.__name__

    @functools.wraps(transform)
    def chosen(func: Any, *options: Any, **named: Any) -> Any:
        validate.check_options(name, named)
        validate.check_callable(func, name)
        own = transform(func, *options, **named)

        @functools.wraps(own)
        def transformed(*args: Any, **kwargs: Any) -> Any:
            if (backend := backend_of(name, args, kwargs)) is None:
                try:
                    return own(*args, **kwargs)
                except RecursionError:
                    tree.leaves((args, kwargs))  # says so if the cause is an argument
                    raise
            return getattr(backend, name)(func, *options, **named)(*args, **kwargs)

        return transformed

    return cast(T, chosen)


def dispatches_on_primals(transform: T) -> T:
    """A transform that is given a function and its arguments at once."""
    name = transform.__name__

    @functools.wraps(transform)
    def chosen(func: Any, *args: Any, **named: Any) -> Any:
        validate.check_options(name, named)
        validate.check_callable(func, name)
        if (backend := backend_of(name, args, named)) is None:
            return transform(func, *args, **named)
        return getattr(backend, name)(func, *args, **named)

    return cast(T, chosen)
