"""Why derivatives of torch and JAX differ at special points, where they do."""

from tools.opinfo.to_jax import because

_NO_NORM = "of a norm at zero, torch's reverse over reverse mode gives NaN; its other mode zero"
_ORIGIN = "at the origin torch's reverse over reverse mode gives NaN; its other mode zero"
_OVERFLOW = "where one argument is much larger, torch's second derivatives are NaN; they are zero"
_SELF = (
    "of equal extremes torch gives a share to the tensor that include_self=False leaves out: that"
    " part of the derivative is lost"
)
_PRODUCT = "torch's forward over reverse mode is wrong; its other mode agrees"
_PRODUCT_OF_ZEROS = "torch's reverse over reverse mode is zero where two factors are zero"
_ZERO_TO = (
    "at a base of zero torch's reverse over reverse mode gives NaN, its other mode what JAX gives;"
    " of a negative base there is no derivative in the exponent, and JAX's NaN reaches the base"
)
_EQUALS = "which of equal elements is taken; torch's order of equals depends on its algorithm"
_REPEATED = (
    "eigenvalues that are equal but for rounding: derivatives of eigenvectors divide by what they"
    " differ by"
)
_REFLECTIONS = "torch divides by zero, or overflows; derivatives of JAX agree with differences"
_SINGULAR = "of a singular matrix, whose factors are not unique"
_FAR = "rounding at large arguments: of an angle in JAX, of a recurrence or an angle in torch"
_TRIANGULAR = "torch's forward mode is wrong beyond the first derivative"
_SMALL_VARIANCE = "torch drops the derivative where the variance is clamped to eps"
_NO_FACTOR = "torch gives NaN for a factor of zeros, or its forward over reverse mode cancels"

_BRANCH = "next to a branch point, terms of 1e4 cancel, and both lose digits"
_COMPLEX_ZERO_TO = (
    "torch's powers of zero are NaN, or their derivatives are; zero to zero is 1 in JAX"
)
_EQUAL_VALUES = "of several singular values that are zero, each takes another subgradient"


def of_complex(reason, names):
    """The cases of `complex_cases` of these functions, each with this cause."""
    return {f"complex {name}": why for name, why in because(reason, names).items()}


