"""Arrays cross with exactly their values, and without sharing what torch may write to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functx._errors import LoweringError
from functx.compat._dlpack import array_from_torch, tensor_from_jax
from functx.compat._torch import FakeTensorMode

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype):
    x = torch.arange(6).reshape(2, 3).to(dtype)
    with jax.enable_x64(True):
        back = tensor_from_jax(array_from_torch(x))
    assert back.dtype == dtype
    assert torch.equal(back, x)


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_any_layout(shape, seed, data):
    x = torch.randn([2 * n for n in shape], generator=torch.Generator().manual_seed(seed))
    order = data.draw(st.permutations(range(len(shape))))
    steps = data.draw(st.lists(st.integers(1, 2), min_size=len(shape), max_size=len(shape)))
    view = x.permute(order)[tuple(slice(None, None, s) for s in steps)]
    np.testing.assert_array_equal(np.asarray(array_from_torch(view)), view.numpy())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.0).expand(4),
        lambda: torch.view_as_complex(torch.randn(3, 2)).conj(),
        lambda: torch.view_as_complex(torch.randn(3, 2)).conj().imag,
        lambda: torch.randn(4, requires_grad=True),
        lambda: torch._efficientzerotensor((3,)),
    ],
    ids=["expanded", "conj bit", "neg bit", "requires grad", "zero tensor"],
)
def test_lazy_tensors_are_resolved(make):
    x = make()
    expected = x.detach().resolve_conj().resolve_neg().numpy(force=True)
    np.testing.assert_array_equal(np.asarray(array_from_torch(x)), expected)


def test_later_writes_are_not_seen():
    x = torch.zeros(1000)
    a = array_from_torch(x)
    x.fill_(1)
    assert float(a.sum()) == 0
    t = tensor_from_jax(a)
    t.fill_(2)
    assert float(a.sum()) == 0


def test_narrowing_is_refused_unless_it_fits():
    assert array_from_torch(torch.tensor([2**31 - 1])).dtype == jnp.int32
    with pytest.raises(LoweringError, match="do not fit int32"):
        array_from_torch(torch.tensor([2**31]))
    with pytest.raises(LoweringError, match="JAX_ENABLE_X64"):
        array_from_torch(torch.zeros(2, dtype=torch.float64))
    with jax.enable_x64(True):
        assert array_from_torch(torch.tensor([2**31])).dtype == jnp.int64


def test_tensors_without_data_are_refused():
    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(LoweringError, match="no data"):
        array_from_torch(fake)
    with pytest.raises(LoweringError, match="no data"):
        array_from_torch(torch.ones(2, device="meta"))
    with pytest.raises(LoweringError, match="to_dense"):
        array_from_torch(torch.eye(2).to_sparse())
    with pytest.raises(LoweringError, match="functorch"):
        torch.vmap(lambda x: array_from_torch(x) and x)(torch.ones(2))


def test_tracers_and_keys_are_refused():
    with pytest.raises(LoweringError, match="no values"):
        jax.jit(lambda x: tensor_from_jax(x) and x)(jnp.ones(2))
    with pytest.raises(LoweringError, match=r"can't be converted|no counterpart"):
        tensor_from_jax(jax.random.key(0))
