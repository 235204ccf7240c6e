"""Memory shared with JAX: exact values from any layout, and no write is seen on the other side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functx._core.errors import LoweringError
from functx._torch.lowering import FakeTensorMode
from functx.compat import from_jax
from functx.compat._bridge.dlpack import ALIGNMENT, array_from_torch, borrow, give, tensor_from_jax

COMPLEX = (torch.complex64, torch.complex128)
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, *COMPLEX,
]  # fmt: skip


@st.composite
def layouts(draw):
    """Tensors of any dtype: permuted, with steps, offsets, repeated dimensions, lazy bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    offset = draw(st.integers(0, 3))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    sizes = [n * step for n, step in zip(shape, steps)]
    n = int(np.prod(sizes, dtype=int))
    flat = torch.arange(-3, n + offset - 3).abs().to(dtype)
    if dtype in COMPLEX:
        flat = flat * torch.complex(torch.tensor(1.0), torch.tensor(2.0)).to(dtype)
    x = flat[offset:].reshape(sizes)[tuple(slice(None, None, step) for step in steps)]
    x = x.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        x = x.unsqueeze(0).expand(2, *x.shape)
    if dtype in COMPLEX:
        lazy = draw(st.sampled_from(["as it is", "conj bit", "neg bit"]))
        x = {"as it is": x, "conj bit": x.conj(), "neg bit": x.conj().imag}[lazy]
    return x


def values(x):
    x = x.resolve_conj().resolve_neg()
    return (x.float() if x.dtype is torch.bfloat16 else x).numpy()


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_any_tensor_is_read_as_it_is_and_passes_through_a_function(x):
    with jax.enable_x64(True):
        for read in (lambda x: borrow(x, "g"), array_from_torch):
            array = np.asarray(read(x))
            assert array.shape == tuple(x.shape)
            np.testing.assert_array_equal(array.astype(values(x).dtype), values(x))
    y = from_jax(lambda x: x, enable_x64=True)(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(values(y), values(x))
    assert (y.is_contiguous(), y.is_conj(), y.is_neg()) == (True, False, False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_copy_is_made_where_memory_allows(dtype):
    x = torch.ones(64, dtype=dtype)
    with jax.enable_x64(True):
        array = borrow(x, "g")
        assert array.unsafe_buffer_pointer() == x.data_ptr()
        back = give(array, None)
        assert (back.data_ptr(), back.dtype) == (x.data_ptr(), dtype)
        misaligned = borrow(x[1:], "g")
        copied = tensor_from_jax(array_from_torch(x))
    assert x[1:].data_ptr() % ALIGNMENT
    assert misaligned.unsafe_buffer_pointer() != x[1:].data_ptr()
    assert copied.dtype == dtype
    assert torch.equal(copied, x)


CONSTANT = jnp.arange(3.0)
NUMPY_CONSTANT = np.arange(1000, dtype=np.float32)

# Functions whose results JAX could hand out over memory that is somebody else's.
SHARING = {
    "the argument": lambda x: (x,),
    "the argument, twice": lambda x: (x, x),
    "a constant": lambda x: (CONSTANT,),
    "a numpy constant": lambda x: (NUMPY_CONSTANT,),
    "one result, twice": lambda x: [x * 2] * 2,
    "a view of the argument": lambda x: (x.reshape(1, -1), x[:], jnp.real(x)),
    "an array, in a jitted function": lambda x: (jax.jit(lambda: CONSTANT)(),),
}


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "no jit"])
@pytest.mark.parametrize("g", SHARING.values(), ids=SHARING)
def test_results_are_torch_s_own(g, jit):
    f = from_jax(g)
    x = torch.ones(64)
    with jax.disable_jit(not jit):
        first = f(x)
        expected = [t.clone() for t in first]
        for n, t in enumerate(first):
            for later in first[n + 1 :]:
                assert later.data_ptr() != t.data_ptr()
            t.add_(n + 100)
        second = f(x)
    for a, b in zip(second, expected, strict=True):
        assert torch.equal(a, b)
    assert CONSTANT.tolist() == [0, 1, 2]
    assert NUMPY_CONSTANT[1] == 1
    assert torch.equal(x, torch.ones(64))
    cotangent = torch.ones(64)
    (g,) = torch.autograd.grad(from_jax(lambda x: x * 1.0)(x.requires_grad_()), x, cotangent)
    g.add_(1)
    assert torch.equal(cotangent, torch.ones(64))


