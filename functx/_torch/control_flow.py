"""Private API of torch's control-flow operators."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _module(name: str) -> Any:
    """Import a module by name, since the package has functions of the same names."""
    return importlib.import_module(f"torch._higher_order_ops.{name}")


pytree: Any = importlib.import_module("torch.utils._pytree")  # these operators flatten with it
_associative_scan, _flex_attention = _module("associative_scan"), _module("flex_attention")
cond_op: Any = _module("cond").cond_op
while_loop_op: Any = _module("while_loop").while_loop_op
map_op: Any = _module("map").map_impl
scan_op: Any = _module("scan").scan_op
associative_scan_op: Any = _associative_scan.associative_scan_op
flex_attention_op: Any = _flex_attention.flex_attention

# Implementations of two of these operators in plain torch operations.
generic_associative_scan: Callable[..., Any] = _associative_scan.generic_associative_scan
flex_attention: Callable[..., Any] = _flex_attention.sdpa_dense


@contextmanager
def compiler_off() -> Iterator[None]:
    """A context in which functions that ``torch.compile`` has compiled run in eager."""
    with torch.compiler.set_stance("force_eager"):
        yield
