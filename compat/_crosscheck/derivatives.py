"""The transforms that can be cross-checked, each said once for both frameworks.

A transform is a function of a `Library`, which is functx or JAX: what differs between the two is in
there.  A result that is not one number is made one before it is differentiated: by its product with
fixed numbers (about normal, a few bits each, so that they are the same in every dtype), since a
plain sum would hide that a softmax, say, is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from functx.compat._crosscheck.case import Case

Function = Callable[..., Any]
Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Library:
    """One framework's transforms, and the case in it."""

    case: Case
    one: Function  # the function of the case in this framework, of one example if it is batched
    module: Any  # `functx` or `jax`

    def value(self, primals: Any, rest: Any) -> Any:
        """The results: of all examples, if the case is batched."""
        return self.over_examples(self.one)(primals, rest)

    def inexact_results(self, primals: Any, rest: Any) -> list[Any]:
        """Of the results those that have derivatives."""
        return [x for x in self.value(primals, rest) if _inexact(x)]

    def over_examples(self, f: Function) -> Function:
        """``f`` of every example, or ``f`` itself."""
        if not self.case.batched:
            return f
        vmapped: Function = self.module.vmap(f, (self.case.primal_dims, self.case.rest_dims))
        return vmapped

    def scalar(self, primals: Any, rest: Any) -> Any:
        """One number for one call of ``one``."""
        total = None
        for n, x in enumerate(self.one(primals, rest)):
            if not _inexact(x):
                continue
            part = (x * _like(_weights(x.shape, n), x)).sum().real if x.shape else x.real
            total = part if total is None else total + part
        return total

    def loss(self, primals: Any, rest: Any) -> Any:
        """One number for all examples: the mean."""
        if not self.case.batched:
            return self.scalar(primals, rest)
        return self.over_examples(self.scalar)(primals, rest).mean()

    def tangents(self, primals: Sequence[Any]) -> list[Any]:
        """A direction in the primals, the same for both frameworks."""
        return [_like(_numbers(x.shape, 1000 + n), x) for n, x in enumerate(primals)]


def _inexact(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.is_floating_point() or x.is_complex()
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _like(numbers: Numbers, x: Any) -> Any:
    """An array of the framework and dtype of another."""
    if isinstance(x, torch.Tensor):
        return torch.from_numpy(numbers).to(x.device, x.dtype)
    return jnp.asarray(numbers).astype(x.dtype)


def _weights(shape: Sequence[int], number: int) -> Numbers:
    # Scaled, so that the sum does not grow with the number of entries; by a power of two.
    return _numbers(shape, number) * 2.0 ** -round(math.log2(max(1, math.prod(shape))) / 2)


def _numbers(shape: Sequence[int], number: int) -> Numbers:
    """Fixed numbers, about normal, multiples of 1/16 and so exact in every dtype."""
    found = np.random.default_rng(number).standard_normal(tuple(shape))
    return np.asarray(np.round(np.clip(found, -3, 3) * 16) / 16)


def _along(of: Library, f: Function) -> Function:
    """The derivative of a function of (primals, rest) along a direction."""
    return lambda primals, rest: of.module.jvp(
        lambda p: f(p, rest), (primals,), (of.tangents(primals),)
    )[1]


def _jacobian(which: str) -> Callable[[Library], Function]:
    return lambda of: (
        lambda p, rest: getattr(of.module, which)(lambda q: of.inexact_results(q, rest))(p)
    )


TRANSFORMS: dict[str, Callable[[Library], Function]] = {
    "value": lambda of: of.value,
    "grad": lambda of: of.module.grad(of.loss),
    "vmap(grad)": lambda of: of.over_examples(of.module.grad(of.scalar)),
    "jvp": lambda of: _along(of, of.inexact_results),
    "hvp": lambda of: _along(of, of.module.grad(of.loss)),
    "jacrev": _jacobian("jacrev"),
    "jacfwd": _jacobian("jacfwd"),
    "hessian": lambda of: lambda p, rest: of.module.hessian(lambda q: of.loss(q, rest))(p),
}


def chosen(transforms: Sequence[str] | None, case: Case, differentiable: bool) -> tuple[str, ...]:
    """The transforms asked for, which the case must allow, or those that it allows."""
    if transforms is None:
        if not differentiable:
            return ("value",)
        return ("value", "grad", "vmap(grad)") if case.batched else ("value", "grad")
    names = (transforms,) if isinstance(transforms, str) else tuple(transforms)
    if not names:
        raise ValueError(
            f"crosscheck: no transform was asked for; there are {', '.join(TRANSFORMS)}"
        )
    for name in names:
        if name not in TRANSFORMS:
            raise ValueError(
                f"crosscheck knows no transform {name!r}; there are {', '.join(TRANSFORMS)}"
            )
        if name == "vmap(grad)" and not case.batched:
            raise ValueError(
                "crosscheck: vmap(grad) needs in_dims (--in-dims), which says what an example is;"
                " then the function is that of one example"
            )
        if name != "value" and not differentiable:
            raise TypeError(
                f"crosscheck: {name} of {case.name} needs a real or complex tensor among the"
                " arguments that argnums (--argnums) chooses, and one in the result;"
                " transforms=('value',), or --transforms value, compares the values alone"
            )
    return names


def as_torch_says(name: str, theirs: Sequence[Any]) -> list[Any]:
    """JAX's derivatives in torch's convention: gradients in complex numbers are conjugated."""
    gradients = name in ("grad", "vmap(grad)", "hvp")
    return [x.conj() if gradients and jnp.iscomplexobj(x) else x for x in theirs]
