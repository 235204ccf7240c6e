"""tensordict stands around torch's vmap as soon as it is imported."""

import pytest
import torch
from references import assert_same

import functx

tensordict = pytest.importorskip("tensordict")


def test_a_mapped_function_is_compiled_where_tensordict_is_imported():
    assert tensordict.is_tensor_collection(tensordict.TensorDict())
    f = functx.vmap(functx.grad(lambda x: x.sin().sum()))
    x = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3)
    assert_same(functx.jit(f, backend="eager")(x), x.cos())
