"""Differences between results, in ulps, with the same function in float64 as a reference.

An ulp here is the spacing of the dtype at the largest magnitude of a tensor, so it measures an
error relative to the tensor as a whole. An entry that nearly cancels may lose its last digits
without counting as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx._core import tree
from functx._remat import no_regions

_WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
_WIDE |= dict.fromkeys((torch.complex32, torch.complex64), torch.complex128)
_NARROWER = {str(dtype).removeprefix("torch."): dtype for dtype in _WIDE}
_CASTS: dict[Any, Any] = dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), Tensor.double)
# The differences that are allowed between torch and JAX, relative to the largest entry: about 200
# ulp of float32, for sums in different orders in networks with several layers.
RTOL = {
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
    torch.float32: 2e-5,
    torch.float64: 1e-11,
    torch.complex64: 2e-5,
    torch.complex128: 1e-11,
}
# If torch's own numbers differ more than that from float64 (in sums that nearly cancel, as in the
# gradients of a trained network), JAX's numbers will differ as much. Then allow this multiple of
# torch's own error, ...
_OWN_ERRORS = 4
# ... but not more than this: a comparison of results without a correct digit would mean nothing.
_MOST_ALLOWED = 0.1
# A tensor whose entries are below this share of the largest tensor of the result counts as zero
# with rounding errors. An example is the gradient of a bias that a softmax or a norm cancels. Its
# ulp is then that of a tensor with about a thousandth of the largest magnitude.
_ZERO = 64 * torch.finfo(torch.float64).eps
_OF_ZEROS = 2.0**-10


@dataclass(frozen=True)
class Difference:
    """The largest differences between the numbers of torch and JAX, over all tensors of a result.

    Attributes:
        absolute: the largest absolute difference.
        relative: the largest difference, divided by the largest magnitude of its tensor.
        ulps: the same in units of the dtype's precision at that magnitude.
        torch_ulps: torch's largest difference from its own float64 result, in ulps; ``None`` if the
            function can't run in float64.
        jax_ulps: JAX's largest difference from torch's float64 result.
        where: the path of the tensor that differs most, such as ``[0]['weight']``.
        dtype: the dtype of that tensor.
        allowed: the relative difference that is allowed for that tensor.
        agrees: whether the difference of every tensor is allowed.
    """

    absolute: float
    relative: float
    ulps: float
    torch_ulps: float | None
    jax_ulps: float | None
    where: str
    dtype: str
    allowed: float
    agrees: bool


def difference(
    ours: Sequence[Tensor],
    theirs: Sequence[Any],
    reference: Sequence[Tensor] | None,
    paths: Sequence[str],
    rtol: float | None,
    atol: float,
    dtypes: bool = True,
) -> Difference:
    """The difference between the results of torch and JAX.

    Args:
        ours: the results of torch.
        theirs: the results of JAX.
        reference: the results of torch in float64, if the function can run in float64.
        paths: the paths of the results; if there are not as many, results are numbered.
        rtol: the allowed difference, relative to the largest entry of a tensor; ``None`` for the
            default of its dtype.
        atol: an absolute difference that is allowed in addition.
        dtypes: whether dtypes must be equal. Those of derivatives need not be: torch gives the
            product of a float32 scalar and a Python number a float64 tangent.

    Raises:
        AssertionError: the number of results, their shapes, or their dtypes differ.
    """
    if len(ours) != len(theirs):
        raise AssertionError(f"torch returns {len(ours)} tensors and JAX {len(theirs)}")
    found = []
    top = max((_magnitude(numbers(x)) for x in ours if x.dtype in RTOL), default=0.0)
    for n, (x, y) in enumerate(zip(ours, theirs)):
        path = paths[n] if len(paths) == len(ours) else f"[{n}]"
        if tuple(x.shape) != tuple(y.shape):
            raise AssertionError(f"shapes at {path}: torch {tuple(x.shape)}, JAX {tuple(y.shape)}")
        if dtypes and str(x.dtype).removeprefix("torch.") != str(y.dtype):
            raise AssertionError(f"dtypes at {path}: torch {x.dtype} and JAX {y.dtype}")
        if not dtypes and x.dtype.is_floating_point and str(y.dtype) in _NARROWER:
            x = x.to(_NARROWER[str(y.dtype)])
        r = None if reference is None else reference[n]
        found.append(_of_leaf(x, y, r, path, rtol, atol, top))
    far = [d.relative / (d.allowed or 1.0) for d in found]
    worst = found[int(np.argmax(np.nan_to_num(far, nan=np.inf)))]
    return replace(
        worst,
        absolute=_most(d.absolute for d in found),
        ulps=_most(d.ulps for d in found),
        torch_ulps=_most_known(d.torch_ulps for d in found),
        jax_ulps=_most_known(d.jax_ulps for d in found),
        agrees=all(d.agrees for d in found),
    )


def _most(values: Any) -> float:
    return float(np.max(list(values)))  # NaN if one of them is NaN


def _most_known(values: Any) -> float | None:
    known = [v for v in values if v is not None]
    return _most(known) if known else None


def _of_leaf(
    ours: Tensor,
    theirs: Any,
    reference: Tensor | None,
    path: str,
    rtol: float | None,
    atol: float,
    top: float,
) -> Difference:
    inexact = ours.dtype in RTOL
    a = numbers(ours)
    b = np.asarray(theirs).astype(a.dtype)
    if not inexact or (reference is not None and reference.shape != ours.shape):
        reference = None
    r = None if reference is None else numbers(reference)
    scale = _magnitude(a if r is None else r)
    if scale <= _ZERO * top and (r is not None or ours.dtype in (torch.float64, torch.complex128)):
        scale = _OF_ZEROS * top
    eps = torch.finfo(ours.dtype).eps if inexact else 1.0
    scale = scale if scale * eps else 1.0  # for zeros, and where the product underflows
    absolute = _largest(a, b)
    errors = [None if r is None else _largest(x, r) / scale for x in (a, b)]
    allowed = (RTOL[ours.dtype] if rtol is None else rtol) if inexact else 0.0
    if rtol is None and errors[0] is not None and np.isfinite(errors[0]):
        allowed = max(allowed, min(_OWN_ERRORS * errors[0], _MOST_ALLOWED))
    return Difference(
        absolute=absolute,
        relative=absolute / scale,
        ulps=absolute / (scale * eps),
        torch_ulps=None if errors[0] is None else errors[0] / eps,
        jax_ulps=None if errors[1] is None else errors[1] / eps,
        where=path,
        dtype=str(ours.dtype).removeprefix("torch."),
        allowed=allowed + atol / scale,
        agrees=bool(absolute <= allowed * scale + atol),
    )


def _magnitude(x: np.ndarray[Any, Any]) -> float:
    """The largest magnitude of a finite entry."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def numbers(x: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's values as a NumPy array, in float64 or complex128 if they are inexact."""
    x = x.detach().cpu().resolve_conj().resolve_neg()
    kinds = {torch.bool: torch.int64, **_WIDE}
    return x.to(kinds.get(x.dtype, x.dtype)).numpy()


