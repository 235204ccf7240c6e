"""Fake tensors, which have shapes and no memory: private names of torch, each with its reason.

``tests/test_canary.py`` asserts that they exist and do what they are used for.
"""

from __future__ import annotations

from torch._subclasses import fake_tensor as _fake_tensor

# What a budgeted function is run on to find out what it runs.
FakeTensor = _fake_tensor.FakeTensor
FakeTensorMode = _fake_tensor.FakeTensorMode
# How they say that something depends on values.
DataDependentOutputException = _fake_tensor.DataDependentOutputException
DynamicOutputShapeException = _fake_tensor.DynamicOutputShapeException
