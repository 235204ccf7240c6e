"""``torch.set_default_device`` and ``with torch.device`` in the body of a region."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same

import functx


def test_a_default_device_that_is_left_set_raises():
    x = numbers(3).requires_grad_()

    def body(x):
        torch.set_default_device("cpu")
        return (x * torch.ones(3, dtype=x.dtype)).sin()

    try:
        with pytest.raises(functx.RematError, match=r"other modes were active.*torch\.device"):
            functx.remat(body)(x)
    finally:
        torch.set_default_device(None)
    assert torch.overrides._len_torch_function_stack() == 0


def test_a_default_device_for_a_while():
    def program(remat):
        x = numbers(3).requires_grad_()

        def body(x):
            with torch.device("cpu"):
                y = x * torch.ones(3, dtype=x.dtype)
            torch.set_default_device("cpu")
            y = y + torch.ones(3, dtype=x.dtype)
            torch.set_default_device(None)
            return y.sin()

        remat(body)(x).sum().backward()
        return x.grad

    assert_same(program(functx.remat), program(identity))
