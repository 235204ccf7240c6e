"""Networks and helpers that several tests share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from functx.compat._dlpack import array_from_torch
from functx.compat._jax import KEEP_RECOMPUTE


class Attention(nn.Module):
    """A pre-norm transformer block with a causal mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        split = [t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in (q, k, v)]
        a = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(a.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm2(x))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    return net, torch.randn(4, 6)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 16)
            self.blocks = nn.Sequential(Attention(16, 2), Attention(16, 4))
            self.head = nn.Linear(16, 5)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.embed(tokens)).mean(-2))

    return Model(), torch.randint(0, 11, (4, 7))


def conv() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.BatchNorm2d(8),
        nn.GELU("tanh"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return net.eval(), torch.randn(4, 3, 12, 12)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": mlp,
    "transformer": transformer,
    "conv": conv,
}


def loss_of(net: nn.Module) -> Callable[..., torch.Tensor]:
    """Cross entropy as a function of (params, batch, labels)."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(net, params, (x,)), y)

    return loss


def params_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


def arrays(tree: Any) -> Any:
    """A pytree of tensors as JAX arrays."""
    return jax.tree_util.tree_map(array_from_torch, tree)


def assert_close(got: Any, expected: Any, rtol: float = 2e-6) -> None:
    """Compare a pytree of JAX arrays with one of torch tensors, relative to the largest entry."""
    a, b = jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(expected)
    assert len(a) == len(b)
    for x, y in zip(a, b):
        y = y.detach().numpy()
        assert x.shape == y.shape
        scale = max(np.abs(y).max(initial=0), 1e-2)
        np.testing.assert_allclose(np.asarray(x), y, rtol=0, atol=rtol * scale)


def count_dots(f: Callable[..., Any], *args: Any, barriers: bool = True) -> int:
    """Matrix products in the compiled program; by default with recomputations kept."""
    options = KEEP_RECOMPUTE if barriers else None
    text = jax.jit(f).lower(*args).compile(compiler_options=options).as_text()
    return len(re.findall(r"\bdot\(", text))


def as_usual(f: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit(f)``, coded as XLA codes by itself, also where ``make test`` has it done quickly.

    The bits of a product and a sum depend on it: the usual code rounds them once.
    """
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 3})
