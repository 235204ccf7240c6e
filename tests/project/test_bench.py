"""What benches compare with is what it says."""

from __future__ import annotations

import torch
from torch import nn

from bench._blocks import Stack, loss, transformer_block
from bench.transformer import by_hand


def test_gradients_written_out_by_hand_are_the_same_bits():
    torch.manual_seed(0)
    stack = Stack("", nn.ModuleList(transformer_block() for _ in range(2)), torch.randn(2, 8, 256))
    expected = torch.autograd.grad(loss(stack.blocks, stack.x), stack.parameters)
    assert all(map(torch.equal, by_hand(stack), expected))
