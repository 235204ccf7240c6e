"""Matrix products, factorizations and solvers.

Products accumulate in the precision of their operands (``highest``), so that float32 agrees with
torch on devices where JAX's default is lower.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import lax

from functx.compat._lowering._reductions import vector_norm
from functx.compat._lowering._table import rule
from functx.compat._lowering._views import straight_through


def matmul(a: Any, b: Any) -> Any:
    """A matrix product in full precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


@rule("mm", "bmm", "mv", "dot", "matmul", cast=True)
def _mm(a: Any, b: Any) -> Any:
    return matmul(a, b)


@rule("vdot")
def _vdot(a: Any, b: Any) -> Any:
    return jnp.vdot(a, b, precision=lax.Precision.HIGHEST)


def _scaled_sum(x: Any, product: Any, beta: Any, alpha: Any) -> Any:
    product = product if alpha == 1 else alpha * product
    # beta == 0 means that x is not read, also where it is NaN.
    return product if beta == 0 else (x if beta == 1 else beta * x) + product


@rule("addmm", "addmv", "baddbmm", cast=False)
def _addmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = matmul(a, b)
    return jnp.broadcast_to(_scaled_sum(x, product, beta, alpha), product.shape)


@rule("addbmm")
def _addbmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = matmul(a, b).sum(0)
    return jnp.broadcast_to(_scaled_sum(x, product, beta, alpha), product.shape)


@rule("addr")
def _addr(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = jnp.outer(a, b)
    return jnp.broadcast_to(_scaled_sum(x, product, beta, alpha), product.shape)


@rule("linear")
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    out = matmul(x, weight.T)
    return out if bias is None else out + bias


@rule("linalg_cross")
def _cross(a: Any, b: Any, *, dim: int = -1) -> Any:
    a, b = jnp.broadcast_arrays(a, b)
    return jnp.cross(a, b, axis=dim)


@rule("kron")
def _kron(a: Any, b: Any) -> Any:
    return jnp.kron(a, b)


@rule("linalg_cholesky_ex")
def _cholesky(a: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    factor = jnp.linalg.cholesky(a)
    out = jnp.conj(jnp.swapaxes(factor, -1, -2)) if upper else factor
    return out, jnp.zeros(a.shape[:-2], jnp.int32)


@rule("cholesky", "linalg_cholesky")
def _cholesky_plain(a: Any, upper: bool = False) -> Any:
    return _cholesky(a, upper=upper)[0]


@rule("cholesky_solve")
def _cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    lower = jnp.conj(jnp.swapaxes(factor, -1, -2)) if upper else factor
    y = _triangular(lower, b, upper=False)
    return _triangular(jnp.conj(jnp.swapaxes(lower, -1, -2)), y, upper=True)


@rule("cholesky_inverse")
def _cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return _cholesky_solve(eye, factor, upper)


def _triangular(a: Any, b: Any, *, upper: bool, unit: bool = False) -> Any:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, (*batch, *a.shape[-2:]))
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    a = jnp.triu(a) if upper else jnp.tril(a)
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=not upper, unit_diagonal=unit)


