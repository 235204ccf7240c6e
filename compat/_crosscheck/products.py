"""Count the matrix products of a derivative, and how many of them are recomputed.

In torch they are counted as they run, separately in replays. In JAX they are counted in the
compiled program, where the names of operations contain the scopes in which they were traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from functx._core import operation_name
from functx._remat import on_replay
from functx._torch.lowering import HigherOrderOperator, TorchDispatchMode
from functx.compat._jax import RECOMPUTED

PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"),
    *("convolution", "_convolution", "mkldnn_convolution"),
}
# XLA turns a product without a sum (an outer product) into a multiplication named after the dot.
_PRODUCT_OF_XLA = re.compile(
    r"\b(?:dot|convolution)\("
    r"|custom_call_target=\"[^\"]*(?:matmul|gemm|conv)"
    r"|\bmultiply\(.*op_name=\"[^\"]*/dot_general\""
)


@dataclass(frozen=True)
class Products:
    """Matrix products and convolutions of one computation.

    Attributes:
        torch: how many torch ran.
        torch_recomputed: how many of these ran in replays of regions.
        jax: how many the compiled JAX program contains.
        jax_recomputed: how many of these are recomputations.
        replays: how often torch ran a region again.
    """

    torch: int
    torch_recomputed: int
    jax: int
    jax_recomputed: int
    replays: int


def products_of(operation: str, args: Sequence[Any]) -> int:
    """How many products an operation computes; kernels of attention compute several."""
    if operation.startswith("_scaled_dot_product"):
        return 5 if "backward" in operation else 2
    return sum(args[-1][:2]) if operation == "convolution_backward" else int(operation in PRODUCTS)


class _Counter(TorchDispatchMode):
    supports_higher_order_operators = True
    only_observes = True  # tells regions that a replay need not run under this mode

    def __init__(self) -> None:
        super().__init__()
        self.all = self.recomputed = self.replays = self._depth = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not isinstance(func, HigherOrderOperator):
            number = products_of(operation_name(func), args)
            self.all += number
            self.recomputed += number if self._depth else 0
        return func(*args, **(kwargs or {}))

    @contextmanager
    def replaying(self, name: str) -> Iterator[None]:
        self.replays += not self._depth
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def count(run_torch: Callable[[], Any], program: Any) -> Products:
    """Count the products of one computation: as torch runs it, and in the compiled JAX program."""
    counter = _Counter()
    with counter, on_replay(counter.replaying):
        run_torch()
    found = [line for line in program.as_text().splitlines() if _PRODUCT_OF_XLA.search(line)]
    again = sum(RECOMPUTED in line for line in found)
    return Products(counter.all, counter.recomputed, len(found), again, counter.replays)
