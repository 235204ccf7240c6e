"""scikit-learn's 1,797 handwritten digits: real scans of 8x8 pixels, shipped in the package."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) in [0, 1], float32, and labels (n,), int64; for training and held out."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load(device: torch.device, limit: int | None = None, seed: int = 0) -> Digits:
    """The digits, shuffled, a fifth of them held out.

    Args:
        device: Where the tensors live.
        limit: How many images to take; all by default.
        seed: Decides which are held out.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:limit]
    x = (torch.tensor(images, dtype=torch.float32) / 16)[order].to(device)
    y = torch.tensor(labels, dtype=torch.int64)[order].to(device)
    split = len(order) * 4 // 5
    return Digits(x[:split], y[:split], x[split:], y[split:])
