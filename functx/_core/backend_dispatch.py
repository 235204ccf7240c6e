"""Choose the framework of a transform by its arguments: functx for torch tensors, JAX for its own.

NOTE [whose arrays]
A transform is made before its arguments are known, so the choice is made at each call. Without JAX
in the process this costs one lookup in a dict. If an argument is a JAX array, JAX's transform of
the same name is applied to the original function. If that function is itself a functx transform, it
makes the same choice again when JAX calls it with tracers. So with JAX arrays
`functx.vmap(functx.grad(functx.remat(g)))` is `jax.vmap(jax.grad(jax.checkpoint(g)))`.
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
    """The module with the transforms for these arguments; ``None`` for torch. NOTE [whose arrays].

    Raises a ``TypeError`` that names ``api`` if there are tensors and JAX arrays.
    """
    if torch.compiler.is_dynamo_compiling() or sys.modules.get("jax") is None:
        return None
    return importlib.import_module("functx.compat._backend.backend").find(api, args, kwargs)


def dispatches_on_arguments(transform: T) -> T:
    """Decorate a transform that returns a function: each call of that function chooses."""
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
                    # If the cause is an argument that contains itself, this raises a better error.
                    tree.leaves((args, kwargs))
                    raise
            return getattr(backend, name)(func, *options, **named)(*args, **kwargs)

        return transformed

    return cast(T, chosen)


def dispatches_on_primals(transform: T) -> T:
    """Decorate a transform that takes a function together with its arguments, as ``vjp`` does."""
    name = transform.__name__

    @functools.wraps(transform)
    def chosen(func: Any, *args: Any, **named: Any) -> Any:
        validate.check_options(name, named)
        validate.check_callable(func, name)
        if (backend := backend_of(name, args, named)) is None:
            return transform(func, *args, **named)
        return getattr(backend, name)(func, *args, **named)

    return cast(T, chosen)
