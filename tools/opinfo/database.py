"""torch's own operator database."""

import sys
import types
import unittest
import warnings

import torch
from torch.utils import _pytree as pytree


def entries(*dtypes):
    """The entries that run on a CPU in one of some dtypes."""
    # torch's test utilities import a package that only their own assertions need.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if set(dtypes) & set(op.supported_dtypes("cpu"))]


def name_of(op):
    """The name of an entry, with its variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def as_function(op, sample, takes=lambda tensor: True):
    """A sample as a function of some of its tensors, and those."""
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and takes(x)]

    def call(*tensors):
        full = list(flat)
        for i, t in zip(where, tensors):
            full[i] = t
        first, args, kwargs = pytree.tree_unflatten(full, spec)
        out = op.op(first, *args, **kwargs)
        return sample.output_process_fn_grad(out) if op.supports_autograd else out

    return call, [flat[i] for i in where]


def one_line(error, length=160):
    """The beginning of its message."""
    return " ".join(str(error).split())[:length]