# By the names of functions, without the number of a sample.
CAUSES = {
    **because(_NO_NORM, "dist linalg.matrix_norm linalg.norm linalg.norm.subgradients_at_zero"),
    **because(
        _NO_NORM, "masked.norm masked.normalize nn.functional.normalize norm norm.fro renorm"
    ),
    **because(_NO_NORM, "nn.functional.cosine_similarity"),
    "choices: cosine_similarity": _NO_NORM,
    "choices: norm of rows": _NO_NORM,
    "choices: normalize": _NO_NORM,
    "choices: renorm": _NO_NORM,
    "linalg: frobenius norm": _NO_NORM,
    "linalg.vector_norm": "at zero torch gives NaN in both modes",
    "choices: norm of order 1.5": "at zero torch gives NaN in both modes",
    **because(_ORIGIN, "atan2"),
    "copysign": "at zero torch's reverse over reverse mode gives NaN; its other mode zero",
    **because(_OVERFLOW, "logaddexp logaddexp2 masked.logaddexp"),
    "nn.functional.mish": "torch's second derivatives of large numbers are NaN; they are zero",
    "logcumsumexp": "torch's second derivatives lose digits where terms are far apart",
    **because(_SELF, "index_reduce.amax index_reduce.amin scatter_reduce.amax scatter_reduce.amin"),
    "choices: scatter_reduce of amax, include_self=False": _SELF,
    "choices: scatter_reduce of amin, include_self=False": _SELF,
    "scatter_reduce.prod": _PRODUCT,
    "choices: scatter_reduce of prod, include_self=False": _PRODUCT,
    "choices: scatter_reduce of prod, include_self=True": _PRODUCT,
    "index_reduce.prod": _PRODUCT_OF_ZEROS,
    **because(_ZERO_TO, "__rpow__ float_power pow"),
    "x ** y": _ZERO_TO,
    "0 ** x": "torch's reverse over reverse mode gives NaN; the second derivative is zero",
    **because(_EQUALS, "kthvalue topk"),
    "as_strided_scatter": "torch's gradient is wrong: its own gradcheck fails",
    "binary_cross_entropy": "torch's forward over reverse mode rounds 1 - x + 1e-12 at x = 1",
    "gaussian_nll_loss": _SMALL_VARIANCE,
    "nn.functional.gaussian_nll_loss": _SMALL_VARIANCE,
    "frexp": "XLA's float32 exp2, which torch's formula uses, is exact to 1e-6 alone",
    "sinc": "torch's quotients lose all digits near zero",
    **because(
        _FAR, "special.bessel_y1 special.chebyshev_polynomial_v special.chebyshev_polynomial_w"
    ),
    "special.erfcx": "torch's second derivative is a difference of numbers that are nearly equal",
    "special.log_ndtr": (
        "torch's second derivative loses digits from -20 on; JAX's is right at -1e4, lost at -1e10"
    ),
    "linalg.cond": "a largest and a smallest singular value that are equal have no derivative",
    "linalg.det": "torch's second derivatives of a matrix with equal singular values are NaN",
    "linalg: det": "torch's second derivatives of a matrix with equal singular values are NaN",
    "linalg.eig": "of a matrix that has no basis of eigenvectors",
    "linalg: eigenvalues, squared and added": _REPEATED,
    "linalg: exponential by eigh": _REPEATED,
    "linalg: logarithm of eigenvalues": _REPEATED,
    "linalg: svd": "the second derivative is 5e-6 of its terms, and rounds in JAX",
    **because(_REFLECTIONS, "linalg.householder_product ormqr"),
    **because(_SINGULAR, "linalg.qr lu qr"),
    **because(_NO_FACTOR, "linalg.lu_solve lu_solve"),
    "linalg: triangular_solve": _TRIANGULAR,
    "linalg: cholesky_inverse": _TRIANGULAR,
    "linalg: cholesky_inverse of cholesky": _TRIANGULAR,
    **of_complex(_ORIGIN, "angle sgn"),
    **of_complex(_NO_NORM, "dist linalg.matrix_norm linalg.norm linalg.norm.subgradients_at_zero"),
    **of_complex(_NO_NORM, "masked.normalize nn.functional.normalize norm norm.fro renorm"),
    **of_complex("at zero torch gives NaN in both modes", "linalg.vector_norm"),
    **of_complex(_BRANCH, "acos asin asinh"),
    **of_complex(_COMPLEX_ZERO_TO, "__rpow__ float_power pow"),
    **of_complex(_TRIANGULAR, "cholesky_inverse"),
    **of_complex("torch's gradient is wrong: its own gradcheck fails", "as_strided_scatter"),
    **of_complex("torch's second derivatives at zero are NaN, or zero in one mode", "sinc"),
    **of_complex("torch's second derivatives of singular matrices are NaN", "linalg.det"),
    **of_complex("of a matrix that has no basis of eigenvectors", "linalg.eig linalg.eigvals"),
    **of_complex(_REFLECTIONS, "linalg.householder_product ormqr"),
    **of_complex(_SINGULAR, "linalg.qr qr"),
    **of_complex(_EQUAL_VALUES, "linalg.svdvals norm.nuc"),
    **of_complex(_NO_FACTOR, "linalg.lu_solve lu_solve"),
    **of_complex("of zero JAX's angle is zero, torch's NaN", "logdet"),
    **of_complex("torch's reverse over reverse mode rounds; its other mode agrees", "logsumexp"),
}

# Rules that no function of the sweep is lowered to.
_COMPOSITE = "torch takes it apart before it is lowered"
_FLOAT32 = "torch uses it for float32 alone"
NOT_SWEPT = {
    **because(_COMPOSITE, "imag isfinite positive real special_ndtr square"),
    "bincount": "the size of its result depends on values, which a trace does not know",
    **because(_FLOAT32, "mkldnn_rnn_layer mkldnn_rnn_layer_backward"),
    "functx::jax_call": "a function of JAX, which stays one",
}

# JAX's own functions: what is wrong, and the names of the rules that do it otherwise.
OF_JAX = {
    "jax.scipy.special.i0": ("the derivative at 0 is 1/2; it is 0", "i0"),
    "jax.scipy.special.i1": ("the second derivative at 0 is 1/2; it is 0", "special_i1"),
    "jnp.hypot": ("second derivatives are zero where x and y are of one size", "hypot"),
    "jnp.sinc": ("first and second derivatives overflow at numbers below 1e-8", "sinc"),
    "jnp.linalg.det": (
        "second derivatives of singular matrices of four rows and more are NaN or zero",
        "_linalg_det",
    ),
    "jax.scipy.special.gammainc": ("the value at (0, x) is NaN for x below 1; it is 1", "igamma"),
    "lax.linalg.lu": ("second derivatives of singular matrices are NaN", ""),
    "jax.scipy.special.log_ndtr": ("second derivatives below -1e4 lose all digits", ""),
}
