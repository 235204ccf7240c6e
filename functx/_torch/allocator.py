"""Private torch API of the profiler: what the allocator of the CPU hands out.

No public name tells its requests in their order. This recorder is that of torch's first profiler:
it starts no tracing library, and keeps nothing but numbers.
"""

from __future__ import annotations

from typing import Any

import torch

_A: Any = torch._C._autograd
_P: Any = torch._C._profiler


def begin() -> None:
    """Record what this thread asks of the allocator."""
    settings = _P.ProfilerConfig(
        _P.ProfilerState.CPU, False, True, False, False, False, _P._ExperimentalConfig()
    )
    _A._enable_profiler_legacy(settings)


def end() -> list[int]:
    """Bytes that were handed out since (given back, if negative), in their order."""
    events = [event for thread in _A._disable_profiler_legacy() for event in thread]
    return [e.cpu_memory_usage() for e in events if e.kind() == "memory_alloc"]