@rule("linalg_solve_triangular")
def _solve_triangular(
    a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    if left:
        return _triangular(a, b, upper=upper, unit=unitriangular)
    flip = lambda m: jnp.swapaxes(m, -1, -2)  # noqa: E731
    return flip(_triangular(flip(a), flip(b), upper=not upper, unit=unitriangular))


@rule("triangular_solve")
def _triangular_solve(
    b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    m = jnp.triu(a) if upper else jnp.tril(a)
    if transpose:
        out = _triangular(jnp.swapaxes(m, -1, -2), b, upper=not upper, unit=unitriangular)
    else:
        out = _triangular(m, b, upper=upper, unit=unitriangular)
    return out, jnp.broadcast_to(a, (*out.shape[:-2], *a.shape[-2:]))


@rule("linalg_inv_ex")
def _inv(a: Any, *, check_errors: bool = False) -> Any:
    return jnp.linalg.inv(a), jnp.zeros(a.shape[:-2], jnp.int32)


@rule("inverse")
def _inverse(a: Any) -> Any:
    return jnp.linalg.inv(a)


def _solve(a: Any, b: Any) -> Any:
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    b = b[..., None] if vector else b
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, (*batch, *a.shape[-2:]))
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    out = jnp.linalg.solve(a, b)
    return out[..., 0] if vector else out


@rule("_linalg_solve_ex")
def _solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    flip = lambda m: jnp.swapaxes(m, -1, -2)  # noqa: E731
    lu, pivots, _ = lax.linalg.lu(lax.stop_gradient(a))
    out = _solve(a, b) if left else flip(_solve(flip(a), flip(b)))
    return out, lu, pivots + 1, jnp.zeros(a.shape[:-2], jnp.int32)


@rule("_linalg_det")
def _det(a: Any) -> Any:
    lu, pivots, _ = lax.linalg.lu(lax.stop_gradient(a))
    value = jnp.linalg.det(a) if a.shape[-1] else jnp.ones(a.shape[:-2], a.dtype)
    return value, lu, pivots + 1


@rule("_linalg_slogdet")
def _slogdet(a: Any) -> Any:
    lu, pivots, _ = lax.linalg.lu(lax.stop_gradient(a))
    sign, logabs = jnp.linalg.slogdet(a)
    return sign, logabs, lu, pivots + 1


@rule("linalg_lu_factor_ex")
def _lu_factor(a: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    lu, pivots, _ = lax.linalg.lu(a)
    return lu, pivots + 1, jnp.zeros(a.shape[:-2], jnp.int32)


def _unpack(lu: Any, permutation: Any) -> tuple[Any, Any, Any]:
    m, n = lu.shape[-2:]
    k = min(m, n)
    lower = jnp.tril(lu[..., :k], -1) + jnp.eye(m, k, dtype=lu.dtype)
    upper = jnp.triu(lu[..., :k, :])
    eye = jnp.eye(m, dtype=lu.dtype)
    p = jnp.swapaxes(eye[permutation], -1, -2)
    return p, lower, upper


@rule("linalg_lu")
def _lu(a: Any, *, pivot: bool = True) -> Any:
    lu, _, permutation = lax.linalg.lu(a)
    return _unpack(lu, permutation)


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
    a = jnp.conj(jnp.swapaxes(a, -1, -2)) if adjoint else a
    return _solve_ex(a, b, left=left)[0]


@rule("linalg_qr")
def _qr(a: Any, mode: str = "reduced") -> Any:
    if mode == "r":
        return jnp.zeros((0,), a.dtype), jnp.linalg.qr(a, "r")
    q, r = jnp.linalg.qr(a, mode)
    return q, r


def _hermitian(a: Any, lower: bool) -> Any:
    """The matrix that one triangle stands for; derivatives are those of the whole of ``a``."""
    half = jnp.tril(a, -1) if lower else jnp.triu(a, 1)
    diagonal = jnp.real(jnp.diagonal(a, axis1=-2, axis2=-1))
    full = half + jnp.conj(jnp.swapaxes(half, -1, -2))
    full = full + diagonal[..., None] * jnp.eye(a.shape[-1], dtype=a.dtype)
    return straight_through(lax.stop_gradient(full), a)


@rule("_linalg_eigh")
def _eigh(a: Any, uplo: str = "L", compute_v: bool = True) -> Any:
    w, v = jnp.linalg.eigh(_hermitian(a, uplo.upper() == "L"), symmetrize_input=False)
    return w, v if compute_v else jnp.zeros((0,), a.dtype)


@rule("_linalg_svd")
def _svd(
    a: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None
) -> Any:
    if compute_uv:
        return tuple(jnp.linalg.svd(a, full_matrices=full_matrices))
    empty = jnp.zeros((0,), a.dtype)
    return empty, jnp.linalg.svd(a, compute_uv=False), empty


@rule("linalg_eig")
def _eig(a: Any) -> Any:
    return tuple(lax.linalg.eig(a, compute_left_eigenvectors=False, enable_eigvec_derivs=True))


@rule("linalg_eigvals", "_linalg_eigvals")
def _eigvals(a: Any) -> Any:
    return jnp.linalg.eigvals(a)


@rule("linalg_matrix_exp", "matrix_exp")
def _matrix_exp(a: Any) -> Any:
    expm = jsl.expm
    for _ in a.shape[:-2]:
        expm = jax.vmap(expm)
    return expm(a) if a.size else a


@rule("linalg_pinv.atol_rtol_tensor")
def _pinv(a: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    a = _hermitian(a, True) if hermitian else a
    u, s, vh = jnp.linalg.svd(a, full_matrices=False)
    largest = s[..., :1]
    default = max(a.shape[-2:]) * np.finfo(a.dtype).eps if atol is None else 0.0
    relative = default if rtol is None else jnp.asarray(rtol)[..., None]
    cutoff = jnp.maximum(jnp.asarray(0.0 if atol is None else atol)[..., None], relative * largest)
    inverse = jnp.where(s > cutoff, 1 / jnp.where(s > cutoff, s, 1), 0)
    adjoint = lambda m: jnp.conj(jnp.swapaxes(m, -1, -2))  # noqa: E731
    return matmul(adjoint(vh) * inverse[..., None, :], adjoint(u))


@rule("linalg_householder_product")
def _householder(a: Any, tau: Any) -> Any:
    # lax's operation has no derivative: multiply the reflections onto the identity, last first.
    m, n = a.shape[-2:]
    q = jnp.broadcast_to(jnp.eye(m, n, dtype=a.dtype), a.shape)
    for i in reversed(range(tau.shape[-1])):
        q = _reflect(a, tau, i, q)
    return q


def _reflect(a: Any, tau: Any, i: int, x: Any, conjugate: bool = False) -> Any:
    """Apply the i-th Householder reflection of (a, tau) to the columns of x."""
    m = a.shape[-2]
    v = jnp.where(np.arange(m) > i, a[..., :, i], 0) + (np.arange(m) == i).astype(a.dtype)
    t = jnp.conj(tau[..., i]) if conjugate else tau[..., i]
    projected = jnp.sum(jnp.conj(v)[..., None] * x, -2, keepdims=True)
    return x - t[..., None, None] * v[..., None] * projected


@rule("ormqr")
def _ormqr(a: Any, tau: Any, c: Any, left: bool = True, transpose: bool = False) -> Any:
    if not left:
        adjoint = lambda m: jnp.conj(jnp.swapaxes(m, -1, -2))  # noqa: E731
        return adjoint(_ormqr(a, tau, adjoint(c), True, not transpose))
    order = range(tau.shape[-1])
    for i in order if transpose else reversed(order):
        c = _reflect(a, tau, i, c, conjugate=transpose)
    return c


@rule("_cdist_forward")
def _cdist(a: Any, b: Any, p: float, compute_mode: Any = None) -> Any:
    return vector_norm(a[..., :, None, :] - b[..., None, :, :], p, (-1,), False)


@rule("_pdist_forward")
def _pdist(a: Any, p: float = 2.0) -> Any:
    rows, columns = np.triu_indices(a.shape[0], 1)
    return _cdist(a[rows][:, None], a[columns][:, None], p, None)[..., 0, 0]


@rule("_euclidean_dist")
def _euclidean(a: Any, b: Any) -> Any:
    return _cdist(a, b, 2.0)


@rule("_linalg_check_errors")
def _check_errors(*_: Any, **__: Any) -> None:
    # JAX has no error to raise from data: a singular matrix gives NaN or infinity.
    return None


@rule("_trilinear")
def _trilinear(
    a: Any, b: Any, c: Any, expand1: Any, expand2: Any, expand3: Any, sumdim: Any,
    unroll_dim: int = 1,
) -> Any:  # fmt: skip
    parts = []
    for x, dims in ((a, expand1), (b, expand2), (c, expand3)):
        for d in sorted(dims):
            x = jnp.expand_dims(x, d)
        parts.append(x)
    return jnp.sum(parts[0] * parts[1] * parts[2], tuple(sumdim))
