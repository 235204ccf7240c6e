"""What a region hands to numpy, to files, to pointers: computed again where it is read."""

import copy
import ctypes
import io
import pickle

import numpy as np
import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


def saved(t):
    """``t`` as a file has it."""
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


def at_address(t):
    """A copy of what is at the address of ``t``."""
    memory = (ctypes.c_double * t.numel()).from_address(t.data_ptr())
    return torch.from_numpy(np.array(memory)).reshape(t.shape)


def written_through(t):
    """Computed by numpy, in memory of torch's."""
    out = torch.empty_like(t)
    np.sin(t.numpy(), out=out.numpy())
    return out


def written_after(t):
    """Read by numpy through an alias that is older than the value."""
    t = t.clone()
    alias = t.numpy()
    t.mul_(2)
    return torch.tensor(alias.tolist(), dtype=t.dtype)


EXPORTS = {
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "file": saved,
    "numpy": lambda t: torch.tensor(t.numpy()),
    "asarray": lambda t: torch.tensor(np.asarray(t)),
    "dlpack": lambda t: torch.tensor(np.from_dlpack(t).tolist(), dtype=t.dtype),
    "tolist": lambda t: torch.tensor(t.tolist(), dtype=t.dtype),
    "item": lambda t: torch.tensor([v.item() for v in t], dtype=t.dtype),
    "number": lambda t: t.cos() * float(np.sum(t.numpy())),
    "branch": lambda t: t.cos() if t.tolist()[0] > 0 else t.sin(),
    "storage": lambda t: torch.tensor(t.untyped_storage().tolist(), dtype=torch.uint8).view(
        t.dtype
    ),
    "address": at_address,
    "printed": lambda t: t * len(repr(t)),
    "deep copy": copy.deepcopy,
    "written through": written_through,
    "written after": written_after,
}


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("of", ["computed", "given"])
def test_plain_autograd(export, nested, of):
    x, w = numbers(4), numbers(4, start=1.0).requires_grad_()

    def f(x, w):
        export_of = EXPORTS[export]
        return (export_of(torch.tanh(x) if of == "computed" else x).cos() * w).sin().sum()

    region = functx.remat(functx.remat(f)) if nested else functx.remat(f)
    expected = torch.autograd.grad(f(x, w), w)
    assert_same(torch.autograd.grad(region(x, w), w), expected)


@pytest.mark.parametrize("export", ["tolist", "branch", "printed"])
@pytest.mark.parametrize("way", ["grad", "hessian", "vmap"])
def test_transforms(export, way):
    x, w = numbers(4), numbers(4, start=1.0)

    def f(w):
        return (EXPORTS[export](torch.tanh(x)).cos() * w).sin().sum()

    def derivative(f):
        if way == "vmap":
            return functx.vmap(functx.grad(f))(torch.stack([w, w * 2]))
        return (functx.grad if way == "grad" else functx.hessian)(f)(w)

    assert_same(derivative(functx.remat(f)), derivative(f))


@pytest.mark.parametrize("way", ["plain", "grad", "vmap"])
def test_a_module_made_in_a_region(way):
    def f(x):
        layer = nn.Linear(4, 4, dtype=x.dtype)
        with torch.no_grad():
            layer.weight.add_(1)
        return layer(x).cos().sum()

    def derivative(f):
        torch.manual_seed(1)
        x = numbers(4)
        if way == "plain":
            x.requires_grad_()
            return torch.autograd.grad(f(x), x)
        if way == "vmap":
            mapped = functx.vmap(functx.grad(f), randomness="same")
            return mapped(torch.stack([x, x * 2]))
        return functx.grad(f)(x)

    try:
        expected = derivative(f)
    except RuntimeError:
        assert way == "vmap"  # torch draws nothing into memory that is not mapped
        return
    assert_same(derivative(functx.remat(f)), expected)
