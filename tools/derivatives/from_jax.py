"""JAX functions in torch at special points: values and derivatives against JAX's own.

Derivatives of `from_jax` are those of JAX, so the two have to be the same to the bit, or to the
rounding of another order of sums: whether torch asks in reverse over reverse or in forward over
reverse mode, batched or not.
"""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.scipy import special

import functx
from functx.compat import from_jax

TABLE = Path(__file__).parents[2] / "bench" / "results" / "derivatives" / "from_jax.json"
QUANTITIES = ("value", "gradient", "reverse over reverse", "forward over reverse")
ONE_WAY = ("value", "jvp", "forward over forward", "linearize")
_NAMES = """
abs arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh deg2rad exp exp2 expm1 fabs
floor log log10 log1p log2 nan_to_num negative positive rad2deg reciprocal rint sign sin sinc sinh
sqrt square tan tanh trunc i0
"""
_OF_NN = """
celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid mish relu relu6
selu sigmoid silu soft_sign softplus sparse_plus squareplus standardize softmax log_softmax
"""
_OF_SPECIAL = """
digamma entr erf erfc erfinv expit gammaln i0 i0e i1 i1e log_ndtr logit ndtr ndtri
"""
_OF_TWO = """
add arctan2 copysign divide float_power floor_divide fmax fmin fmod hypot logaddexp logaddexp2
maximum minimum mod multiply power subtract true_divide
"""


@jax.custom_vjp
def _clipped(x):
    return x


_clipped.defvjp(lambda x: (x, x), lambda x, g: (jnp.clip(g, -1, 1) * x,))


@jax.custom_jvp
def _rounded(x):
    return jnp.round(x)


_rounded.defjvps(lambda dx, out, x: dx * x)


def _while(x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1]) * x), (0, x))[1]


OF_ONE = {
    **{f"jnp.{name}": getattr(jnp, name) for name in _NAMES.split()},
    **{f"jax.nn.{name}": getattr(jax.nn, name) for name in _OF_NN.split()},
    **{f"special.{name}": getattr(special, name) for name in _OF_SPECIAL.split()},
    "jnp.clip": lambda x: jnp.clip(x, -0.5, 1),
    "jnp.max": jnp.max,
    "jnp.min": jnp.min,
    "jnp.median": jnp.median,
    "jnp.sort": jnp.sort,
    "jnp.cumprod": jnp.cumprod,
    "jnp.prod": jnp.prod,
    "jnp.std": jnp.std,
    "jnp.var": jnp.var,
    "jnp.linalg.norm": jnp.linalg.norm,
    "jnp.where": lambda x: jnp.where(x > 0, x * x, -x),
    "jax.nn.logsumexp": jax.nn.logsumexp,
    "lax.cumlogsumexp": lax.cumlogsumexp,
    "lax.cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "lax.scan": lambda x: lax.scan(lambda c, y: (c * y, c + y), jnp.ones((), x.dtype), x)[1],
    "lax.map": lambda x: lax.map(jnp.tanh, x),
    "jax.checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "jax.grad inside": jax.grad(lambda x: jnp.sum(x**3)),
    "custom_vjp": _clipped,
    "custom_jvp": _rounded,
    "stop_gradient": lambda x: x * lax.stop_gradient(x),
}
OF_TWO = {f"jnp.{name}": getattr(jnp, name) for name in _OF_TWO.split()}
OF_MATRICES = {
    "jnp.linalg.det": jnp.linalg.det,
    "jnp.linalg.slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "jnp.linalg.inv": jnp.linalg.inv,
    "jnp.linalg.pinv": jnp.linalg.pinv,
    "jnp.linalg.solve": lambda a: jnp.linalg.solve(a, jnp.ones((3, 2), a.dtype)),
    "jnp.linalg.cholesky": lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(3, dtype=a.dtype)),
    "jnp.linalg.eigh": lambda a: jnp.linalg.eigh(a + a.T)[0],
    "jnp.linalg.svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "jnp.linalg.qr": lambda a: jnp.linalg.qr(a)[1],
    "jnp.trace": jnp.trace,
}
# With a forward mode alone.
LOOPS = {
    "lax.while_loop": _while,
    "lax.fori_loop": lambda x: lax.fori_loop(
        0, jnp.int32(x.size % 4), lambda i, y: jnp.sin(y * x), x
    ),
}

# Each entry is a point of a function of each entry.
ENTRIES = np.array(
    [0.0, -0.0, -3, -1.5, -1, -0.5, -0.1, 0.1, 0.5, 1, 1.5, 2, 3, 6, -1e4, -40, 40, 1e4,
     1e-300, -1e-300, 1e-8, -1e-8]
)  # fmt: skip
POINTS = {
    "values": np.array([-3, -1.5, 0.1, 0.5, 1, 3]),
    "zero": np.zeros(6),
    "ties": np.array([1.0, 2, 2, 1, 1, 2]),
    "empty": np.zeros(0),
}
MATRICES = {
    "values": np.random.default_rng(0).normal(size=(3, 3)),
    "identity": np.eye(3),
    "rank 1": np.ones((3, 3)),
    "zero": np.zeros((3, 3)),
}
# The first of the functions of one argument.
ELEMENTWISE = len(_NAMES.split()) + len(_OF_NN.split()) + len(_OF_SPECIAL.split())


