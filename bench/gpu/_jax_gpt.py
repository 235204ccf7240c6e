"""The same language model written in JAX, with its blocks as they are or under `jax.checkpoint`.

Not lowered from torch: two programs by hand, to be held against each other. Blocks run one after
another in a `lax.scan` over their parameters, as in JAX's own libraries: one is compiled.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bench.gpu import _torch_gpt
from functx.compat import _jax

Params = dict[str, Any]


def params_of(toy: bool) -> Params:
    """The numbers of the torch model, by the same names; those of blocks stacked: ``blocks.*``."""
    model = _torch_gpt.model_of(toy, "cpu")
    params = {n: p for n, p in model.named_parameters() if not n.startswith("blocks.")}
    for name, _ in model.blocks[0].named_parameters():
        params[f"blocks.*.{name}"] = torch.stack([b.get_parameter(name) for b in model.blocks])
    return {name: jnp.asarray(p.detach().numpy()) for name, p in params.items()}


def batch_of(size: int, toy: bool) -> tuple[Any, Any]:
    """The tokens of the torch bench."""
    x, y = _torch_gpt.batch_of(size, toy, "cpu")
    return jnp.asarray(x.numpy().astype(np.int32)), jnp.asarray(y.numpy().astype(np.int32))


def linear(params: Params, name: str, x: Any, dtype: Any) -> Any:
    weight, bias = (params[f"{name}.{part}"].astype(dtype) for part in ("weight", "bias"))
    return x.astype(dtype) @ weight.T + bias


def norm(params: Params, name: str, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    scaled = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal, over ``(batch, tokens, heads, size)``; by the fused kernel where there is one."""
    fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn" if fused else None
    )


def block(params: Params, x: Any, heads: int, dtype: Any) -> Any:
    batch, tokens, width = x.shape
    qkv = linear(params, "qkv", norm(params, "norm1", x), dtype)
    q, k, v = jnp.moveaxis(qkv.reshape(batch, tokens, 3, heads, width // heads), 2, 0)
    mixed = attention(q, k, v).reshape(batch, tokens, width)
    x = x + linear(params, "out", mixed, dtype)
    hidden = jax.nn.gelu(linear(params, "up", norm(params, "norm2", x), dtype), approximate=False)
    return x + linear(params, "down", hidden, dtype)


def loss(params: Params, x: Any, y: Any, *, toy: bool, checkpoint: bool, dtype: Any) -> Any:
    """The mean loss; products in ``dtype``."""
    sizes = _torch_gpt.shape(toy)
    h = params["embed.weight"][x] + params["position.weight"][: x.shape[1]]
    run = functools.partial(block, heads=sizes["heads"], dtype=dtype)
    run = jax.checkpoint(run, prevent_cse=False) if checkpoint else run
    stacked = {n.removeprefix("blocks.*."): p for n, p in params.items() if n.startswith("blocks.")}
    h, _ = jax.lax.scan(lambda h, own: (run(own, h), None), h, stacked)
    scores = linear(params, "head", norm(params, "norm", h), dtype).astype(jnp.float32)
    picked = jnp.take_along_axis(scores, y[..., None], -1)[..., 0]
    return (jax.scipy.special.logsumexp(scores, -1) - picked).mean()


def options() -> Any:
    """For the compiler: on the CPU it would undo `jax.checkpoint`."""
    return _jax.KEEP_RECOMPUTE if jax.default_backend() == "cpu" else None


def compiled_step(size: int, toy: bool, checkpoint: bool) -> tuple[Any, Params, Any]:
    """A step of training, compiled, its parameters and its batch."""
    own_loss = functools.partial(loss, toy=toy, checkpoint=checkpoint, dtype=jnp.bfloat16)

    def step(params: Params, x: Any, y: Any) -> Params:
        gradients = jax.grad(own_loss)(params, x, y)
        return {name: p - _torch_gpt.RATE * gradients[name] for name, p in params.items()}

    params, batch = params_of(toy), batch_of(size, toy)
    lowered: Any = jax.jit(step, donate_argnums=0).lower(params, *batch)
    return lowered.compile(compiler_options=options()), params, batch


def planned_peak(compiled: Any) -> int:
    """What XLA says a program takes: arguments, results and temporary memory."""
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


def measured(checkpoint: bool, size: int, toy: bool, repeats: int = 5) -> dict[str, Any]:
    """Peak bytes, seconds and tokens a second of a step of training."""
    step, params, batch = compiled_step(size, toy, checkpoint)
    times = []
    for _ in range(repeats + 2):
        before = time.perf_counter()
        params = step(params, *batch)
        jax.block_until_ready(params)
        times.append(time.perf_counter() - before)
    seconds = float(np.median(times[2:]))
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform == "gpu" else None
    peak = int(stats["peak_bytes_in_use"]) if stats else planned_peak(step)
    return {
        "batch": size,
        "peak": peak,
        "planned_peak": planned_peak(step),
        "seconds": seconds,
        "tokens_per_second": batch[0].size / seconds,
    }


def gradients(size: int, toy: bool, checkpoint: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients in float32 and full precision, and the bytes that their pullback keeps."""
    params, (x, y) = params_of(toy), batch_of(size, toy)
    own_loss = functools.partial(loss, toy=toy, checkpoint=checkpoint, dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        value, pullback = jax.jit(lambda p: jax.vjp(lambda p: own_loss(p, x, y), p))(params)
        (found,) = jax.jit(lambda pullback, seed: pullback(seed))(pullback, jnp.ones_like(value))
    # Parameters that the pullback reads are there in any case; they come back in other arrays.
    given = [*params.values(), x, y]
    leaves = [leaf for leaf in jax.tree.leaves(pullback) if isinstance(leaf, jax.Array)]
    kept = sum(leaf.nbytes for leaf in leaves if not any(_equal(leaf, g) for g in given))
    gradients = {name: torch.from_numpy(np.array(g)) for name, g in found.items()}
    for name in [n for n in gradients if n.startswith("blocks.*.")]:
        for number, row in enumerate(gradients.pop(name)):
            gradients[name.replace("*", str(number))] = row
    return gradients, kept


def _equal(one: jax.Array, other: jax.Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())


def finished(result: Any) -> Any:
    """``result``, once it is there."""
    return jax.block_until_ready(result)
