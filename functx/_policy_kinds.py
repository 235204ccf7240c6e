"""The policies there are: by operator, name and size."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functx._policies import Combined, Decision, OfOperation, Policy, Value
from functx._torch.compiler import OUTPUTS_KNOWN_TO_TORCH


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in names.split())


# Products of matrices and vectors: those of them that can't have a batch dimension, ...
_UNBATCHED_DOTS = _packets(
    "mm mv dot vdot addmm addmv addr linear _addmm_activation _scaled_mm _int_mm"
)
# ... those that have one, unless an operand is the same for all of it (by its place), ...
_BATCHED_DOTS = {torch.ops.aten.bmm: (0, 1), torch.ops.aten.baddbmm: (1, 2)}
# ... and everything that consists of products.
_DOTS = (
    _UNBATCHED_DOTS
    | frozenset(_BATCHED_DOTS)
    | _packets(
        "addbmm matmul einsum _trilinear _grouped_mm mkldnn_rnn_layer _cudnn_rnn "
        "convolution mkldnn_convolution cudnn_convolution "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable"
    )
)


def is_dot(func: Any) -> bool:
    """Whether an operator consists of matrix products."""
    return getattr(func, "overloadpacket", func) in _DOTS


@dataclass(frozen=True)
class Dots(OfOperation):
    """Results of matrix products (and convolutions, where batch dimensions are no matter)."""

    batch_dims: bool
    offload: tuple[str, str] | None = None

    def judge(self, value: Value) -> Decision | bool:
        """Whether it is one."""
        packet = getattr(value.func, "overloadpacket", value.func)
        dot = is_dot(packet) if self.batch_dims else _has_no_batch_dims(packet, value.args)
        return Decision.OFFLOAD if dot and self.offload else dot

    def __repr__(self) -> str:
        if self.offload:
            return f"offload_dot_with_no_batch_dims{self.offload!r}"
        return "dots_saveable" if self.batch_dims else "dots_with_no_batch_dims_saveable"


def _has_no_batch_dims(packet: Any, args: Sequence[Any]) -> bool:
    if packet in _UNBATCHED_DOTS:
        return True
    # An operand that was expanded along the batch is one matrix for all of it.
    return any(args[i].stride(0) == 0 for i in _BATCHED_DOTS.get(packet, ()))


@dataclass(frozen=True)
class Names(Policy):
    """Values by the names that `checkpoint_name` gave them.

    Attributes:
        rule: ``"only"`` these names, any name ``"but"`` these, or anything ``"except"`` these.
        names: the names.
        offload: those that go to host memory.
        places: where from and to, as JAX calls memories.
    """

    rule: str
    names: frozenset[str]
    offload: frozenset[str] = frozenset()
    places: tuple[str, str] = ("device", "pinned_host")

    reads_names = True
    known_to_torch = False

    @property
    def reads_operations(self) -> bool:  # type: ignore[override]
        """Only where values without a name can be kept."""
        return self.rule == "except"

    def decide(self, value: Value) -> Decision:
        """By the names it has."""
        if self.rule == "except":
            return Decision(int(not value.names & self.names))
        if self.rule == "but":
            return Decision(int(bool(value.names - self.names)))
        if value.names & self.names:
            return Decision.SAVE
        return Decision.OFFLOAD if value.names & self.offload else Decision.RECOMPUTE

    def __repr__(self) -> str:
        names = ", ".join(map(repr, sorted(self.names)))
        if self.offload:
            return (
                f"save_and_offload_only_these_names(names_which_can_be_saved=[{names}], "
                f"names_which_can_be_offloaded={sorted(self.offload)!r}, "
                f"offload_src={self.places[0]!r}, offload_dst={self.places[1]!r})"
            )
        function = {
            "only": "save_only_these_names",
            "but": "save_any_names_but_these",
            "except": "save_anything_except_these_names",
        }[self.rule]
        return f"{function}({names})"


@dataclass(frozen=True)
class OutputSize(OfOperation):
    """Results of at least, and less than, so many bytes (per example)."""

    at_least: float = 0
    less_than: float = math.inf

    known_to_torch = OUTPUTS_KNOWN_TO_TORCH

    def judge(self, value: Value) -> bool:
        """By the bytes of the results together."""
        return self.at_least <= bytes_of(value.out) < self.less_than

    def __repr__(self) -> str:
        if self.less_than == math.inf:
            return f"save_at_least({self.at_least})"
        return f"save_smaller_than({self.less_than})"


@dataclass(frozen=True)
class Offloaded(Combined):
    """What another policy keeps, in host memory."""

    policy: Policy

    def decide(self, value: Value) -> Decision:
        """In host memory, if at all."""
        return Decision.OFFLOAD if self.policy.decide(value) else Decision.RECOMPUTE

    def __repr__(self) -> str:
        return f"offload({self.policy!r})"


def bytes_of(out: Any) -> int:
    """Bytes of the tensors that an operation returned."""
    if isinstance(out, Tensor):
        return out.numel() * out.element_size()
    if isinstance(out, (list, tuple)):
        return sum(map(bytes_of, out))
    return 0


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of an operation: torch's formula where there is one, else one an element of result."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    if isinstance(out, Tensor):
        return out.numel()
    outs = out if isinstance(out, (list, tuple)) else ()
    return sum(t.numel() for t in outs if isinstance(t, Tensor))


def names(given: Collection[Any]) -> frozenset[str]:
    """Names, checked."""
    if isinstance(given, str):
        raise TypeError(
            f"checkpoint_policies: expected a collection of names, got the string {given!r}."
        )
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"checkpoint_policies: names are strings, got {name!r}.")
    return frozenset(given)


def places(source: str, destination: str) -> tuple[str, str]:
    """Where values go from and to, checked."""
    if (source, destination) not in (("device", "pinned_host"), ("device", "unpinned_host")):
        raise ValueError(
            f"checkpoint_policies: can't offload from {source!r} to {destination!r}; values go "
            "from 'device' to 'pinned_host'."
        )
    return source, destination
