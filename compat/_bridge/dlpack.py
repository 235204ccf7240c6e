"""Guarded conversion of arrays between torch and JAX.

Invariant: the result has exactly the values of the argument, and neither framework sees later
writes of the other. So conversions copy: a tensor that torch may still write to must not share
memory with an immutable JAX array. Lazily negated or conjugated tensors are resolved first
(otherwise the export would lose the sign silently), strided ones are made contiguous, and values
that JAX would narrow with 64-bit types off are refused (see ``dtypes.py``).

Arrays with dtypes that torch lacks are encoded: typed random keys as the integers that they consist
of, 4-bit integers as 8-bit integers, and one-byte floats without a torch dtype as their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from functx._core import LoweringError
from functx._torch.lowering import FakeTensor, is_functorch_wrapped, is_zero_tensor
from functx.compat._bridge.dtypes import check_fits, has_torch_dtype, to_jax_dtype, torch_dtype_of

# numpy does not have these types. Their bits are passed as integers of the same width.
_AS_BITS = {
    torch.bfloat16: (torch.int16, np.int16),
    torch.float8_e4m3fn: (torch.uint8, np.uint8),
    torch.float8_e5m2: (torch.uint8, np.uint8),
}

# XLA requires memory to start at a multiple of this many bytes.
ALIGNMENT = 64


def array_from_torch(x: Tensor, what: str = "a tensor", held: jax.Array | None = None) -> jax.Array:
    """Copy a torch tensor into a JAX array.

    Args:
        x: a dense tensor of any shape, dtype, device and strides.
        what: the name of the tensor in messages.
        held: an earlier array of the tensor, which is returned if it still has the same values.

    Returns:
        An array of the same shape and values. With x64 off, ``int64`` becomes ``int32``, if the
        values fit.

    Raises:
        LoweringError: for tensors without plain data (fake, meta, sparse, quantized, inside a
            functorch transform), and for values that JAX would narrow.
    """
    values = _values(x, what)
    check_fits(values, what)
    if held is not None and _same_bits(values.astype(to_jax_dtype(x.dtype), copy=False), held):
        return held
    # Also while a function is being traced by JAX, the result is an array, not a tracer.
    with jax.ensure_compile_time_eval():
        return jnp.array(values, dtype=to_jax_dtype(x.dtype), copy=True)


def _same_bits(values: np.ndarray[Any, Any], array: jax.Array) -> bool:
    if array.is_deleted() or (values.shape, values.dtype) != (array.shape, array.dtype):
        return False
    bits, held = (np.ravel(v).view(np.uint8) for v in (values, np.asarray(array)))
    return np.array_equal(bits, held)


def _values(x: Tensor, what: str) -> np.ndarray[Any, Any]:
    """The values of a tensor as a numpy array, which shares its memory if possible."""
    _has_plain_data(x, what)
    x = x.detach().resolve_conj().resolve_neg().contiguous().cpu()
    if x.dtype not in _AS_BITS:
        return x.numpy(force=True)
    return x.view(_AS_BITS[x.dtype][0]).numpy().view(to_jax_dtype(x.dtype))


def borrow(x: Tensor, what: str) -> jax.Array:
    """A JAX array with a tensor's values, which shares the tensor's memory if JAX can read it.

    The array is valid until torch writes to the tensor, so wait for JAX before that can happen.

    Args:
        x: a dense tensor; a strided, misaligned, lazily negated or conjugated one is copied.
        what: the name of the function that it is an argument of, for messages.

    Returns:
        An array of the same shape and values on the same device. With x64 off, ``int64`` becomes
        ``int32``, if the values fit.

    Raises:
        LoweringError: as :func:`array_from_torch`, or if JAX has no such device.
    """
    what = f"an argument of {what}"
    _has_plain_data(x, what)
    x = x.detach()
    if is_zero_tensor(x):
        x = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    x = x.resolve_conj().resolve_neg().contiguous()
    dtype = torch_dtype_of(to_jax_dtype(x.dtype))
    if dtype != x.dtype:
        try:
            check_fits(x.cpu().numpy(), what)
        except LoweringError as err:
            raise LoweringError(f"{err}; or use from_jax(..., enable_x64=True)") from None
        x = x.to(dtype)
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    try:
        return jax.dlpack.from_dlpack(x)
    except (RuntimeError, TypeError, BufferError) as err:
        raise LoweringError(
            f"{what} is a {x.dtype} tensor on {x.device}, which this JAX (backend"
            f" {jax.default_backend()!r}) can't read: {err}. Move it by .cpu(), or install JAX"
            " for that device (pip install 'functx[cuda]')"
        ) from err


def give(x: jax.Array, device: torch.device | None) -> Tensor:
    """A tensor that takes over the memory of a JAX array.

    Args:
        x: a concrete array with a dtype that torch has. No other array may share its memory, as is
            the case for results of `Program` (``_from_jax/programs.py``), which are copies.
        device: the device of the tensor; ``None`` for the device of the array, if torch supports
            it.
    """
    if x.size == 0:
        return torch.empty(x.shape, dtype=torch_dtype_of(x.dtype), device=device)
    platforms = [own.platform for own in x.devices()]
    if len(platforms) > 1 or (
        device is None and platforms != ["cpu"] and not torch.cuda.is_available()
    ):
        return tensor_from_jax(x, device)
    return torch.from_dlpack(x).to(device)


def tensor_from_jax(x: Any, device: torch.device | str | None = None) -> Tensor:
    """Copy a JAX array into a torch tensor.

    Args:
        x: a concrete JAX or numpy array.
        device: the device of the tensor; the CPU by default.

    Returns:
        A tensor of the same shape, dtype and values, with its own memory.

    Raises:
        LoweringError: for a traced array, which has no values yet, or a dtype that torch lacks.
    """
    if isinstance(x, jax.core.Tracer):
        raise LoweringError(
            "a traced JAX array has no values to convert. Convert it before the JAX transform, or"
            " lower the torch function with functx.compat.to_jax"
        )
    try:
        values = np.array(x, copy=True, order="C")
    except TypeError as err:
        raise LoweringError(f"an array can't be converted to a torch tensor: {err}") from err
    dtype = torch_dtype_of(values.dtype) if has_torch_dtype(values.dtype) else None
    if dtype in _AS_BITS:
        return torch.from_numpy(values.view(_AS_BITS[dtype][1])).view(dtype).to(device)
    try:
        return torch.from_numpy(values).to(device)
    except TypeError as err:
        raise LoweringError(f"torch does not have the dtype {values.dtype}") from err


def _has_plain_data(x: Tensor, what: str) -> None:
    problem = None
    if isinstance(x, FakeTensor) or x.is_meta:
        problem = "has a shape but no data"
    elif is_functorch_wrapped(x):
        problem = "belongs to a functorch transform that is still running"
    elif x.layout is not torch.strided:
        problem = f"has the layout {x.layout}; call .to_dense() first"
    elif type(x).__name__ == "DTensor":
        problem = (
            "is a DTensor, whose values are distributed over processes; convert the module before "
            "fully_shard or parallelize_module, or call .full_tensor() first"
        )
    elif x.is_quantized:
        problem = "is quantized; call .dequantize() first"
    if problem:
        raise LoweringError(f"{what} can't be converted to a JAX array: it {problem}")


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of typed random keys."""
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def encode(x: Any) -> Any:
    """Encode an array in a dtype that torch has."""
    if is_key(x):
        return jax.random.key_data(x)
    if has_torch_dtype(x.dtype):
        return x
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint8)
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def decoder(x: Any) -> Callable[[Any], Any] | None:
    """A function that decodes the encoding of ``x``; ``None`` if ``x`` is its own encoding."""
    if is_key(x):
        impl = jax.random.key_impl(x)
        return lambda data: jax.random.wrap_key_data(data, impl=impl)
    dtype = x.dtype
    if has_torch_dtype(dtype):
        return None
    if jnp.issubdtype(dtype, jnp.integer):
        return lambda data: data.astype(dtype)
    return lambda data: jax.lax.bitcast_convert_type(data, dtype)
