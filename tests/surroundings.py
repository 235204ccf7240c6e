"""Settings of the process: ``AROUND``, by what is set, how to set it and how it is read."""

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def put_back(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def deterministic(mode):
    return put_back(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, mode
    )


def default_dtype(dtype):
    return put_back(torch.get_default_dtype, torch.set_default_dtype, dtype)


def denormals_are_kept():
    return 0.0 < 5e-324


def flushed():
    return put_back(denormals_are_kept, lambda kept: torch.set_flush_denormal(not kept), False)


def by_name(name, value):
    """A setting of torch's that changes what kernels compute, and how it is read."""
    get, put = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")
    return lambda: put_back(get, put, value), get


def precision(backend):
    """That of products of float32, as set for the whole or for a backend."""

    def around():
        if backend is None:
            return put_back(
                torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
            )
        which = getattr(torch.backends, backend)
        which = which if backend == "mkldnn" else torch.backends
        return put_back(
            lambda: which.fp32_precision,
            lambda value: setattr(which, "fp32_precision", value),
            "bf16" if backend == "mkldnn" else "tf32",
        )

    def read():
        ways = [torch._C._get_fp32_precision_getter("mkldnn", w) for w in ("matmul", "conv", "rnn")]
        return ["ieee" if way == "none" else way for way in ways]

    return around, read


AROUND = {
    "denormal numbers": (flushed, denormals_are_kept),
    "precision of products": precision(None),
    "precision of oneDNN": precision("mkldnn"),
    "deterministic oneDNN": by_name("mkldnn_deterministic", True),
    "no NNPACK": by_name("nnpack_enabled", False),
    "sums of attention": by_name("math_sdp_allow_fp16_bf16_reduction", True),
    "default dtype": (lambda: default_dtype(torch.float64), torch.get_default_dtype),
    "deterministic": (lambda: deterministic(True), torch.are_deterministic_algorithms_enabled),
    "device": (lambda: torch.device("meta"), torch.get_default_device),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "autocast in half": (
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "autocast without cache": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
        torch.is_autocast_cache_enabled,
    ),
    "autocast off": (
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "attention's kernels": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True),
        lambda: (torch.backends.cuda.flash_sdp_enabled(), torch._C._get_sdp_priority_order()),
    ),
    "no fast path": (
        lambda: put_back(
            torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
        ),
        torch.backends.mha.get_fastpath_enabled,
    ),
    "no oneDNN": (
        lambda: put_back(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
        torch._C._get_mkldnn_enabled,
    ),
    "cuDNN": (
        lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True),
        lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    ),
}