def _largest(a: Any, b: Any) -> float:
    """The largest difference. Equal infinities, and two NaNs, do not differ."""
    same = (a == b) | ((a != a) & (b != b))
    with np.errstate(invalid="ignore"):
        if a.dtype.kind in "iu":
            apart = np.abs(np.subtract(a, b, dtype=object)).astype(np.float64) if a.size else a
        else:
            apart = np.abs(a - b)
    apart = np.where(same, 0.0, apart)
    return float(np.max(apart, initial=0.0))  # NaN if there is a NaN on one side only


class Widened(TorchFunctionMode):
    """A function mode in which every torch function converts its arguments to float64.

    So a function runs in float64 even if it closes over float32 parameters, or converts to float32.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = _CASTS.get(func, func)
        if getattr(func, "__name__", "") in ("__get__", "__set__", "backward"):
            return func(*args, **(kwargs or {}))
        return func(*tree.map_(_wide, list(args)), **tree.map_(_wide, kwargs or {}))


def _wide(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to(_WIDE[x.dtype]) if x.dtype in _WIDE else x
    return _WIDE.get(x, x) if isinstance(x, torch.dtype) else x


def in_float64(f: Callable[..., Any], *args: list[Tensor]) -> list[Tensor] | None:
    """The results of a function of lists of tensors in float64; ``None`` if it can't run in it."""
    wide = [[_wide(x) for x in xs] for xs in args]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        # Regions identify tensors by object, and the mode converts a tensor anew at each use.
        with no_regions(), Widened():
            out: list[Tensor] = list(f(*wide))
    except Exception:  # the function may insist on its dtype in any way
        return None
    finally:
        torch.set_default_dtype(before)
    return None if any(x.dtype in _WIDE for x in out) else out
