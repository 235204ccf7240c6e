"""Formulas that ask whether a mode is active give the same bits, but for those that are listed."""

import contextlib

import pytest
import torch
from cases import DTYPE
from torch.nn import functional as F

from functx import _torch

ROW = torch.linspace(0.2, 1.3, 4, dtype=DTYPE)
SPREAD = torch.tensor([0, 0, 3, 2])

# All of torch 2.13 that call `dispatch_mode_enabled`; the others are `OTHERWISE_UNDER_MODES`.
ASKING = {
    "aminmax": lambda x: (*x.aminmax(), *x.aminmax(dim=0)),
    "atan2": lambda x: torch.atan2(x, x.mT),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), pos_weight=ROW),
    "bce of probabilities": lambda x: F.binary_cross_entropy(x.sigmoid(), x.mT.sigmoid()),
    "clamp": lambda x: x.clamp(x.mT, x.mT + 1),
    "cov": torch.cov,
    "cross_entropy": lambda x: F.cross_entropy(x, SPREAD, ROW, label_smoothing=0.3),
    "cummax": lambda x: x.cummax(0)[0],
    "eig": lambda x: [r.abs() for r in torch.linalg.eig(x)],
    "embedding_bag": lambda x: F.embedding_bag(SPREAD[None], x),
    "gather": lambda x: x.gather(0, SPREAD[None]),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, x.sign()),
    "householder_product": lambda x: torch.linalg.householder_product(x, x[0]),
    "index": lambda x: x[SPREAD],
    "index_select": lambda x: x.index_select(1, SPREAD),
    "linear": lambda x: F.linear(torch.stack([x, x.exp()]), x, x[0]),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x.mT, x.sign()),
    "masked_select": lambda x: x.masked_select(x > 0),
    "matmul": lambda x: x @ torch.stack([x, x.exp()]),
    "matrix_exp": torch.matrix_exp,
    "max along a dimension": lambda x: x.max(0)[0],
    "max_pool1d": lambda x: F.max_pool1d(x[None], 2),
    "quantile": lambda x: x.quantile(0.3, 0),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None].exp(), x[None]),
    "take": lambda x: x.take(SPREAD),
    "trace": torch.trace,
}


def gradient(f, x, scale, mode):
    x = x.clone().requires_grad_()
    with mode:
        outs = f(x)
        outs = outs if isinstance(outs, (tuple, list)) else (outs,)
        cotangents = [torch.ones_like(o) * scale * (i + 1 / 3) for i, o in enumerate(outs)]
        (g,) = torch.autograd.grad(outs, x, cotangents)
    return [t.contiguous().view(torch.int64) for t in (*outs, g)]


class Idle(_torch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ASKING)
def test_a_mode_changes_no_bit(name):
    """Of ordinary numbers, of ties and zeros, and of cotangents that are not finite."""
    generator = torch.Generator().manual_seed(0)
    ran = 0
    for scale in (1.0, 1.0, 1.0, 1.0, float("inf"), float("nan")):
        x = torch.randn(4, 4, dtype=DTYPE, generator=generator)
        for case in (x, x.round(), torch.where(x > 0.3, x, -0.0)):
            try:
                expected = gradient(ASKING[name], case, scale, contextlib.nullcontext())
            except RuntimeError:  # a matrix that has no derivative
                continue
            found = gradient(ASKING[name], case, scale, Idle())
            assert all(map(torch.equal, found, expected))
            ran += 1
    assert ran > 3
