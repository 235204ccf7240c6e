"""Random operations, from JAX keys.

A lowered function that draws takes a key (``to_jax(f, rng=True)``). Each random operation folds its
own number into the key. So draws are independent, different for each key, and the same whenever
``jax.checkpoint`` runs a region again. Values follow torch's distributions, but not its bit
streams.

Derivatives are those of torch: zero with respect to the parameters of ``normal``, ``poisson`` and
``binomial``, where JAX would differentiate the computation of the draw.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._to_jax.rules.table import rule, rules


def _uniform(_: Any, low: Any = 0.0, high: Any = 1.0, *, ctx: Any, **__: Any) -> Any:
    return jax.random.uniform(ctx.key(), ctx.shape, ctx.dtype, low, high)


def _gaussian(_: Any, mean: Any = 0.0, std: Any = 1.0, *, ctx: Any, **__: Any) -> Any:
    return mean + std * jax.random.normal(ctx.key(), ctx.shape, ctx.dtype)


def _normal(mean: Any, std: Any = 1.0, *_: Any, ctx: Any, **__: Any) -> Any:
    return lax.stop_gradient(_gaussian(None, mean, std, ctx=ctx))


def _integers(low: int, high: int | None, ctx: Any) -> Any:
    high = _whole(ctx.dtype) if high is None else high
    kind = ctx.dtype if jnp.issubdtype(ctx.dtype, jnp.integer) else jnp.int32
    return jax.random.randint(ctx.key(), ctx.shape, low, high, kind)


def _whole(dtype: Any) -> int:
    """The bound below which a dtype represents every whole number."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).max)
    return int(min(2 ** (jnp.finfo(dtype).nmant + 1) + 1, jnp.iinfo(jnp.int32).max))


def _bernoulli(x: Any, p: Any = None, *_: Any, ctx: Any, **__: Any) -> Any:
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
    # The indices of the largest Gumbel-perturbed logits are a draw without replacement.
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


def _poisson(x: Any, *_: Any, ctx: Any) -> Any:
    return jax.random.poisson(ctx.key(), lax.stop_gradient(x), ctx.shape)


def _dirichlet(x: Any, *_: Any, ctx: Any) -> Any:
    return jax.random.dirichlet(ctx.key(), x, x.shape[:-1], ctx.dtype)


def _binomial(n: Any, p: Any, *_: Any, ctx: Any) -> Any:
    return jax.random.binomial(ctx.key(), *lax.stop_gradient((n, p)), ctx.shape)


rules(
    {
        "_sample_dirichlet": _dirichlet,
        "_standard_gamma": lambda x, *_, ctx: jax.random.gamma(ctx.key(), x, ctx.shape, ctx.dtype),
        "bernoulli": _bernoulli,
        "bernoulli.p": lambda x, p=0.5, *, ctx, **_: _bernoulli(x, p, ctx=ctx),
        "binomial": _binomial,
        "normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor": _normal,
        "normal_functional prims::normal": _gaussian,
        "poisson": _poisson,
        "rand rand_like": lambda _, *__, ctx, **___: _uniform(None, ctx=ctx),
        "randint": lambda high, *_, ctx, **__: _integers(0, high, ctx),
        "randint.low": lambda low, high, *_, ctx, **__: _integers(low, high, ctx),
        "randint_like": lambda x, high, *_, ctx, **__: _integers(0, high, ctx),
        "randint_like.low_dtype": lambda x, low, high, *_, ctx, **__: _integers(low, high, ctx),
        "randn randn_like": lambda _, *__, ctx, **___: _gaussian(None, ctx=ctx),
        "random random.to": lambda x, high=None, *, ctx, **_: _integers(0, high, ctx),
        "random.from": lambda x, low, high, *, ctx, **_: _integers(low, high, ctx),
        "randperm": lambda n, *, ctx, **_: jax.random.permutation(ctx.key(), n),
        "uniform prims::uniform": _uniform,
    },
    random=True,
)
