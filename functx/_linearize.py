"""`linearize`: a function's value, and its derivative at that point as a linear function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _tree
from functx._arrays import by_primals
from functx._torch import compiler
from functx._transforms import vjp


@by_primals
@compiler.told
def linearize(func: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """The value of a function, and its Jacobian-vector product at that point, for many tangents.

    As :func:`torch.func.linearize`, but it runs ``func`` once, traces nothing, and keeps between
    calls what a pullback keeps: of a `functx.remat` region, its inputs. The linear function is the
    transpose of the pullback, which is linear as well, so each call costs a pullback and its
    derivative (and a replay of each region).

    Args:
        func: Takes and returns pytrees of tensors.
        *primals: Its arguments; all leaves are floating point or complex tensors.

    Returns:
        The value of ``func`` at ``primals``, and a function of tangents, pytrees like ``primals``
        with the shapes, dtypes and devices of their leaves, that returns a pytree like the value:
        the derivative of each leaf, zeros for leaves that are no floating point tensors.

    Raises:
        RuntimeError: by the function returned, where tangents do not fit ``primals``.

    Example:
        >>> import torch, functx
        >>> value, linear = functx.linearize(torch.sin, torch.zeros(3))
        >>> linear(torch.ones(3))
        tensor([1., 1., 1.])

    Source:
        The transpose of a transpose is the map itself: Radul et al., *You only linearize once*,
        POPL 2023, the other way around; Townsend, *A new trick for calculating Jacobian vector
        products*, 2017.
    """
    structure: list[Any] = []

    def flat(*args: Any) -> tuple[list[Any], list[Any]]:
        outs, spec = _tree.flatten(func(*args))
        structure[:] = [spec, [_varies(out) for out in outs]]
        return [o for o in outs if _varies(o)], [o for o in outs if not _varies(o)]

    values, pullback, others = vjp(flat, *primals, has_aux=True)
    spec, varies = structure
    layouts = [(v.shape, v.dtype, v.device) for v in values]
    fixed = [torch.zeros_like(o) if isinstance(o, Tensor) else o for o in others]
    leaves, primal_spec = _tree.flatten(primals)
    expected = [(p.shape, p.device, p.dtype) for p in leaves]

    def assemble(varying: Sequence[Any], rest: Sequence[Any]) -> Any:
        parts = iter(varying), iter(rest)
        return _tree.unflatten(spec, [next(parts[0] if v else parts[1]) for v in varies])

    def linear(*tangents: Any) -> Any:
        """The derivative of the function along tangents."""
        given, tangent_spec = _tree.flatten(tangents)
        if tangent_spec != primal_spec:
            raise RuntimeError(
                f"linearize: expected tangents of the structure of the primals, {primal_spec}, "
                f"got {tangent_spec}."
            )
        _check(given, expected)
        zeros = [torch.zeros(shape, dtype=d, device=on) for shape, d, on in layouts]
        # What maps cotangents to gradients is linear: zeros are as good a point as any.
        _, transpose = vjp(pullback, zeros)
        return assemble(transpose(tangents)[0], fixed)

    return assemble(values, others), linear


def _varies(t: Any) -> bool:
    return isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())


def _check(tangents: Sequence[Any], expected: Sequence[tuple[Any, Any, Any]]) -> None:
    for i, (t, wanted) in enumerate(zip(tangents, expected)):
        for name, has, should in zip(
            ("shape", "device", "dtype"), (t.shape, t.device, t.dtype), wanted
        ):
            if has != should:
                raise RuntimeError(
                    f"linearize: tangent {i} has the {name} {has}, which doesn't match the {name} "
                    f"{should} of the corresponding primal."
                )
