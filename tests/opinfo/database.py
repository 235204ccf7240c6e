"""torch's own operator database."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from typing import Any

import torch


def entries(*dtypes: torch.dtype) -> list[Any]:
    """The entries that run on a CPU in one of some dtypes."""
    # torch's test utilities import a package that only their own assertions need.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if set(dtypes) & set(op.supported_dtypes("cpu"))]


def name_of(op: Any) -> str:
    """The name of an entry, with its variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