# The functions that differ, and the cause.
CAUSES = {}


def cases():
    """Names, functions and points, which are tuples of arrays by label."""
    entries = {"entries": (ENTRIES,)}
    pairs = {
        "entries": tuple(x.ravel() for x in np.meshgrid(ENTRIES[::3], ENTRIES[::3])),
        "empty": (np.zeros(0), np.zeros(0)),
    }
    several = {label: (x,) for label, x in POINTS.items()}
    matrices = {label: (a,) for label, a in MATRICES.items()}
    for n, (name, f) in enumerate(OF_ONE.items()):
        yield name, f, entries if n < ELEMENTWISE else several
    for functions, points in ((OF_TWO, pairs), (OF_MATRICES, matrices), (LOOPS, several)):
        for name, f in functions.items():
            yield name, f, points


def _vectors(xs):
    return tuple(1 + 0.3 * np.sin(np.arange(x.size) + i).reshape(x.shape) for i, x in enumerate(xs))


def _quantities(of, f, xs, vs, two_ways):
    """The quantities by the transforms of ``of``, which is `jax` or `functx`."""
    places = tuple(range(len(xs)))
    along = lambda g: lambda *xs: of.jvp(g, tuple(xs), tuple(vs))[1]
    if not two_ways:
        ways = (
            lambda: f(*xs),
            lambda: along(f)(*xs),
            lambda: along(along(f))(*xs),
            lambda: of.linearize(f, *xs)[1](*vs),
        )
        return dict(zip(ONE_WAY, ways))
    gradient = of.grad(lambda *xs: f(*xs).sum(), places)
    dot = lambda *xs: sum((g * v).sum() for g, v in zip(gradient(*xs), vs))
    ways = (
        lambda: f(*xs),
        lambda: gradient(*xs),
        lambda: of.grad(dot, places)(*xs),
        lambda: along(gradient)(*xs),
    )
    return dict(zip(QUANTITIES, ways))


def _tried(way):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            out = way()
        except Exception as error:
            return type(error).__name__
    return [np.asarray(x, float) for x in (out if isinstance(out, tuple | list) else [out])]


def judge(name, f, points):
    """How many points there are, and where torch and JAX differ: label, quantity, what."""
    differ = []
    wrapped = from_jax(f)
    for label, xs in points.items():
        vs = _vectors(xs)
        two_ways = name not in LOOPS
        theirs = _quantities(
            jax, f, tuple(map(jnp.asarray, xs)), tuple(map(jnp.asarray, vs)), two_ways
        )
        tensors = tuple(map(torch.from_numpy, xs)), tuple(map(torch.from_numpy, vs))
        ours = _quantities(functx, wrapped, *tensors, two_ways)
        # A derivative needs a value.
        value = _tried(theirs["value"])
        finite = np.isfinite(value[0]) if isinstance(value, list) else np.zeros(())
        there = finite if label == "entries" else finite.all()
        for quantity, way in theirs.items():
            expected, got = _tried(way), _tried(ours[quantity])
            if isinstance(expected, str) or isinstance(got, str):
                # What JAX refuses stays refused, perhaps by another error.
                same = isinstance(expected, str) and isinstance(got, str)
                detail = f"JAX {expected}, torch {got}" if not same else ""
            else:
                keep = True if quantity == "value" else there
                same = all(_same(a, b, keep) for a, b in zip(expected, got, strict=True))
                detail = f"JAX {expected}, torch {got}"
            if not same:
                differ.append([label, quantity, detail[:200]])
    entries = name.startswith(("jnp", "jax.nn", "special")) and "entries" in points
    return points["entries"][0].size if entries else len(points), differ


def _same(a, b, keep):
    """Up to rounding; at a pole, infinities and NaN are the same."""
    if a.shape != b.shape:
        return False
    finite = np.isfinite(a)
    scale = np.abs(a[finite]).max(initial=0.0)
    close = np.isclose(a, b, rtol=1e-7, atol=1e-14 * scale)
    return bool((close | (~finite & ~np.isfinite(b)) | ~np.broadcast_to(keep, a.shape)).all())


def sweep():
    """The table."""
    found = {}
    for name, f, points in cases():
        count, differ = judge(name, f, points)
        found[name] = {"points": count, "differ": differ}
        jax.clear_caches()
    return {
        "versions": f"torch {torch.__version__.split('+')[0]}, JAX {jax.__version__}",
        "functions": found,
    }


def figures(of):
    """How many functions, points, and points at which something differs."""
    counts = Counter()
    for case in of["functions"].values():
        counts["points"] += case["points"]
        counts["differ"] += len({label for label, *_ in case["differ"]})
    return len(of["functions"]), counts["points"], counts["differ"]
