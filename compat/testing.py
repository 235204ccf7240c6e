"""For test suites: a torch function agrees with itself in JAX, or the test fails and says where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from functx.compat._report import Crosscheck

__all__ = ["assert_agrees"]


def assert_agrees(
    f: Callable[..., Any] | torch.nn.Module,
    *args: Any,
    transforms: Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    argnums: int | Sequence[int] = 0,
    in_dims: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    kept: bool = True,
    peak: bool = False,
    msg: str | None = None,
) -> Crosscheck:
    """Assert that a torch function and its derivatives are the same in JAX.

    Args:
        f: a torch function of pytrees of tensors, or a module; it may contain `functx.remat`.
        *args: its arguments.
        transforms: what to compare, as in `functx.compat.crosscheck`: ``"value"``, ``"grad"``,
            ``"vmap(grad)"``, ``"jvp"``, ``"hvp"``, ``"jacrev"``, ``"jacfwd"``, ``"hessian"``; by
            default value and gradients.
        rtol: the difference allowed, relative to the largest entry of a tensor; by default what is
            usual for its dtype.
        atol: the absolute difference allowed on top.
        argnums: which positional arguments derivatives are taken in.
        in_dims: as in `functx.vmap`; then ``f`` is the function of one example.
        kwargs: keyword arguments of ``f``.
        kept: whether the bytes kept at the boundaries of regions must be equal too.
        peak: whether to measure torch's peak and XLA's temporary bytes, for the object returned.
        msg: said first if the assertion fails.

    Returns:
        The `functx.compat.Crosscheck`, for further assertions on its figures.

    Raises:
        AssertionError: naming each quantity that differs and by how much, the first operation that
            does with its line of code, and the regions whose bytes differ.
        TypeError: as `functx.compat.crosscheck`.
        ValueError: as `functx.compat.crosscheck`.
        LoweringError: if ``f`` can't be expressed in JAX.
        ImportError: JAX is not installed.

    Example:
        >>> import torch
        >>> from functx.compat.testing import assert_agrees
        >>> def loss(w, x):
        ...     return torch.tanh(x @ w).square().sum()
        >>> report = assert_agrees(loss, torch.randn(3, 3), torch.randn(5, 3))
        >>> report.kept_equal
        True
    """
    __tracebackhide__ = True
    from functx.compat import crosscheck

    report = crosscheck(
        f,
        *args,
        transforms=transforms,
        rtol=rtol,
        atol=atol,
        argnums=argnums,
        in_dims=in_dims,
        kwargs=kwargs,
        peak=peak,
    )
    report.assert_agrees(kept=kept, msg=msg)
    return report
