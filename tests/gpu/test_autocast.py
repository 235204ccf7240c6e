"""Autocast: a replay computes in the precision of its forward, whatever surrounds it by then."""

import pytest
import torch
from cases import seeded
from torch import nn

import functx


def net(norm=nn.LayerNorm):
    layers = (nn.Sequential(nn.Linear(32, 32), norm(32), nn.GELU()) for _ in range(3))
    return nn.Sequential(*layers)


def build(device, remat, **options):
    model = seeded(lambda: net(**options)).to(device)
    return functx.apply_remat(model, "*") if remat else model


def dtypes(device):
    return torch.bfloat16 if device == "cpu" else torch.float16, torch.bfloat16


@pytest.mark.parametrize("which", [0, 1], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("inside", "cache"), [(True, True), (False, False), (False, True)])
def test_gradients_are_those_without_regions(which, inside, cache, device):
    dtype = dtypes(device)[which]
    x = torch.randn(16, 32, device=device)

    def gradients(remat):
        model = build(device, remat)
        with torch.autocast(device, dtype, cache_enabled=cache):
            out = model(x).float().square().mean()
            if inside:
                out.backward()
        if not inside:
            out.backward()
        return [p.grad for p in model.parameters()]

    for ours, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, expected)


def test_scaled_gradients_step_alike(device):
    """With a `GradScaler`: steps, skipped steps and the scale."""
    x = torch.randn(16, 32, device=device)

    def train(remat):
        model = build(device, remat)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**14, growth_interval=2)
        for _ in range(4):
            with torch.autocast(device, dtypes(device)[0]):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*(p.detach() for p in model.parameters()), torch.tensor(scaler.get_scale())]

    for ours, expected in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, expected)
