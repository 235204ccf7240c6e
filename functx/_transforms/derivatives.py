"""The derivatives of :mod:`torch.func`, with a reverse mode that needs less memory.

Signatures and results are those of torch. The peak memory is that of ``torch.autograd.grad`` (NOTE
[lean] in `reverse_mode`). JAX arrays are passed to JAX's transforms (NOTE [whose arrays] in
`functx._core.backend_dispatch`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from functx import _torch
from functx._core import (
    Argnums,
    dispatches_on_arguments,
    dispatches_on_primals,
    norm_derivatives,
    only_transposed,
    told,
    tree,
    validate,
)
from functx._remat import made_inside, sharding, taken_in
from functx._transforms.reverse_mode import adding_remedies, record

P = ParamSpec("P")
R = TypeVar("R")


@dispatches_on_arguments
@told
def grad(func: Callable[P, Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[P, Any]:
    """The gradient of a scalar function.

    This is :func:`torch.func.grad`, at about a third of its peak memory.

    Args:
        func: Takes pytrees of any values, and returns a tensor of shape ``()`` (with ``has_aux``,
            a pair of that and a pytree).
        argnums: Which positional arguments to differentiate; every leaf in them must be a floating
            point or complex tensor.
        has_aux: Whether ``func`` returns ``(value, aux)``.

    Returns:
        A function of the same arguments that returns the gradient, a pytree like the argument, with
        the shapes and dtypes of its leaves. If ``argnums`` is a tuple, it returns a tuple of them.
        With ``has_aux``, it returns the pair of that and ``aux``.

    Raises:
        TypeError: ``func`` is not callable.
        RuntimeError: ``argnums`` is not an int or a tuple of different ints, or is out of range at
            the call; ``func`` does not return a scalar, or a pair with ``has_aux``; ``func`` uses
            saved-tensor hooks, as ``torch.utils.checkpoint`` does.
        ValueError, RuntimeError: At the call (one error that is both): a leaf to differentiate is
            not a tensor, or has an integer dtype.

    Example:
        >>> import torch, functx
        >>> functx.grad(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
        tensor([ 3., 12.])
        >>> functx.vmap(functx.grad(torch.sin))(torch.zeros(3))  # per-example gradients
        tensor([1., 1., 1.])
    """
    arranged = (lambda out, grads: (grads, out[1])) if has_aux else (lambda out, grads: grads)
    return _of_scalar(func, argnums, has_aux, "grad", arranged)


@dispatches_on_arguments
@told
def grad_and_value(
    func: Callable[P, R], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[P, tuple[Any, R]]:
    """The gradient of a scalar function and its value, in torch's order.

    Arguments and errors are those of :func:`functx.grad`.

    Returns:
        A function that returns ``(gradient, value)``, with ``has_aux`` ``(gradient, (value, aux))``

    Example:
        >>> import torch, functx
        >>> functx.grad_and_value(torch.exp)(torch.tensor(0.0))
        (tensor(1.), tensor(1.))
    """
    return _of_scalar(func, argnums, has_aux, "grad_and_value", lambda out, grads: (grads, out))


@dispatches_on_arguments
@told
def value_and_grad(
    func: Callable[P, R], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[P, tuple[R, Any]]:
    """The value of a scalar function and its gradient, in JAX's order.

    Arguments and errors are those of :func:`functx.grad`.

    Returns:
        A function that returns ``(value, gradient)``, with ``has_aux`` ``((value, aux), gradient)``

    Example:
        >>> import torch, functx
        >>> loss = lambda w, x: ((w * x).sum(), {"scaled": w * x})
        >>> (value, aux), gradient = functx.value_and_grad(loss, has_aux=True)(
        ...     torch.tensor(2.0), torch.tensor([1.0, 3.0])
        ... )
        >>> value, aux, gradient
        (tensor(8.), {'scaled': tensor([2., 6.])}, tensor(4.))
    """
    return _of_scalar(func, argnums, has_aux, "value_and_grad", lambda *both: both)


def _of_scalar(
    func: Callable[..., Any], argnums: Argnums, has_aux: bool, name: str, arranged: Any
) -> Any:
    """A function that returns ``arranged(result, gradient)`` for the result of ``func``."""
    validate.check_argnums(argnums, name)
    api = f"{name}(f)(*args)"
    check = functools.partial(validate.check_scalar, api=api)

    def transformed(*args: Any, **kwargs: Any) -> Any:
        value, aux, pullback = record(
            func, args, kwargs, argnums, has_aux=has_aux, check_output=check, api=api, once=True
        )
        gradient = pullback(torch.ones_like(value), retain_graph=False)
        return arranged((value, aux) if has_aux else value, gradient)

    return told(transformed, like=func)


@dispatches_on_primals
@told
def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The output of a function, and its pullback: :func:`torch.func.vjp`.

    Args:
        func: Takes ``primals``, and returns a pytree of floating point or complex tensors (with
            ``has_aux``, a pair of that and a pytree).
        *primals: Pytrees of floating point or complex tensors.
        has_aux: Whether ``func`` returns ``(output, aux)``.

    Returns:
        ``(output, vjp_fn)``, or ``(output, vjp_fn, aux)`` with ``has_aux``.
        ``vjp_fn(cotangents, retain_graph=True, create_graph=None)`` takes a pytree like the output
        and returns a tuple of pytrees like the primals. Pass ``retain_graph=False`` in the last
        call, so that the peak is that of one backward pass.

    Raises:
        TypeError: ``func`` is not callable.
        ValueError, RuntimeError: As :func:`functx.grad`, for a leaf of ``primals``.
        RuntimeError: An output is not a tensor or has an integer dtype; there is no output; with
            ``has_aux``, ``func`` does not return a pair; ``func`` uses saved-tensor hooks.

    Example:
        >>> import torch, functx
        >>> output, vjp_fn = functx.vjp(torch.mul, torch.tensor(2.0), torch.tensor(3.0))
        >>> output, vjp_fn(torch.tensor(1.0), retain_graph=False)
        (tensor(6.), (tensor(3.), tensor(2.)))
    """
    at = tuple(range(len(primals)))
    output, aux, pullback = record(func, primals, {}, at, has_aux=has_aux, api="vjp(f, *primals)")
    return (output, pullback, aux) if has_aux else (output, pullback)


@dispatches_on_primals
def jvp(
    func: Callable[..., Any],
    primals: Any,
    tangents: Any,
    *,
    strict: bool = False,
    has_aux: bool = False,
) -> Any:
    """The output of a function, and its Jacobian-vector product: :func:`torch.func.jvp`."""
    of_torch = functools.partial(torch.func.jvp, func, strict=strict, has_aux=has_aux)
    if torch.compiler.is_dynamo_compiling():
        return of_torch(primals, tangents)
    validate.check_inputs((primals,), (0,), "jvp(f, primals, tangents)")
    sharding.check_forward_mode((primals, tangents), "jvp(f, primals, tangents)")
    primals, tangents = taken_in("jvp", (primals, tangents))
    watch = sharding.watching("jvp(f, primals, tangents)")
    with adding_remedies(), norm_derivatives.around(primals), _torch.RequiresGradAllowed(), watch:
        return made_inside(of_torch(primals, tangents))


@dispatches_on_primals
@told
def linearize(func: Callable[..., R], *primals: Any) -> tuple[R, Callable[..., R]]:
    """The value of a function, and its Jacobian-vector product at that point, for many tangents.

    Unlike :func:`torch.func.linearize`, it runs ``func`` once and traces nothing. Between calls it
    keeps what a pullback saves; for a `functx.remat` region, these are its inputs. The linear
    function is the transpose of the pullback, so each call costs a pullback and its derivative. A
    JAX function without a reverse mode (`functx.compat.from_jax` of a while loop) runs its forward
    mode instead.

    Args:
        func: Takes and returns pytrees of tensors.
        *primals: Its arguments; all leaves are floating point or complex tensors.

    Returns:
        The value of ``func`` at ``primals``, and a linear function. The linear function takes
        tangents, pytrees like ``primals``, and returns a pytree like the value, with the derivative
        of each leaf, and zeros for integer tensors. It raises a ``RuntimeError`` if tangents do not
        fit ``primals``.

    Example:
        >>> import torch, functx
        >>> value, linear = functx.linearize(torch.sin, torch.zeros(3))
        >>> linear(torch.ones(3))
        tensor([1., 1., 1.])

    Source:
        Townsend, *A new trick for calculating Jacobian vector products*, 2017: the transpose of a
        transpose is the map itself.
    """

    def parts(*args: Any) -> tuple[list[Any], Any]:
        with only_transposed():
            return tree.partition(func(*args), belongs=validate.has_derivatives)

    values, pullback, others = vjp(parts, *primals, has_aux=True)
    constants = tree.map_(
        lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, others
    )
    layouts = [(value.shape, value.dtype, value.device) for value in values]

    def linear(*tangents: Any) -> Any:
        """The derivative of the function along tangents."""
        (flat, spec), (flat_primals, expected) = tree.flatten(tangents), tree.flatten(primals)
        if spec != expected:
            raise RuntimeError(
                f"linearize: Expected the tangents {spec} to have the same argspec as the primals "
                f"{expected}"
            )
        for what in ("shape", "dtype", "device"):
            if [getattr(t, what, None) for t in flat] != [getattr(p, what) for p in flat_primals]:
                raise RuntimeError(
                    f"linearize: a tangent in flattened pytree doesn't match the {what} of the "
                    "corresponding primal"
                )
        # The pullback is linear in the cotangents, so it can be transposed at any point.
        zeros = [torch.zeros(shape, dtype=dtype, device=on) for shape, dtype, on in layouts]
        return tree.combine(vjp(pullback, zeros)[1](tangents)[0], constants)

    return tree.combine(values, others), linear
