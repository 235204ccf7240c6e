"""Two JAX primitives with explicit derivatives: `ruled` and `linear`.

``ruled(f, rule, xs, of, to)`` computes ``f(*xs)``. ``rule(xs, results, tangents)`` takes the
tangents of the arguments ``of`` and returns those of the results ``to``. (``jax.custom_jvp`` does
not serve: reverse mode through ``lax.scan`` inlines it, and the next derivative ignores the rule.)

``linear(push, pull, residuals, xs, like)`` computes ``push(residuals, xs)``. Its transpose is
``pull(residuals, cotangents)``. Neither is derived from the other.
(``jax.custom_derivatives.linear_call`` does the same, but can't be batched, and can't be
differentiated with respect to the residuals.)

Invariant: ``push`` and ``pull`` close over no tracers. They read all values from ``residuals``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir

Map = Callable[[Any, Sequence[Any]], list[Any]]

linear_p, ruled_p = Primitive("functx_linear"), Primitive("functx_ruled")
linear_p.multiple_results = ruled_p.multiple_results = True


def ruled(f: Any, rule: Any, xs: Sequence[Any], of: Any, to: Any) -> list[Any]:
    """``f(*xs)``, with the derivative of a rule; see the module docstring."""
    return ruled_p.bind(*xs, f=f, rule=rule, of=tuple(of), to=tuple(to))


@ruled_p.def_impl
def _run(*xs: Any, f: Any, **_: Any) -> list[Any]:
    return list(f(*xs))


@ruled_p.def_abstract_eval
def _abstract_of_ruled(*xs: Any, f: Any, **_: Any) -> Any:
    return jax.make_jaxpr(f)(*xs).out_avals


def _jvp_of_ruled(xs: Any, tangents: Any, *, f: Any, rule: Any, of: Any, to: Any) -> Any:
    out = ruled(f, rule, xs, of, to)  # outer derivatives use the rule as well
    found = rule([*xs], out, [ad.instantiate_zeros(tangents[i]) for i in of])
    moved = dict(zip(to, found))
    return out, [moved.get(i, ad.Zero(jax.typeof(o).to_tangent_aval())) for i, o in enumerate(out)]


def _batch_of_ruled(xs: Any, dims: Any, *, f: Any, rule: Any, of: Any, to: Any) -> Any:
    of_rule = [*dims], 0, [dims[i] for i in of]
    out = ruled(jax.vmap(f, dims), jax.vmap(rule, of_rule), xs, of, to)
    return out, [0] * len(out)


def _transpose_of_ruled(cotangents: Any, *xs: Any, f: Any, **_: Any) -> list[Any]:
    """Transpose ``f`` itself. This is for functions that are transposed without a derivative."""
    at = [i for i, x in enumerate(xs) if ad.is_undefined_primal(x)]
    nonzero = {i: c for i, c in enumerate(cotangents) if type(c) is not ad.Zero}

    def of(*ys: Any) -> list[Any]:
        linear = dict(zip(at, ys))
        out = f(*(linear.get(i, x) for i, x in enumerate(xs)))
        return [out[i] for i in nonzero]

    found = jax.linear_transpose(of, *(xs[i].aval for i in at))([*nonzero.values()])
    return [dict(zip(at, found)).get(i) for i in range(len(xs))]


def linear(
    push: Map, pull: Map, residuals: Any, xs: Sequence[Any], like: Sequence[Any]
) -> list[Any]:
    """``push(residuals, xs)``, whose results are like ``like`` and whose transpose is ``pull``."""
    flat, tree = jax.tree_util.tree_flatten(residuals)

    def of_flat(f: Map) -> Callable[..., list[Any]]:
        return lambda *vs: f(jax.tree_util.tree_unflatten(tree, vs[: len(flat)]), vs[len(flat) :])

    return _bind(of_flat(push), of_flat(pull), flat, xs, tuple(jax.typeof(x) for x in like))


def _bind(
    push: Any, pull: Any, residuals: Sequence[Any], xs: Sequence[Any], results: Any
) -> list[Any]:
    return linear_p.bind(
        *residuals, *xs, push=push, pull=pull, n_residuals=len(residuals), results=results
    )


@linear_p.def_impl
def _evaluate(*values: Any, push: Any, **_: Any) -> list[Any]:
    return push(*values)


@linear_p.def_abstract_eval
def _abstract(*_: Any, results: Any, **__: Any) -> Any:
    return list(results)


def _jvp(
    primals: Any, tangents: Any, *, push: Any, pull: Any, n_residuals: int, results: Any
) -> Any:
    residuals, xs = primals[:n_residuals], primals[n_residuals:]
    out = _bind(push, pull, residuals, xs, results)
    moved = [ad.instantiate_zeros(t) for t in tangents]
    through_xs = _bind(push, pull, residuals, moved[n_residuals:], results)
    if all(type(t) is ad.Zero for t in tangents[:n_residuals]):
        return out, through_xs
    _, through_residuals = jax.jvp(
        lambda *k: push(*k, *xs), tuple(residuals), tuple(moved[:n_residuals])
    )
    return out, [a + b for a, b in zip(through_xs, through_residuals)]


def _transpose(
    cotangents: Any, *values: Any, push: Any, pull: Any, n_residuals: int, results: Any
) -> list[Any]:
    # As with ``jax.custom_vjp``, second derivatives are those of the operations in ``pull``.
    full = [ad.instantiate_zeros(c) for c in cotangents]
    return [None] * n_residuals + list(pull(*values[:n_residuals], *full))


def _batch(
    values: Any, dims: Any, *, push: Any, pull: Any, n_residuals: int, results: Any
) -> tuple[Any, Any]:
    (size,) = {v.shape[d] for v, d in zip(values, dims) if d is not None}
    residual_dims = dims[:n_residuals]
    xs = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(values[n_residuals:], dims[n_residuals:])
    ]

    def batched(f: Any) -> Any:
        return lambda *vs: jax.vmap(f, (*residual_dims, *(0 for _ in vs[n_residuals:])))(*vs)

    shapes = tuple(r.update(shape=(size, *r.shape)) for r in results)
    out = _bind(batched(push), batched(pull), values[:n_residuals], xs, shapes)
    return out, [0] * len(out)


def transpose(f: Any, zeros: Sequence[Any], cotangents: Any) -> list[Any] | None:
    """The transpose of a function of arrays like ``zeros``, or ``None`` if it is not linear."""
    try:
        return list(jax.linear_transpose(f, *zeros)(cotangents))
    except (NotImplementedError, AssertionError, TypeError, ValueError):
        pass  # it is not linear, or JAX can transpose its operations only as part of a derivative
    n = len(zeros)
    jaxpr = jax.make_jaxpr(lambda *xs: jax.jvp(f, xs[:n], xs[n:])[1])(*zeros, *zeros).jaxpr
    if any(_depend(jaxpr, [True] * n + [False] * n)):
        return None
    return list(jax.vjp(f, *zeros)[1](cotangents))


def _depend(jaxpr: Any, flags: Sequence[bool]) -> list[bool]:
    """Which results of a jaxpr depend on the flagged inputs."""
    depends = dict(zip(jaxpr.invars, flags))
    for eqn in jaxpr.eqns:
        inputs = [not isinstance(v, Literal) and depends.get(v, False) for v in eqn.invars]
        inner = [p for p in eqn.params.values() if isinstance(p, ClosedJaxpr)]
        if len(inner) == 1 and len(inner[0].jaxpr.invars) == len(inputs):
            found = _depend(inner[0].jaxpr, inputs)
        else:
            found = [any(inputs)] * len(eqn.outvars)
        depends |= dict(zip(eqn.outvars, found))
    return [not isinstance(v, Literal) and depends.get(v, False) for v in jaxpr.outvars]


for primitive, run, jvp, transposed, batch in (
    (linear_p, _evaluate, _jvp, _transpose, _batch),
    (ruled_p, _run, _jvp_of_ruled, _transpose_of_ruled, _batch_of_ruled),
):
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transposed
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
