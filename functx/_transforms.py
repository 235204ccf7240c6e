"""The transforms: what :mod:`torch.func` exports (`linearize` aside), with a lean reverse mode.

``grad``, ``grad_and_value``, ``value_and_grad``, ``vjp``, ``jacrev`` and ``hessian`` are functx's
own: same signatures and results as torch's, at the peak memory of ``torch.autograd.grad`` (see
NOTE [lean] in ``_pullback.py``). The others are torch's. JAX arrays are transformed by JAX: NOTE
[whose arrays] in ``_arrays.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.func import (
    debug_unwrap,
    functional_call,
    functionalize,
    replace_all_batch_norm_modules_,
    stack_module_state,
)

from functx import _forward, _jacobian, _remat, _tree, _validate
from functx._arrays import backend_of, by_arguments, by_primals
from functx._pullback import record
from functx._torch import compiler
from functx._validate import Argnums
from functx._vmap import vmap_by_keys

try:
    from torch.func import rearrange
except ImportError:  # before torch 2.13 it is exported by functorch alone
    from functorch.einops import rearrange  # type: ignore[import-untyped,no-redef]

__all__ = [
    "debug_unwrap",
    "functional_call",
    "functionalize",
    "grad",
    "grad_and_value",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "rearrange",
    "replace_all_batch_norm_modules_",
    "stack_module_state",
    "value_and_grad",
    "vjp",
    "vmap",
]


vmap = by_arguments(_remat.by_arguments(vmap_by_keys))
jacfwd = by_arguments(_remat.by_arguments(_forward.jacfwd))
jvp = by_primals(_remat.by_primals(_forward.jvp))


@compiler.told
def grad(
    func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The gradient of a scalar function.

    As :func:`torch.func.grad`, at about a third of its peak memory.

    Args:
        func: Takes pytrees of anything, and returns a tensor of shape ``()`` (with ``has_aux``,
            a pair of that and a pytree).
        argnums: Which positional arguments to differentiate; every leaf in them must be a floating
            point or complex tensor.
        has_aux: Whether ``func`` returns ``(value, aux)``.

    Returns:
        A function of the same arguments that returns the gradient, a pytree like the argument, with
        the shapes and dtypes of its leaves; a tuple of them if ``argnums`` is a tuple; with
        ``has_aux``, the pair of that and ``aux``.

    Raises:
        TypeError: ``func`` can't be called.
        RuntimeError: ``argnums`` is not an int or tuple of different ints, or, at the call, out of
            range; an argument is of an integer dtype; ``func`` does not return a scalar, or a pair
            with ``has_aux``; it uses saved-tensor hooks, as ``torch.utils.checkpoint`` does.
        ValueError: At the call: a leaf to differentiate is not a tensor.

    Example:
        >>> import torch, functx
        >>> functx.grad(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
        tensor([ 3., 12.])
        >>> functx.vmap(functx.grad(torch.sin))(torch.zeros(3))  # per-example gradients
        tensor([1., 1., 1.])
    """
    transformed = _value_and_grad(func, argnums, has_aux, "grad(f)(*args)")

    @_named_after(func)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if (backend := backend_of("grad", args, kwargs)) is not None:
            return backend.grad(func, argnums, has_aux)(*args, **kwargs)
        _, aux, gradients = transformed(args, kwargs)
        return (gradients, aux) if has_aux else gradients

    return gradient


