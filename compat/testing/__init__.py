"""Assertions for test suites: a torch function and the same function in JAX must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from functx.compat._crosscheck import Crosscheck

__all__ = ["assert_agrees", "assert_model_agrees"]


def assert_agrees(
    f: Callable[..., Any] | torch.nn.Module,
    *args: Any,
    kept: bool = True,
    peak: bool = False,
    msg: str | None = None,
    **options: Any,
) -> Crosscheck:
    """Assert that a torch function and its derivatives are the same in JAX.

    Args:
        f: a torch function of pytrees of tensors, or a module; it may contain `functx.remat`.
        *args: its arguments.
        kept: whether the bytes kept at the boundaries of regions must be equal too.
        peak: whether to measure torch's peak and XLA's temporary bytes, for the object returned.
        msg: said first if the assertion fails.
        **options: ``transforms``, ``rtol``, ``atol``, ``argnums``, ``in_dims``, ``kwargs`` and the
            others of `functx.compat.crosscheck`.

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
        >>> loss = lambda w, x: torch.tanh(x @ w).square().sum()
        >>> report = assert_agrees(loss, torch.randn(3, 3), torch.randn(5, 3))
        >>> report.kept_equal
        True
    """
    __tracebackhide__ = True
    from functx.compat import crosscheck

    report = crosscheck(f, *args, peak=peak, **options)
    report.assert_agrees(kept=kept, msg=msg)
    return report


def assert_model_agrees(name: str, *, remat: Any = None, **options: Any) -> Crosscheck:
    """`assert_agrees` of a model of transformers, as ``functx crosscheck hf:NAME --remat WHERE``.

    Args:
        name: a model type (``"bert"``), or a class; it is made small, with random weights.
        remat: which of its modules are regions, as for `functx.apply_remat`.
        **options: of `assert_agrees`.

    Raises:
        AssertionError: a value, a gradient, or what is kept differs.
        LookupError, ValueError: there is no such type, or it can't be made small.
    """
    from functx.compat.testing.small_models import loss_of

    f, args = loss_of(name, remat)
    return assert_agrees(f, *args, **options)
