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


# Of a vector, numbers and places that the region computed, what C++ reads past everything.
AMONG_NUMBERS = {
    "tensor": lambda v, a, b, i, j: v * torch.tensor([a, b, 1.0, a]),
    "rows": lambda v, a, b, i, j: v * torch.tensor([[a, b], [b, 2.0]]).flatten(),
    "by keyword": lambda v, a, b, i, j: v * torch.tensor(data=[a, b, a, b], dtype=v.dtype),
    "as_tensor": lambda v, a, b, i, j: v * torch.as_tensor((a, b, a, b)),
    "asarray": lambda v, a, b, i, j: v * torch.asarray([a, b, a, b]),
    "new_tensor": lambda v, a, b, i, j: v * v.new_tensor([a, b, a, b]),
    "new": lambda v, a, b, i, j: v * v.new([a, b, a, b]),
    "DoubleTensor": lambda v, a, b, i, j: v * torch.DoubleTensor([a, b, a, b]),
    "Tensor": lambda v, a, b, i, j: v * torch.Tensor([a, b, a, b]).double(),
    "LongTensor": lambda v, a, b, i, j: v * torch.LongTensor([i, j, i, j]).add(2),
    "sparse": lambda v, a, b, i, j: v @ torch.sparse_coo_tensor([[i, j]], [a, b], (4,)).to_dense(),
    "indices": lambda v, a, b, i, j: v[None][:, [i, j]].exp(),
    "an index among numbers": lambda v, a, b, i, j: v[None][:, [3, i]].exp(),
    "rows of indices": lambda v, a, b, i, j: v[None][0, [[i, j], [j, i]]].exp(),
    "many indices": lambda v, a, b, i, j: v[[i, j] * 17].exp(),
    "written at indices": lambda v, a, b, i, j: v[None].clone().index_fill(1, j, 2.0)[:, [i, j]],
    "a slice": lambda v, a, b, i, j: v[i : j + 1].exp(),
}


def reads_among_numbers(form):
    def body(x, w):
        h = torch.tanh(x * w)
        v = h.detach() + 1.5
        i = v.mul(0).long().max()
        return (h * w).sum() * form(v, v.sum().sin(), v.mean(), i, i + 2).sum()

    return body


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:Converting a tensor")
@pytest.mark.parametrize("form", AMONG_NUMBERS)
@pytest.mark.parametrize("nested", [False, True])
def test_tensors_among_numbers(form, nested):
    """No mode is shown that their values are read; a replay left out what computes them."""
    body = reads_among_numbers(AMONG_NUMBERS[form])
    region = functx.remat(lambda x, w: functx.remat(body)(x, w)) if nested else functx.remat(body)
    for step in range(7):
        x, w = numbers(4, start=0.1 * step), numbers(4, start=1.0).requires_grad_()
        assert_same(torch.autograd.grad(region(x, w), w), torch.autograd.grad(body(x, w), w))


@pytest.mark.parametrize("form", ["tensor", "DoubleTensor", "indices"])
def test_constants_among_numbers(form):
    """They are the body's externals, compared and kept as others are."""
    a, b, i = torch.tensor(1.5, dtype=torch.float64), numbers(1)[0], torch.tensor(0)
    j = torch.tensor(2)
    made = AMONG_NUMBERS[form]
    region = functx.remat(lambda x: (x.sin() * made(x.detach().cos(), a, b, i, j).sum()).sum())
    x = numbers(4).requires_grad_()
    for _ in range(7):
        expected = torch.autograd.grad(region.__wrapped__(x), x)
        assert_same(torch.autograd.grad(region(x), x), expected)
    y = region(x)
    (a if form != "indices" else j).add_(1 if form != "indices" else -1)
    with pytest.raises(functx.RematError, match="modified in place"):
        y.backward()
