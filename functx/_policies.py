"""What a region keeps beside its inputs: policies, as values that combine.

A policy answers for one value at a time: an operation's result, with the names that
`checkpoint_name` gave it. It says what *may* be kept; what the pullback does not read is dropped.

NOTE [names and operations]
A value is judged when its operation has run, and again when it is given a name. What the policies
inside said about the operation is remembered in the meantime, so that ``dots_saveable &
~save_only_these_names("z")`` means what it says.
"""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from functx import _torch
from functx._torch import compiler


class Decision(enum.Enum):
    """What happens to a value."""

    RECOMPUTE = 0
    SAVE = 1
    OFFLOAD = 2

    def __bool__(self) -> bool:
        return self is not Decision.RECOMPUTE


@dataclass
class Value:
    """One result of an operation of a region, as a policy sees it.

    Attributes:
        func: the ATen overload; ``None`` where it is not known.
        args: its arguments, per example: under ``vmap`` they are on the meta device.
        kwargs: likewise.
        out: what it returned, likewise.
        names: what `checkpoint_name` called the value.
        memo: what parts of a policy said of the operation. ``NOTE [names and operations]``.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    names: frozenset[str] = frozenset()
    memo: dict[int, Decision] = field(default_factory=dict)

    def forget(self) -> None:
        """Let go of all tensors: only names can come now."""
        self.args, self.kwargs, self.out = (), {}, None


class Policy(ABC):
    """What a region may keep: a frozen, hashable value; combine with ``|``, ``&`` and ``~``.

    Example:
        >>> from functx import checkpoint_policies as cp
        >>> cp.dots_saveable | cp.save_only_these_names("z")
        dots_saveable | save_only_these_names('z')
        >>> cp.dots_saveable & cp.save_smaller_than(1 << 20) == cp.dots_saveable
        False
    """

    # Whether names, or operations, make a difference to it.
    reads_names = False
    reads_operations = True
    # Whether torch's own checkpoint, in compiled code, can tell it what it asks for.
    known_to_torch = True

    @abstractmethod
    def decide(self, value: Value) -> Decision:
        """What happens to a value."""

    def __or__(self, other: Any) -> Policy:
        return Either(self, as_policy(other))

    def __ror__(self, other: Any) -> Policy:
        return Either(as_policy(other), self)

    def __and__(self, other: Any) -> Policy:
        return Both(self, as_policy(other))

    def __rand__(self, other: Any) -> Policy:
        return Both(as_policy(other), self)

    def __invert__(self) -> Policy:
        return Not(self)


class OfOperation(Policy):
    """A policy that looks at the operation."""

    def decide(self, value: Value) -> Decision:
        """The operation is judged once, when it has run. ``NOTE [names and operations]``."""
        found = value.memo.get(id(self))
        if found is None:
            if value.func is None:
                return Decision.RECOMPUTE
            found = value.memo[id(self)] = _decision(self.judge(value))
        return found

    @abstractmethod
    def judge(self, value: Value) -> Decision | bool:
        """What happens to a result of this operation."""


def _decision(said: Decision | bool) -> Decision:
    return said if isinstance(said, Decision) else Decision(int(said))


class Combined(Policy):
    """A policy made of others, whose answers about an operation are remembered by each."""

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The others."""
        return tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]

    @property
    def reads_names(self) -> bool:  # type: ignore[override]
        """Whether any of them does."""
        return any(p.reads_names for p in self.parts)

    @property
    def reads_operations(self) -> bool:  # type: ignore[override]
        """Whether any of them does."""
        return any(p.reads_operations for p in self.parts)

    @property
    def known_to_torch(self) -> bool:  # type: ignore[override]
        """Whether all of them are."""
        return all(p.known_to_torch for p in self.parts)


@dataclass(frozen=True)
class Either(Combined):
    """Kept if either policy keeps it; offloaded if the first one that keeps it says so."""

    first: Policy
    second: Policy

    def decide(self, value: Value) -> Decision:
        """Both are asked, always: an answer about an operation can't be had later."""
        first, second = self.first.decide(value), self.second.decide(value)
        return first or second

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


@dataclass(frozen=True)
class Both(Combined):
    """Kept if both policies keep it; offloaded if either says so."""

    first: Policy
    second: Policy

    def decide(self, value: Value) -> Decision:
        """Both are asked, always: an answer about an operation can't be had later."""
        first, second = self.first.decide(value), self.second.decide(value)
        if not (first and second):
            return Decision.RECOMPUTE
        return Decision.OFFLOAD if Decision.OFFLOAD in (first, second) else Decision.SAVE

    def __repr__(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, Either) else repr(p) for p in self.parts)


