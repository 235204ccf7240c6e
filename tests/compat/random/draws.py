"""How draws of ``functx.compat.random`` are compared with those of JAX."""

import jax
import numpy as np
import torch

from functx.compat import random

FLOATS = ["float16", "bfloat16", "float32", "float64"]


def torch_dtype(name):
    return getattr(torch, name)


def numpy_of(x):
    return x.to(torch.float64).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def same(ours, theirs):
    """The same shape, dtype and bits."""
    theirs = np.asarray(theirs)
    assert str(ours.dtype).removeprefix("torch.") == str(theirs.dtype)
    assert tuple(ours.shape) == theirs.shape
    theirs = theirs.astype(np.float64) if str(theirs.dtype) == "bfloat16" else theirs
    np.testing.assert_array_equal(numpy_of(ours), theirs)


def keys_same(ours, theirs):
    theirs = jax.random.key_data(theirs)
    same(random.key_data(ours), theirs)


def ulps(ours, theirs):
    """The largest distance, in steps between neighbouring numbers of the dtype."""
    theirs = np.asarray(theirs)
    assert str(ours.dtype).removeprefix("torch.") == str(theirs.dtype)
    bits = {2: np.int16, 4: np.int32, 8: np.int64}[theirs.itemsize]
    view = {2: torch.int16, 4: torch.int32, 8: torch.int64}[theirs.itemsize]
    a = ours.contiguous().view(view).numpy().astype(object if bits == np.int64 else np.int64)
    b = theirs.view(bits).astype(a.dtype)
    least = int(np.iinfo(bits).min)
    ordered = [np.where(x < 0, least - x, x) for x in (a, b)]
    return int(np.max(np.abs(ordered[0] - ordered[1]), initial=0))
