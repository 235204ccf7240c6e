"""How many matrix products a derivative takes, and how many of them are recomputed.

In torch they are counted as they run, those of replays apart.  In JAX they are counted in the
compiled program, whose operations are named after the scopes that they were traced in.
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
# A product of which nothing is summed (an outer one) is a multiplication that was a dot.
_PRODUCT_OF_XLA = re.compile(
    r"\b(?:dot|convolution)\("
    r"|custom_call_target=\"[^\"]*(?:matmul|gemm|conv)"
    r"|\bmultiply\(.*op_name=\"[^\"]*/dot_general\""
)


@dataclass(frozen=True)
class Products:
    """Matrix products and convolutions of one computation.

    Attributes:
        torch: that torch ran.
        torch_recomputed: of those, in replays of regions.
        jax: in the compiled JAX program.
        jax_recomputed: of those, in recomputations.
        replays: how often torch ran a region again.
    """

    torch: int
    torch_recomputed: int
    jax: int
    jax_recomputed: int
    replays: int


def products_of(operation: str, args: Sequence[Any]) -> int:
    """How many an operation computes; kernels of attention hold several."""
    if operation.startswith("_scaled_dot_product"):
        return 5 if "backward" in operation else 2
    return sum(args[-1][:2]) if operation == "convolution_backward" else int(operation in PRODUCTS)


class _Counter(TorchDispatchMode):
    supports_higher_order_operators = True
    only_observes = True  # a replay need not run under it

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