@compiler.told
def grad_and_value(
    func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The gradient of a scalar function and its value, in torch's order.

    As :func:`torch.func.grad_and_value`, at about a third of its peak memory.

    Args:
        func: As for :func:`functx.grad`.
        argnums: As for :func:`functx.grad`.
        has_aux: As for :func:`functx.grad`.

    Returns:
        A function that returns ``(gradient, value)``; with ``has_aux``,
        ``(gradient, (value, aux))``.

    Raises:
        TypeError: As :func:`functx.grad`.
        RuntimeError: As :func:`functx.grad`.
        ValueError: As :func:`functx.grad`.

    Example:
        >>> import torch, functx
        >>> functx.grad_and_value(torch.exp)(torch.tensor(0.0))
        (tensor(1.), tensor(1.))
    """
    transformed = _value_and_grad(func, argnums, has_aux, "grad_and_value(f)(*args)")

    @_named_after(func)
    def gradient_and_value(*args: Any, **kwargs: Any) -> Any:
        if (backend := backend_of("grad_and_value", args, kwargs)) is not None:
            return backend.grad_and_value(func, argnums, has_aux)(*args, **kwargs)
        value, aux, gradients = transformed(args, kwargs)
        return gradients, ((value, aux) if has_aux else value)

    return gradient_and_value


@compiler.told
def value_and_grad(
    func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The value of a scalar function and its gradient, in JAX's order.

    Args:
        func: As for :func:`functx.grad`.
        argnums: As for :func:`functx.grad`.
        has_aux: As for :func:`functx.grad`.

    Returns:
        A function that returns ``(value, gradient)``; with ``has_aux``,
        ``((value, aux), gradient)``.

    Raises:
        TypeError: As :func:`functx.grad`.
        RuntimeError: As :func:`functx.grad`.
        ValueError: As :func:`functx.grad`.

    Example:
        >>> import torch, functx
        >>> loss = lambda w, x: ((w * x).sum(), {"scaled": w * x})
        >>> (value, aux), gradient = functx.value_and_grad(loss, has_aux=True)(
        ...     torch.tensor(2.0), torch.tensor([1.0, 3.0])
        ... )
        >>> value, aux, gradient
        (tensor(8.), {'scaled': tensor([2., 6.])}, tensor(4.))
    """
    transformed = _value_and_grad(func, argnums, has_aux, "value_and_grad(f)(*args)")

    @_named_after(func)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        if (backend := backend_of("value_and_grad", args, kwargs)) is not None:
            return backend.value_and_grad(func, argnums, has_aux)(*args, **kwargs)
        value, aux, gradients = transformed(args, kwargs)
        return ((value, aux) if has_aux else value), gradients

    return value_and_gradient


@compiler.told
def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The output of a function, and its pullback: vector-Jacobian products.

    As :func:`torch.func.vjp`.

    Args:
        func: Takes ``primals``, and returns a pytree of floating point or complex tensors (with
            ``has_aux``, a pair of that and a pytree).
        *primals: Pytrees of floating point or complex tensors.
        has_aux: Whether ``func`` returns ``(output, aux)``.

    Returns:
        ``(output, vjp_fn)``, or ``(output, vjp_fn, aux)`` with ``has_aux``.
        ``vjp_fn(cotangents, retain_graph=True, create_graph=None)`` takes a pytree like the output
        and returns a tuple of pytrees like the primals. Its last call should pass
        ``retain_graph=False``: the peak is then that of one backward pass.

    Raises:
        TypeError: ``func`` can't be called.
        RuntimeError: A primal or an output is of an integer dtype; an output is not a tensor, or
            there is none; ``has_aux`` and no pair returned; ``func`` uses saved-tensor hooks.
        ValueError: A leaf of ``primals`` is not a tensor.

    Example:
        >>> import torch, functx
        >>> output, vjp_fn = functx.vjp(torch.mul, torch.tensor(2.0), torch.tensor(3.0))
        >>> output, vjp_fn(torch.tensor(1.0), retain_graph=False)
        (tensor(6.), (tensor(3.), tensor(2.)))
    """
    _validate.check_callable(func, "vjp")
    if (backend := backend_of("vjp", primals, {})) is not None:
        return backend.vjp(func, *primals, has_aux=has_aux)
    output, aux, pullback = record(
        func,
        primals,
        {},
        tuple(range(len(primals))),
        has_aux=has_aux,
        check_output=lambda out: _validate.check_outputs(_tree.leaves(out), "vjp(f, *primals)"),
        api="vjp(f, *primals)",
    )
    return (output, pullback, aux) if has_aux else (output, pullback)


@compiler.told
def jacrev(
    func: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable[..., Any]:
    """The Jacobian of a function, by reverse mode: one pullback for each number of the output.

    As :func:`torch.func.jacrev`; the last pullback frees the residuals as it goes.

    Args:
        func: Takes pytrees, and returns a pytree of real floating point tensors (with ``has_aux``,
            a pair of that and a pytree).
        argnums: As for :func:`functx.grad`.
        has_aux: Whether ``func`` returns ``(output, aux)``.
        chunk_size: How many rows to compute at a time; by default all in one. With 1 the rows are
            computed in a loop without ``vmap``, and are free of its limitations.

    Returns:
        A function that returns, for each output of shape ``m`` and each differentiated leaf of
        shape ``n``, a tensor of shape ``m + n``, in a pytree like the output whose leaves are
        pytrees like the argument; with ``has_aux``, the pair of that and ``aux``.

    Raises:
        TypeError: ``func`` can't be called.
        ValueError: ``chunk_size`` is not positive; or, at the call, a leaf to differentiate is not
            a tensor.
        RuntimeError: As :func:`functx.grad`, or an argument or output is complex.

    Example:
        >>> import torch, functx
        >>> functx.jacrev(lambda x: x**2)(torch.tensor([1.0, 2.0]))
        tensor([[2., 0.],
                [0., 4.]])
    """
    _validate.check_callable(func, "jacrev")
    _validate.check_argnums(argnums, "jacrev")
    if chunk_size is not None and chunk_size <= 0:
        raise ValueError(f"jacrev: `chunk_size` should be greater than 0, got {chunk_size}")

    @_named_after(func)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if (backend := backend_of("jacrev", args, kwargs)) is not None:
            named = {"has_aux": has_aux, "chunk_size": chunk_size}
            return backend.jacrev(func, argnums, **named)(*args, **kwargs)
        _validate.check_real(_tree.leaves(args), "jacrev", "inputs")
        positions = _validate.resolve_argnums(argnums, len(args), "jacrev")
        output, aux, pullback = record(
            func,
            args,
            kwargs,
            positions,
            has_aux=has_aux,
            check_output=_check_jacobian_output,
            api="jacrev(f)(*args)",
        )
        inputs = tuple(args[position] for position in positions)
        copied = _preallocate_and_copy
        rows = _jacobian.pull_back_basis(pullback, output, inputs, chunk_size, preallocate=copied)
        made = _jacobian.assemble(rows, output, inputs, single=isinstance(argnums, int))
        return (made, aux) if has_aux else made

    return jacobian


@compiler.told
def hessian(func: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., Any]:
    """The Hessian of a function, forward over reverse: ``jacfwd(jacrev(func))``.

    As :func:`torch.func.hessian`, with the lean :func:`functx.jacrev`.

    Args:
        func: Takes pytrees of real tensors, and returns a pytree of them.
        argnums: As for :func:`functx.grad`.

    Returns:
        A function that returns, for an output of shape ``m`` and two leaves of shapes ``n`` and
        ``k``, a tensor of shape ``m + n + k``, in the nested pytrees of two Jacobians.

    Raises:
        TypeError: As :func:`functx.jacrev`.
        RuntimeError: As :func:`functx.jacrev`.
        ValueError: As :func:`functx.jacrev`.

    Example:
        >>> import torch, functx
        >>> functx.hessian(lambda x: x[0] * x[1])(torch.tensor([3.0, 5.0]))
        tensor([[0., 1.],
                [1., 0.]])
    """
    _validate.check_callable(func, "hessian")
    _validate.check_argnums(argnums, "hessian")
    transformed = _forward.jacfwd(jacrev(func, argnums), argnums)

    @_named_after(func)
    def second_derivative(*args: Any) -> Any:
        if (backend := backend_of("hessian", args, {})) is not None:
            return backend.hessian(func, argnums)(*args)
        positions = _validate.resolve_argnums(argnums, len(args), "hessian")
        _validate.check_inputs(args, positions, "hessian(f)(*args)")
        return transformed(*args)

    return second_derivative


def _value_and_grad(
    func: Callable[..., Any], argnums: Argnums, has_aux: bool, api: str
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any, Any]]:
    """A function of ``args`` and ``kwargs`` that returns value, aux and gradient of ``func``."""
    name = api.partition("(")[0]
    _validate.check_callable(func, name)
    _validate.check_argnums(argnums, name)

    def transformed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        value, aux, pullback = record(
            func,
            args,
            kwargs,
            _validate.resolve_argnums(argnums, len(args), name),
            has_aux=has_aux,
            check_output=lambda output: _validate.check_scalar(output, api),
            api=api,
            once=True,
        )
        gradients = pullback(torch.ones_like(value), retain_graph=False)
        return value, aux, gradients[0] if isinstance(argnums, int) else gradients

    return transformed


def _check_jacobian_output(output: Any) -> None:
    leaves = _tree.leaves(output)
    _validate.check_outputs(leaves, "jacrev(f)(*args)")
    _validate.check_real(leaves, "jacrev", "outputs")


def _named_after(func: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``functools.wraps`` without the attributes: those of a module are its parameters.

    And hidden from ``torch.compile``, which would trace half of it.
    """
    wraps = functools.wraps(func, updated=())
    return lambda wrapper: compiler.told(wraps(wrapper), _validate.name_of(func))