def test_writes_right_after_the_call_are_not_seen():
    def g(x):
        y = jnp.ones((500, 500))
        for _ in range(4):
            y = jnp.tanh(y @ y / 500)
        return x.sum() + 0 * y.sum(), x * y[0, 0]

    f = from_jax(g)
    for _ in range(3):
        x = torch.ones(100_000)
        total, scaled = f(x)
        x.fill_(float("nan"))
        assert total == 100_000
        assert not scaled.isnan().any()
    x = torch.zeros(1000)
    a = array_from_torch(x)
    x.fill_(1)
    tensor_from_jax(a).fill_(2)
    assert float(a.sum()) == 0


def test_fake_and_meta_tensors_have_shapes():
    f = from_jax(lambda x: (x @ x.T, jnp.argmax(x)))
    with FakeTensorMode():
        fake = f(torch.ones(2, 3))
    meta = f(torch.ones(2, 3, device="meta"))
    for product, place in (fake, meta):
        assert (product.shape, place.dtype) == ((2, 2), torch.int32)
    assert meta[0].is_meta


@pytest.mark.parametrize("read", [lambda x: borrow(x, "g"), array_from_torch])
def test_tensors_without_plain_memory_tracers_and_keys_are_refused(read):
    with FakeTensorMode():
        fake = torch.ones(2)
    for x, message in (
        (torch.eye(2).to_sparse(), "to_dense"),
        (fake, "no data"),
        (torch.ones(2, device="meta"), "no data"),
    ):
        with pytest.raises(LoweringError, match=message):
            read(x)
    with pytest.raises(LoweringError, match="functorch"):
        torch.vmap(lambda x: read(x) and x)(torch.ones(2))
    with pytest.raises(LoweringError, match="to_padded_tensor"):
        from_jax(jnp.sin)(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
    with pytest.raises(LoweringError, match="no values"):
        jax.jit(lambda x: tensor_from_jax(x) and x)(jnp.ones(2))
    with pytest.raises(LoweringError, match=r"can't be converted|no counterpart"):
        tensor_from_jax(jax.random.key(0))
    assert read(torch._efficientzerotensor((3,))).tolist() == [0, 0, 0]
    assert read(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_narrowing_is_refused_unless_it_fits():
    f = from_jax(lambda x: x + 1)
    fits, too_large = torch.tensor([2**31 - 2]), torch.tensor([2**31])
    assert (f(fits).tolist(), f(fits).dtype) == ([2**31 - 1], torch.int32)
    assert array_from_torch(fits).dtype == jnp.int32
    for call, words in ((f, ".*enable_x64=True"), (torch.vmap(f), ""), (array_from_torch, "")):
        with pytest.raises(LoweringError, match="do not fit int32" + words):
            call(too_large)
        for dtype in (torch.float64, torch.complex128):
            with pytest.raises(LoweringError, match="JAX_ENABLE_X64" + words):
                call(torch.ones(2, 2, dtype=dtype))
    wide = from_jax(lambda x: x + 1, enable_x64=True)
    assert wide(torch.tensor([2**40])).tolist() == [2**40 + 1]
    assert not jax.config.jax_enable_x64
    with jax.enable_x64(True):
        assert f(torch.tensor([2**40])).tolist() == [2**40 + 1]
        assert array_from_torch(too_large).dtype == jnp.int64
