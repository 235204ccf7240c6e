"""What an error of the contract must say, and programs that are right or refused."""

import contextlib
import linecache
import re
import sys

import pytest
import torch
from cases import identity
from references import assert_same

import functx


@contextlib.contextmanager
def refused(line, way_out, shape=None, error=functx.RematError):
    """The block raises an error that names a tensor, a line of the test's code and the way out.

    The line holds the text ``line``; the way out matches a regular expression.
    """
    file = sys._getframe(2).f_code.co_filename
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    numbers = re.findall(re.escape(file.rpartition("/")[2]) + r"\D{1,12}(\d+)", message)
    assert numbers, f"names no line: {message}"
    lines = [linecache.getline(file, int(n)).strip() for n in numbers]
    assert any(line in found for found in lines), f"names {lines}: {message}"
    assert re.search(way_out, message), f"names no way out: {message}"
    if shape is not None:
        sizes = r",\s*".join(map(str, shape))
        assert re.search(rf"[\[(]{sizes},?[\])]", message), f"names no tensor: {message}"


def right_or_refused(program, eps=8.0, way_out=""):
    """``program(remat)`` is as without remat, or refused with a line and a way out."""
    expected = program(identity)
    try:
        actual = program(functx.remat)
    except functx.RematError as error:
        message = str(error)
    else:
        assert_same(actual, expected, eps)
        return
    assert re.search(r"test_\w+\.py\D{1,12}\d+", message), f"names no line: {message}"
    assert re.search(way_out, message), f"names no way out: {message}"


def same(program, eps=8.0):
    """``program(remat)`` is as without remat, and its gradients are not all zeros."""
    expected, actual = program(identity), program(functx.remat)
    assert_same(actual, expected, eps)
    leaves = [t for t in torch.utils._pytree.tree_leaves(expected) if isinstance(t, torch.Tensor)]
    assert all(t.abs().max() > 1e-3 for t in leaves if t.is_floating_point())
