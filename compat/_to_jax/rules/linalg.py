"""Matrix products, factorizations and solvers.

Products accumulate in the precision of their operands (``highest``), so that float32 agrees with
torch on devices where JAX's default precision is lower.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import lax

from functx.compat._to_jax.rules.pointwise import absolute
from functx.compat._to_jax.rules.reductions import vector_norm
from functx.compat._to_jax.rules.table import rule, rules
from functx.compat._to_jax.rules.views import straight_through

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
rules({"mm bmm mv dot": matmul}, cast=True)
_expm = jnp.vectorize(jsl.expm, signature="(n,n)->(n,n)")


def _adjoint(m: Any) -> Any:
    return jnp.conj(jnp.swapaxes(m, -1, -2))


def _no_errors(a: Any) -> Any:
    """The error code "none": JAX can't raise an error, so a singular matrix gives NaN or inf."""
    return jnp.zeros(a.shape[:-2], jnp.int32)


def _singular(lu: Any) -> Any:
    """The error code of LAPACK: the number of the first pivot that is zero, or 0."""
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    if not zero.shape[-1]:
        return jnp.zeros(lu.shape[:-2], jnp.int32)
    return jnp.where(zero.any(-1), jnp.argmax(zero, -1) + 1, 0).astype(jnp.int32)


@rule("addmm", "addmv", "baddbmm", "addbmm")
def _addmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1, ctx: Any) -> Any:
    product = matmul(a, b)
    product = product.sum(0) if product.ndim > len(ctx.shape) else product
    product = product if alpha == 1 else alpha * product
    # With beta == 0, x is not read, so that its NaNs have no effect.
    return product if beta == 0 else (x if beta == 1 else beta * x) + product


@rule("linalg_cholesky_ex")
def _cholesky_ex(a: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    factor = jnp.linalg.cholesky(a)
    return _adjoint(factor) if upper else factor, _no_errors(a)


@rule("cholesky_solve")
def _cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    lower = _adjoint(factor) if upper else factor
    y = _triangular(lower, b, upper=False)
    return _triangular(_adjoint(lower), y, upper=True)


@rule("cholesky_inverse")
def _cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return _cholesky_solve(eye, factor, upper)


def _same_batch(a: Any, b: Any) -> tuple[Any, Any]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return tuple(jnp.broadcast_to(m, (*batch, *m.shape[-2:])) for m in (a, b))  # type: ignore[return-value]


def _triangular(a: Any, b: Any, *, upper: bool, unit: bool = False) -> Any:
    a, b = _same_batch(jnp.triu(a) if upper else jnp.tril(a), b)
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=not upper, unit_diagonal=unit)