@dataclass(frozen=True)
class Not(Combined):
    """Keeps what the policy does not."""

    policy: Policy

    reads_operations = True  # what it keeps has no name, perhaps

    def decide(self, value: Value) -> Decision:
        """The other way round."""
        return Decision.RECOMPUTE if self.policy.decide(value) else Decision.SAVE

    def __repr__(self) -> str:
        inner = repr(self.policy)
        return f"~({inner})" if isinstance(self.policy, (Either, Both)) else f"~{inner}"


@dataclass(frozen=True)
class Everything(Policy):
    """Every value, or none."""

    saved: bool

    @property
    def reads_operations(self) -> bool:  # type: ignore[override]
        """Keeping nothing takes no look."""
        return self.saved

    def decide(self, value: Value) -> Decision:
        """Always the same."""
        return Decision(int(self.saved))

    def __repr__(self) -> str:
        return "everything_saveable" if self.saved else "nothing_saveable"


@dataclass(frozen=True)
class Operators(OfOperation):
    """Results of some ATen operators: overloads, or packets for all of theirs."""

    operators: frozenset[Any]

    def judge(self, value: Value) -> bool:
        """Whether it is one of them."""
        packet = getattr(value.func, "overloadpacket", None)
        return value.func in self.operators or packet in self.operators

    def __repr__(self) -> str:
        return f"save_these_operators({', '.join(sorted(map(str, self.operators)))})"

    def __reduce__(self) -> Any:
        return _operators_named, (tuple(sorted(map(str, self.operators))),)


def _operators_named(names: tuple[str, ...]) -> Operators:
    """For pickles: overloads and packets are found by name, as ``"aten.mm.default"``."""
    return Operators(frozenset(functools.reduce(getattr, n.split("."), torch.ops) for n in names))


def save_these_operators(*operators: Any) -> Policy:
    """Results of these ATen operators: overloads (``torch.ops.aten.mm.default``) or packets.

    Raises:
        TypeError: something is no operator.
    """
    for op in operators:
        if not isinstance(op, (_torch.OpOverload, _torch.OpOverloadPacket)):
            raise TypeError(
                f"remat: a policy lists {op!r}, which is no ATen operator. Expected overloads such "
                "as torch.ops.aten.mm.default, or packets such as torch.ops.aten.mm."
            )
    return Operators(frozenset(operators))


@dataclass(frozen=True)
class Context:
    """What a policy function gets first, as from ``torch.utils.checkpoint``.

    Attributes:
        is_recompute: always ``False``: a decision is made once, in the forward.
        op_output: what the operator returned.
    """

    is_recompute: bool = False
    op_output: Any = None


@dataclass(frozen=True)
class Asked(OfOperation):
    """What ``policy(ctx, op, *args, **kwargs)`` says: a bool, or torch's ``CheckpointPolicy``."""

    function: Callable[..., Any]

    def judge(self, value: Value) -> Decision | bool:
        """Ask it."""
        context = Context(op_output=value.out)
        said = self.function(context, value.func, *value.args, **value.kwargs)
        if isinstance(said, (bool, Decision)):
            return said
        if isinstance(said, CheckpointPolicy):
            if said.name.endswith("_OFFLOAD"):
                return Decision.OFFLOAD
            return said.name.endswith("_SAVE")
        raise TypeError(
            f"it returned {said!r}; expected a bool or a torch.utils.checkpoint.CheckpointPolicy"
        )

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", None) or repr(self.function)


def as_policy(policy: Any) -> Policy:
    """What users may give for a policy, as one.

    Raises:
        TypeError: it is nothing known.
    """
    if policy is None:
        return Everything(False)
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, (list, tuple, set, frozenset)):
        return save_these_operators(*policy)
    if str(getattr(policy, "__module__", "")).split(".")[0] == "jax":
        raise TypeError(
            f"remat: {policy!r} is a policy of jax.checkpoint. Take the one of the same name from "
            "functx.checkpoint_policies."
        )
    if callable(policy) and not isinstance(policy, type):
        return Asked(policy)
    raise TypeError(
        f"remat: unknown policy {policy!r}. Expected None, one of functx.checkpoint_policies, a "
        "list of ATen operators, or a function policy(ctx, op, *args, **kwargs)."
    )


def as_contexts(policy: Policy | None) -> Any:
    """What gives a policy to torch's checkpoint in code that is compiled.

    Returns:
        A ``context_fn``; ``None`` for policies that ask for what torch's checkpoint does not know:
        names, and before torch 2.13 the outputs of operations.
    """
    if policy is None:
        return compiler.same_numbers
    if not policy.known_to_torch:
        return None
    return functools.partial(compiler.same_numbers, functools.partial(_say, policy))


def _say(policy: Policy, context: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy as a function that torch's checkpoint asks."""
    said = policy.decide(Value(op, args, kwargs, getattr(context, "op_output", None)))
    if said is Decision.OFFLOAD:
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    return CheckpointPolicy.MUST_SAVE if said else CheckpointPolicy.PREFER_RECOMPUTE
