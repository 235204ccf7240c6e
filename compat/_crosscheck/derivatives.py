"""The transforms that can be cross-checked, each defined once for both frameworks.

A transform is a function of a `Library`, which is functx or JAX and contains all that differs
between them. A result that is not a single number is reduced before it is differentiated: by its
inner product with fixed numbers (about normal, with a few bits each, so that they are exact in
every dtype). A plain sum would hide errors, for example in a softmax, whose sum is constant.
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
    """The transforms of one framework, and the function of the case in it."""

    case: Case
    one: Function  # the function of the case; if the case is batched, it takes one example
    module: Any  # `functx` or `jax`

    def value(self, primals: Any, rest: Any) -> Any:
        """The results; for all examples, if the case is batched."""
        return self.over_examples(self.one)(primals, rest)

    def inexact_results(self, primals: Any, rest: Any) -> list[Any]:
        """The results that have derivatives."""
        return [x for x in self.value(primals, rest) if _inexact(x)]

    def over_examples(self, f: Function) -> Function:
        """``f`` mapped over the examples, or ``f`` itself if the case is not batched."""
        if not self.case.batched:
            return f
        vmapped: Function = self.module.vmap(f, (self.case.primal_dims, self.case.rest_dims))
        return vmapped

    def scalar(self, primals: Any, rest: Any) -> Any:
        """The results of ``one``, reduced to one number."""
        total = None
        for n, x in enumerate(self.one(primals, rest)):
            if not _inexact(x):
                continue
            part = (x * _like(_weights(x.shape, n), x)).sum().real if x.shape else x.real
            total = part if total is None else total + part
        return total

    def loss(self, primals: Any, rest: Any) -> Any:
        """The mean of `scalar` over all examples."""
        if not self.case.batched:
            return self.scalar(primals, rest)
        return self.over_examples(self.scalar)(primals, rest).mean()

    def tangents(self, primals: Sequence[Any]) -> list[Any]:
        """Tangents for the primals, the same in both frameworks."""
        return [_like(_numbers(x.shape, 1000 + n), x) for n, x in enumerate(primals)]


def _inexact(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.is_floating_point() or x.is_complex()
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _like(numbers: Numbers, x: Any) -> Any:
    """Convert numbers to the framework and dtype of ``x``."""
    if isinstance(x, torch.Tensor):
        return torch.from_numpy(numbers).to(x.device, x.dtype)
    return jnp.asarray(numbers).astype(x.dtype)


def _weights(shape: Sequence[int], number: int) -> Numbers:
    # Scale by a power of two, so that the sum does not grow with the number of entries.
    return _numbers(shape, number) * 2.0 ** -round(math.log2(max(1, math.prod(shape))) / 2)


def _numbers(shape: Sequence[int], number: int) -> Numbers:
    """Fixed, about normal numbers. They are multiples of 1/16, and so exact in every dtype."""
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
    """The requested transforms, or the default ones. Raises an error if the case forbids one."""
    if transforms is None:
        if not differentiable:
            return ("value",)
        return ("value", "grad", "vmap(grad)") if case.batched else ("value", "grad")
    names = (transforms,) if isinstance(transforms, str) else tuple(transforms)
    if not names:
        raise ValueError(f"crosscheck: transforms is empty; choose from {', '.join(TRANSFORMS)}")
    for name in names:
        if name not in TRANSFORMS:
            raise ValueError(
                f"crosscheck: unknown transform {name!r}; choose from {', '.join(TRANSFORMS)}"
            )
        if name == "vmap(grad)" and not case.batched:
            raise ValueError(
                "crosscheck: vmap(grad) needs in_dims (--in-dims), the axes of the examples; the"
                " function must then take one example"
            )
        if name != "value" and not differentiable:
            raise TypeError(
                f"crosscheck: {name} of {case.name} needs a real or complex tensor among the"
                " arguments that argnums (--argnums) chooses, and one in the result. Use"
                " transforms=('value',), or --transforms value, to compare only values"
            )
    return names


def as_torch_says(name: str, theirs: Sequence[Any]) -> list[Any]:
    """JAX's derivatives in torch's convention, with conjugated gradients of complex numbers."""
    gradients = name in ("grad", "vmap(grad)", "hvp")
    return [x.conj() if gradients and jnp.iscomplexobj(x) else x for x in theirs]