@rule("linalg_solve_triangular")
def _solve_triangular(
    a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    if left:
        return _triangular(a, b, upper=upper, unit=unitriangular)
    return _triangular(a.mT, b.mT, upper=not upper, unit=unitriangular).mT


@rule("triangular_solve")
def _triangular_solve(
    b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    m = jnp.triu(a) if upper else jnp.tril(a)
    m, upper = (m.mT, not upper) if transpose else (m, upper)
    out = _triangular(m, b, upper=upper, unit=unitriangular)
    return out, jnp.broadcast_to(a, (*out.shape[:-2], *a.shape[-2:]))


def _solve(a: Any, b: Any, left: bool) -> Any:
    if not left:
        return _solve(a.mT, b.mT, True).mT
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    out = jnp.linalg.solve(*_same_batch(a, b[..., None] if vector else b))
    return out[..., 0] if vector else out


def _packed(a: Any) -> tuple[Any, Any]:
    lu, pivots, _ = lax.linalg.lu(lax.stop_gradient(a))
    return lu, pivots + 1


@rule("_linalg_solve_ex")
def _solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    lu, pivots = _packed(a)
    return _solve(a, b, left), lu, pivots, _singular(lu)


@rule("_linalg_det")
def _det(a: Any) -> Any:
    n = a.shape[-1]
    if not n:
        return jnp.ones(a.shape[:-2], a.dtype), *_packed(a)
    # For up to three rows, JAX uses a polynomial, whose derivatives of all orders are right.
    return jnp.linalg.det(a) if n <= 3 else _determinant(a), *_packed(a)


@jax.custom_jvp
def _determinant(a: Any) -> Any:
    return jnp.linalg.det(a)


@_determinant.defjvp
def _determinant_jvp(primals: Any, tangents: Any) -> Any:
    # JAX's own second derivatives are NaN or zero where the matrix is singular.
    return _determinant(*primals), jnp.sum(_cofactors(*primals) * tangents[0], (-2, -1))


@jax.custom_jvp
def _cofactors(a: Any) -> Any:
    """The derivative of the determinant, which is finite also for a singular matrix."""
    out, pull = jax.vjp(jnp.linalg.det, a)
    return pull(jnp.ones_like(out))[0]


# If the ratio of the smallest to the largest singular value is below this, don't use the inverse.
_SINGULAR = 1e-5


@_cofactors.defjvp
def _cofactors_jvp(primals: Any, tangents: Any) -> Any:
    (a,), (da,) = primals, tangents
    n = a.shape[-1]
    s = jnp.linalg.svd(lax.stop_gradient(a), compute_uv=False)
    regular = (s[..., -1] > _SINGULAR * s[..., 0])[..., None, None]
    # Where one formula is not used, it gets another matrix, so that its derivatives are not NaN.
    other = jnp.diag(jnp.arange(1.0, n + 1)).astype(a.dtype)
    by_inverse = _along_by_inverse(jnp.where(regular, a, other), da)
    by_values = _along_by_singular_values(jnp.where(regular, other, a), da)
    return _cofactors(a), jnp.where(regular, by_inverse, by_values)


def _along_by_inverse(a: Any, da: Any) -> Any:
    """The directional derivative of the cofactors, computed by the inverse."""
    inverse = jnp.linalg.inv(a)
    moved = matmul(inverse, da)
    traces = jnp.trace(moved, axis1=-2, axis2=-1)[..., None, None]
    inner = traces * inverse - matmul(moved, inverse)
    return _determinant(a)[..., None, None] * jnp.swapaxes(inner, -1, -2)


@jax.custom_jvp
def _undifferentiable(a: Any, where: Any) -> Any:
    """The same array, with a derivative of NaN where ``where`` is true."""
    return a


_undifferentiable.defjvps(lambda da, out, a, where: da * jnp.where(where, jnp.nan, 1.0), None)


def _along_by_singular_values(a: Any, da: Any) -> Any:
    """The directional derivative of the cofactors, computed by singular values.

    In the bases of the singular vectors, the matrix is diagonal. The coefficients of the derivative
    are then products of all singular values but two. The next derivative is NaN if singular values
    are equal.
    """
    s = jnp.linalg.svd(lax.stop_gradient(a), compute_uv=False)
    equal = (jnp.min(s[..., :-1] - s[..., 1:], -1) <= _SINGULAR * s[..., 0])[..., None, None]
    u, s, vh = jnp.linalg.svd(_undifferentiable(a, equal), full_matrices=False)
    n = s.shape[-1]
    unit = lax.stop_gradient(jnp.linalg.det(u) * jnp.linalg.det(vh))
    but_two = np.ones((n, n, n), bool)
    but_two[np.arange(n), :, np.arange(n)] = but_two[:, np.arange(n), np.arange(n)] = False
    rest = jnp.prod(jnp.where(but_two, s[..., None, None, :], 1), -1)
    rest = jnp.where(np.eye(n, dtype=bool), 0, rest).astype(a.dtype) * unit[..., None, None]
    x = matmul(matmul(_adjoint(u), da), _adjoint(vh))
    traces = jnp.sum(rest * jnp.diagonal(x, axis1=-2, axis2=-1)[..., None, :], -1)
    inner = traces[..., None] * jnp.eye(n, dtype=a.dtype) - rest * jnp.swapaxes(x, -1, -2)
    return matmul(matmul(jnp.conj(u), inner), jnp.conj(vh))


@rule("linalg_lu_factor_ex")
def _lu_factor(a: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    lu, pivots, _ = lax.linalg.lu(a)
    return lu, pivots + 1, _singular(lax.stop_gradient(lu))


def _unpack(lu: Any, permutation: Any) -> tuple[Any, Any, Any]:
    m, k = lu.shape[-2], min(lu.shape[-2:])
    lower = jnp.tril(lu[..., :k], -1) + jnp.eye(m, k, dtype=lu.dtype)
    return jnp.eye(m, dtype=lu.dtype)[permutation].mT, lower, jnp.triu(lu[..., :k, :])


@rule("lu_unpack")
def _lu_unpack(lu: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    permutation = lax.linalg.lu_pivots_to_permutation((pivots - 1).astype(jnp.int32), lu.shape[-2])
    p, lower, upper = _unpack(lu, permutation)
    empty = jnp.zeros((0,), lu.dtype)
    data = (lower, upper) if unpack_data else (empty, empty)
    return (p if unpack_pivots else empty, *data)


@rule("linalg_lu_solve")
def _lu_solve(lu: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    p, lower, upper = _lu_unpack(lu, pivots)
    a = matmul(p, matmul(lower, upper))
    return _solve(_adjoint(a) if adjoint else a, b, left)


@rule("linalg_qr")
def _qr(a: Any, mode: str = "reduced") -> Any:
    if mode == "r":
        return jnp.zeros((0,), a.dtype), jnp.linalg.qr(a, "r")
    return tuple(jnp.linalg.qr(a, mode))


def _hermitian(a: Any, lower: bool) -> Any:
    """The Hermitian matrix with one triangle of ``a``, and with the derivative of all of ``a``."""
    half = jnp.tril(a, -1) if lower else jnp.triu(a, 1)
    diagonal = jnp.real(jnp.diagonal(a, axis1=-2, axis2=-1))
    full = half + _adjoint(half) + diagonal[..., None] * jnp.eye(a.shape[-1], dtype=a.dtype)
    return straight_through(lax.stop_gradient(full), a)


@rule("_linalg_eigh")
def _eigh(a: Any, uplo: str = "L", compute_v: bool = True) -> Any:
    w, v = jnp.linalg.eigh(_hermitian(a, uplo.upper() == "L"), symmetrize_input=False)
    return w, v if compute_v else jnp.zeros((0,), a.dtype)


def _eig(a: Any) -> Any:
    if not a.size:  # JAX has no derivatives of empty matrices
        return jnp.zeros(a.shape[:-1], a.dtype), a
    return lax.linalg.eig(a, compute_left_eigenvectors=False, enable_eigvec_derivs=True)


@rule("_linalg_svd")
def _svd(
    a: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None
) -> Any:
    if compute_uv:
        # A square matrix has the same factors in both forms; JAX differentiates the reduced one.
        full = full_matrices and a.shape[-1] != a.shape[-2]
        return tuple(jnp.linalg.svd(a, full_matrices=full))
    empty = jnp.zeros((0,), a.dtype)
    return empty, jnp.linalg.svd(a, compute_uv=False), empty


@rule("linalg_pinv.atol_rtol_tensor")
def _pinv(a: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    default = max(a.shape[-2:]) * np.finfo(a.dtype).eps if atol is None else 0.0
    relative = default if rtol is None else jnp.asarray(rtol)[..., None]
    absolute = jnp.asarray(0.0 if atol is None else atol)[..., None]
    return _pseudo_inverse(a, lax.stop_gradient((absolute, relative)), hermitian)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _pseudo_inverse(a: Any, tolerances: Any, hermitian: bool) -> Any:
    a = _hermitian(a, True) if hermitian else a
    u, s, vh = jnp.linalg.svd(a, full_matrices=False)
    absolute, relative = tolerances
    there = s > jnp.maximum(absolute, relative * s[..., :1])
    inverse = jnp.where(there, 1 / jnp.where(there, s, 1), 0)
    return matmul(_adjoint(vh) * inverse[..., None, :], _adjoint(u))


@_pseudo_inverse.defjvp
def _pseudo_inverse_jvp(hermitian: bool, primals: Any, tangents: Any) -> Any:
    # The derivative of Golub and Pereyra (1973), at constant rank. The derivative of the factors is
    # not defined where singular values are equal.
    (a, tolerances), da = primals, tangents[0]
    p = _pseudo_inverse(a, tolerances, hermitian)
    ph, dah = _adjoint(p), _adjoint(da)
    left = matmul(matmul(p, ph), dah - matmul(dah, matmul(a, p)))
    right = matmul(dah - matmul(matmul(p, a), dah), matmul(ph, p))
    return p, left + right - matmul(matmul(p, da), p)


@rule("linalg_householder_product")
def _householder(a: Any, tau: Any) -> Any:
    # lax's operation has no derivative, so apply the reflections to the identity, last first.
    m, n = a.shape[-2:]
    return _ormqr(a, tau, jnp.broadcast_to(jnp.eye(m, n, dtype=a.dtype), a.shape))


@rule("ormqr")
def _ormqr(a: Any, tau: Any, c: Any, left: bool = True, transpose: bool = False) -> Any:
    if not left:
        return _adjoint(_ormqr(a, tau, _adjoint(c), True, not transpose))
    place = np.arange(a.shape[-2])
    order = range(tau.shape[-1])
    for i in order if transpose else reversed(order):
        v = jnp.where(place > i, a[..., :, i], 0) + (place == i).astype(a.dtype)
        t = jnp.conj(tau[..., i]) if transpose else tau[..., i]
        projected = jnp.sum(jnp.conj(v)[..., None] * c, -2, keepdims=True)
        c = c - t[..., None, None] * v[..., None] * projected
    return c


@rule("_cdist_forward", "_euclidean_dist")
def _cdist(a: Any, b: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    return _distance(a[..., :, None, :] - b[..., None, :, :], p)


def _distance(x: Any, p: float) -> Any:
    if p != float("inf"):
        return vector_norm(x, p, (-1,), False)
    # In a norm, coordinates that tie for the maximum share the derivative. Here each of them gets
    # the whole derivative, as in torch.
    size = absolute(x)
    found = jnp.max(lax.stop_gradient(size), -1, keepdims=True, initial=0)
    return straight_through(found[..., 0], jnp.sum(jnp.where(size == found, size, 0), -1))


@rule("_pdist_forward")
def _pdist(a: Any, p: float = 2.0) -> Any:
    rows, columns = np.triu_indices(a.shape[0], 1)
    return _distance(a[rows] - a[columns], p)


@rule("_trilinear")
def _trilinear(
    a: Any, b: Any, c: Any, expand1: Any, expand2: Any, expand3: Any, sumdim: Any,
    unroll_dim: int = 1,
) -> Any:  # fmt: skip
    x, y, z = (
        jnp.expand_dims(x, tuple(dims)) for x, dims in ((a, expand1), (b, expand2), (c, expand3))
    )
    return jnp.sum(x * y * z, tuple(sumdim))


rules(
    {
        "_linalg_check_errors": lambda *_, **__: None,
        "_linalg_slogdet": lambda a: (*jnp.linalg.slogdet(a), *_packed(a)),
        "cholesky": lambda a, upper=False: _cholesky_ex(a, upper=upper)[0],
        "linalg_eig": _eig,
        "linalg_eigvals _linalg_eigvals": lambda a: jnp.linalg.eigvals(a) if a.size else _eig(a)[0],
        "linalg_inv_ex": lambda a, **_: (jnp.linalg.inv(a), _singular(_packed(a)[0])),
        "linalg_lu": lambda a, **_: _unpack(*lax.linalg.lu(a)[::2]),
        "linalg_matrix_exp": lambda a: _expm(a) if a.size else a,
        "vdot": partial(jnp.vdot, precision=lax.Precision.HIGHEST),
    }
)
