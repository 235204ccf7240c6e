"""Random operations, from JAX keys.

A lowered function that draws takes a key (``to_jax(f, rng=True)``).  Each drawing operation folds
its own number into it, so draws are independent, fresh for each key, and the same whenever
``jax.checkpoint`` runs a region again.  Values follow torch's distributions, not its bit streams.

Derivatives are torch's: zero in the parameters of ``normal``, ``poisson`` and ``binomial``, where
JAX would differentiate what the draw is computed by.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._lowering._table import rule


def _uniform(ctx: Any, low: Any = 0.0, high: Any = 1.0) -> Any:
    return jax.random.uniform(ctx.key(), ctx.shape, ctx.dtype, low, high)


@rule("rand", "rand_like", random=True)
def _rand(*_: Any, ctx: Any, **__: Any) -> Any:
    return _uniform(ctx)


@rule("randn", "randn_like", random=True)
def _randn(*_: Any, ctx: Any, **__: Any) -> Any:
    return jax.random.normal(ctx.key(), ctx.shape, ctx.dtype)


@rule("uniform", random=True)
def _uniform_rule(x: Any, low: float = 0.0, high: float = 1.0, *, ctx: Any, **_: Any) -> Any:
    return _uniform(ctx, low, high)


@rule("prims::uniform", random=True)
def _prim_uniform(shape: Any, *, low: float, high: float, ctx: Any, **_: Any) -> Any:
    return _uniform(ctx, low, high)


@rule("prims::normal", random=True)
def _prim_normal(shape: Any, *, mean: Any, std: Any, ctx: Any, **_: Any) -> Any:
    return mean + std * jax.random.normal(ctx.key(), ctx.shape, ctx.dtype)


@rule("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor", random=True)
def _normal(mean: Any, std: Any = 1.0, *_: Any, ctx: Any, **__: Any) -> Any:
    return lax.stop_gradient(mean + std * jax.random.normal(ctx.key(), ctx.shape, ctx.dtype))


@rule("normal_functional", random=True)
def _normal_functional(x: Any, mean: Any = 0.0, std: Any = 1.0, *, ctx: Any, **_: Any) -> Any:
    return mean + std * jax.random.normal(ctx.key(), ctx.shape, ctx.dtype)


def _integers(ctx: Any, low: int, high: int) -> Any:
    kind = ctx.dtype if jnp.issubdtype(ctx.dtype, jnp.integer) else jnp.int32
    return jax.random.randint(ctx.key(), ctx.shape, low, high, kind)


@rule("randint", random=True)
def _randint(high: int, *_: Any, ctx: Any, **__: Any) -> Any:
    return _integers(ctx, 0, high)


@rule("randint.low", random=True)
def _randint_low(low: int, high: int, *_: Any, ctx: Any, **__: Any) -> Any:
    return _integers(ctx, low, high)


@rule("random.from", random=True)
def _random_from(x: Any, low: int, high: int | None, *, ctx: Any, **_: Any) -> Any:
    return _integers(ctx, low, _whole(ctx.dtype) if high is None else high)


@rule("random", "random.to", random=True)
def _random_to(x: Any, high: int | None = None, *, ctx: Any, **_: Any) -> Any:
    return _integers(ctx, 0, _whole(ctx.dtype) if high is None else high)


def _whole(dtype: Any) -> int:
    """Below which a dtype has every whole number."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).max)
    return int(min(2 ** (jnp.finfo(dtype).nmant + 1) + 1, jnp.iinfo(jnp.int32).max))


@rule("randint_like", random=True)
def _randint_like(x: Any, high: int, *, ctx: Any, **_: Any) -> Any:
    return _integers(ctx, 0, high)


@rule("randint_like.low_dtype", random=True)
def _randint_like_low(x: Any, low: int, high: int, *, ctx: Any, **_: Any) -> Any:
    return _integers(ctx, low, high)


@rule("randperm", random=True)
def _randperm(n: int, *, ctx: Any, **_: Any) -> Any:
    return jax.random.permutation(ctx.key(), n)


@rule("bernoulli.p", random=True)
def _bernoulli_p(x: Any, p: float = 0.5, *, ctx: Any, **_: Any) -> Any:
    return jax.random.bernoulli(ctx.key(), p, ctx.shape)


@rule("bernoulli", "bernoulli.Tensor", random=True)
def _bernoulli(x: Any, p: Any = None, *, ctx: Any, **_: Any) -> Any:
    return jax.random.bernoulli(ctx.key(), x if p is None else p, ctx.shape)


@rule("native_dropout", random=True)
def _native_dropout(x: Any, p: float, train: bool | None, *, ctx: Any) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    keep = jax.random.bernoulli(ctx.key(), 1 - p, x.shape)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return jnp.where(keep, x * scale, 0), keep


@rule("multinomial", random=True)
def _multinomial(weights: Any, count: int, replacement: bool = False, *, ctx: Any, **_: Any) -> Any:
    logits = jnp.log(weights)
    if replacement:
        drawn = jax.random.categorical(ctx.key(), logits, shape=(count, *weights.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    # The largest of Gumbel-perturbed logits are a draw without replacement.
    noisy = logits + jax.random.gumbel(ctx.key(), weights.shape, weights.dtype)
    return lax.top_k(noisy, count)[1]


@rule("rrelu_with_noise_functional", random=True)
def _rrelu(
    x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    *_: Any, ctx: Any,
) -> Any:  # fmt: skip
    if not training:
        return jnp.where(x <= 0, x * ((lower + upper) / 2), x), noise
    slope = jax.random.uniform(ctx.key(), x.shape, x.dtype, lower, upper)
    slope = jnp.where(x <= 0, slope, 1)
    return x * slope, slope


@rule("poisson", random=True)
def _poisson(x: Any, *_: Any, ctx: Any) -> Any:
    return jax.random.poisson(ctx.key(), lax.stop_gradient(x), ctx.shape)


@rule("_standard_gamma", random=True)
def _standard_gamma(x: Any, *_: Any, ctx: Any) -> Any:
    return jax.random.gamma(ctx.key(), x, ctx.shape, ctx.dtype)


@rule("_sample_dirichlet", random=True)
def _dirichlet(x: Any, *_: Any, ctx: Any) -> Any:
    return jax.random.dirichlet(ctx.key(), x, x.shape[:-1], ctx.dtype)


@rule("binomial", random=True)
def _binomial(n: Any, p: Any, *_: Any, ctx: Any) -> Any:
    return jax.random.binomial(ctx.key(), *lax.stop_gradient((n, p)), ctx.shape)
