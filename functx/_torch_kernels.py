"""What torch picks: flags of the process, whose public getters warn, raise or are slow.

A replay under other kernels gives other roundings, or operations that have no derivative: attention
that ran forward inside ``sdpa_kernel(MATH)`` has a second derivative, its replay outside has none.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from functx._torch_modules import GLOBAL_HOOKS

_C: Any = torch._C


def _deterministic(wanted: bool) -> None:
    warn_only = _C._get_deterministic_algorithms_warn_only()
    torch.use_deterministic_algorithms(wanted, warn_only=warn_only)


def _warning_only(wanted: bool) -> None:
    torch.use_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=wanted)


def _precision(backend: str, operation: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How float32 is computed with: what applies; it may be set for all, or for this alone."""
    read = functools.partial(_C._get_fp32_precision_getter, backend, operation)
    write = functools.partial(_C._set_fp32_precision_setter, backend, operation)

    def change(wanted: str) -> None:
        write("none")  # as is set for all
        if read() != wanted:
            write("ieee" if wanted == "none" else wanted)

    return read, change


def _overriding(wanted: bool) -> None:
    state = _C._TorchFunctionState
    _C._set_torch_function_state(state.ENABLED if wanted else state.SUBCLASSES_DISABLED)


def _unpacked(write: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda values: write(*values)


def _of_einsum(name: str) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """In which order ``einsum`` multiplies: as a context set it, and as an assignment did."""
    module: Any = torch.backends.opt_einsum  # what is assigned hides what contexts set

    def change(values: dict[str, Any], wanted: Any) -> None:
        if wanted is _UNSET:
            del values[name]
        else:
            values[name] = wanted

    return [
        (functools.partial(values.get, name, _UNSET), functools.partial(change, values))
        for values in (vars(module.m), vars(module))
    ]


_UNSET = object()
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    # Whether subclasses override functions: not in a backward pass that one of them started.
    (_C._is_torch_function_enabled, _overriding),
    (_C._get_deterministic_algorithms, _deterministic),
    (_C._get_deterministic_algorithms_warn_only, _warning_only),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    (_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    (_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
    (
        _C._get_cpu_allow_fp16_reduced_precision_reduction,
        _C._set_cpu_allow_fp16_reduced_precision_reduction,
    ),
    # Whether this thread takes denormal numbers for zero: no getter tells, but arithmetic does.
    (
        functools.partial(operator.lt, 0.0, 5e-324),
        lambda kept: torch.set_flush_denormal(not kept),
    ),
    *_of_einsum("enabled"),
    *_of_einsum("strategy"),
    *(_precision("mkldnn", operation) for operation in ("matmul", "conv", "rnn")),
)
if torch.backends.cuda.is_built():
    _FLAGS += (
        *(_precision("cuda", operation) for operation in ("matmul", "conv", "rnn")),
        (_C._get_blas_preferred_backend, _C._set_blas_preferred_backend),
        (_C._get_linalg_preferred_backend, _C._set_linalg_preferred_backend),
        (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
        *(
            (getattr(_C, f"_get_{name}"), _unpacked(getattr(_C, f"_set_{name}")))
            for name in (
                "cublas_allow_fp16_reduced_precision_reduction",
                "cublas_allow_bf16_reduced_precision_reduction",
            )
        ),
    )
_READ = [read for read, _ in _FLAGS]
_READ_ALL: list[Callable[[], Any]] = [
    *_READ,
    functools.partial(any, GLOBAL_HOOKS),
    functools.partial(torch.is_autocast_enabled, "cpu"),
    functools.partial(torch.get_autocast_dtype, "cpu"),
    torch.is_autocast_cache_enabled,
]
_call: Callable[[Callable[[], Any]], Any] = operator.call


def settings() -> list[Any]:
    """The default dtype, whether kernels must be deterministic, which are allowed: now."""
    return [*map(_call, _READ)]


def settings_and_casts() -> list[Any]:
    """`settings`, whether all modules have hooks, and last the three of `casts`, on CPU."""
    return [*map(_call, _READ_ALL)]


def casts(kind: str) -> tuple[bool, torch.dtype, bool]:
    """Whether autocast is on for a kind of device, to what, and whether casts are cached."""
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


class overriding:
    """Subclasses override functions in here, as nearly everywhere; batching rules turn it off."""

    def __enter__(self) -> None:
        self._before = _C._get_torch_function_state()
        _C._set_torch_function_state(_C._TorchFunctionState.ENABLED)

    def __exit__(self, *exc: object) -> None:
        _C._set_torch_function_state(self._before)


def put_back(wanted: list[Any]) -> None:
    """Put back what `settings` gave."""
    for (read, write), value in zip(_FLAGS, wanted):
        if read() != value:
            write(value)
