"""What must hold on a device: each test also runs on the CPU, so that it can't rot.

``make gpu`` runs the half on the device; ``make test`` the CPU's.
"""

import os

import pytest
import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each in turn."""
    return request.param


@pytest.fixture
def exact():
    """No TF32: products as they are on the CPU."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
