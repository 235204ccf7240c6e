"""What a region keeps beside its inputs: policies, as values that combine.

A policy answers for one value at a time: an operation's result, with the names that
`checkpoint_name` gave it. It says what *may* be kept; what the pullback does not read is dropped.

NOTE [names and operations]
A value is judged when its operation has run, and again when it is given a name. A policy of
operations remembers in the meantime what it said, so that ``dots_saveable &
~save_only_these_names("z")`` means what it says.
"""

from __future__ import annotations

import difflib
import enum
import functools
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from torch.utils.checkpoint import CheckpointPolicy

from functx import _torch
from functx._core import line_of, tree, where
from functx._policies import aten_ops
from functx._torch import compiler


class Decision(enum.IntEnum):
    """What happens to a value; true if it is kept."""

    RECOMPUTE = 0
    SAVE = 1
    OFFLOAD = 2


@dataclass
class Value:
    """One result of an operation of a region, as a policy sees it.

    Attributes:
        func: the ATen overload; ``None`` where it is not known.
        args, kwargs: its arguments, per example: under ``vmap`` they are on the meta device.
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
    """What a region may keep: a frozen, hashable value; combine with ``|``, ``&`` and ``~``."""

    # Whether names, or operations, make a difference.
    reads_names: bool = False
    reads_operations: bool = True
    # Whether torch's own checkpoint, in compiled code, can tell what this asks.
    known_to_torch: bool = True

    @abstractmethod
    def decide(self, value: Value) -> Decision:
        """What happens to a value."""

    def __or__(self, other: Any) -> Policy:
        return Combined("|", (self, as_policy(other)))

    def __and__(self, other: Any) -> Policy:
        return Combined("&", (self, as_policy(other)))

    def __invert__(self) -> Policy:
        return Combined("~", (self,))


@dataclass(frozen=True)
class Combined(Policy):
    """A policy made of others, by a rule.

    ``"|"`` keeps as the first part says that keeps; ``"&"`` what all keep, offloaded if one says
    so; ``"~"`` what the part does not; ``"offload"`` in host memory what it does.
    """

    rule: Literal["|", "&", "~", "offload"]
    parts: tuple[Policy, ...]

    def __post_init__(self) -> None:
        traits = {"reads_names": any, "reads_operations": any, "known_to_torch": all}
        for trait, rule in traits.items():
            vars(self)[trait] = rule(getattr(part, trait) for part in self.parts)
        vars(self)["reads_operations"] |= self.rule == "~"  # what it keeps may have no name

    def decide(self, value: Value) -> Decision:
        """All are asked, always: an answer about an operation can't be had later."""
        said = [part.decide(value) for part in self.parts]
        if self.rule == "|":
            return said[0] or said[1]
        if self.rule == "&":
            return max(said) if all(said) else Decision.RECOMPUTE
        if self.rule == "~":
            return Decision(not said[0])
        return Decision.OFFLOAD if said[0] else Decision.RECOMPUTE

    def __repr__(self) -> str:
        looser = {"&": "|", "~": "|&"}.get(self.rule, "")
        texts = [f"({p!r})" if getattr(p, "rule", "-") in looser else repr(p) for p in self.parts]
        if self.rule in "|&":
            return f" {self.rule} ".join(texts)
        return f"~{texts[0]}" if self.rule == "~" else f"offload({texts[0]})"


@dataclass(frozen=True)
class Everything(Policy):
    """Every value, or none."""

    saved: bool

    def decide(self, value: Value) -> Decision:
        """Always the same."""
        return Decision(self.saved)

    def __repr__(self) -> str:
        return "everything_saveable" if self.saved else "nothing_saveable"


@dataclass(frozen=True)
class Names(Policy):
    """Values with one of these names, or with any of the ``others``."""

    names: frozenset[str]
    others: bool = False

    reads_names = True
    reads_operations = False
    known_to_torch = False

    def decide(self, value: Value) -> Decision:
        """By the names it has."""
        found = value.names - self.names if self.others else value.names & self.names
        return Decision(bool(found))

    def __repr__(self) -> str:
        function = "save_any_names_but_these" if self.others else "save_only_these_names"
        return f"{function}({', '.join(map(repr, sorted(self.names)))})"


@dataclass(frozen=True)
class OfOperation(Policy):
    """What ``function(value, option)`` says of an operation.

    It is asked once, when the operation has run. ``NOTE [names and operations]``.
    """

    name: str
    function: Callable[[Value, Any], Decision | bool]
    option: Any = None
    known_to_torch: bool = True

    def decide(self, value: Value) -> Decision:
        """Ask, or remember what was said."""
        if id(self) not in value.memo and value.func is not None:
            value.memo[id(self)] = Decision(self.function(value, self.option))
        return value.memo.get(id(self), Decision.RECOMPUTE)

    def __repr__(self) -> str:
        return self.name


def _names_in(policy: Policy) -> tuple[frozenset[str], frozenset[str]]:
    """All names that a policy lists, and those of them by which it keeps a value."""
    if isinstance(policy, Names):
        return policy.names, frozenset() if policy.others else policy.names
    if not isinstance(policy, Combined):
        return frozenset(), frozenset()
    parts = [_names_in(part) for part in policy.parts]
    listed = frozenset[str]().union(*(part[0] for part in parts))
    wanted = frozenset[str]().union(*(part[1] for part in parts))
    return listed, frozenset() if policy.rule == "~" else wanted


_warned: set[tuple[Policy, frozenset[str]]] = set()  # policies, and the names that they do not list


def warn_of_unlisted_names(policy: Policy, names: frozenset[str], title: str) -> None:
    """Warn once if a region's values have ``names``, and its policy lists none of these.

    The policy may list some name of another region, but it is more likely that one is misspelled,
    and then the region silently recomputes what it was meant to keep.
    """
    listed, wanted = _names_in(policy)
    if not wanted or listed & names or (policy, names) in _warned:
        return
    _warned.add((policy, names))
    given = ", ".join(map(repr, sorted(names)))
    near = [n for name in sorted(wanted) for n in difflib.get_close_matches(name, names, 1)]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    file, line, _ = line_of(where())
    warnings.warn_explicit(
        f"remat: in {title}, checkpoint_name gives the names {given}. None of them is in the "
        f"policy {policy!r}, which therefore keeps no value by its name.{hint}",
        RuntimeWarning,
        file,
        line,
    )


def is_dot(value: Value, batch_dims: bool) -> bool:
    """Whether an operation consists of matrix products, perhaps with batch dimensions."""
    return aten_ops.is_dot(value.func, None if batch_dims else value.args)


def is_of_size(value: Value, bounds: tuple[float, float]) -> bool:
    """Whether the results have at least, and less than, so many bytes together."""
    nbytes = sum(t.numel() * t.element_size() for t in tree.partition(value.out)[0])
    return bounds[0] <= nbytes < bounds[1]


def _is_listed(value: Value, names: frozenset[str]) -> bool:
    return not names.isdisjoint((str(value.func), str(getattr(value.func, "overloadpacket", ""))))


def _said(value: Value, policy: Callable[..., Any]) -> Decision | bool:
    """What a policy function says, as torch's selective checkpoint asks it."""
    context = SimpleNamespace(is_recompute=False, op_output=value.out)
    said = policy(context, value.func, *value.args, **value.kwargs)
    if isinstance(said, CheckpointPolicy):
        return Decision.OFFLOAD if "OFFLOAD" in said.name else "SAVE" in said.name
    if isinstance(said, bool):
        return said
    raise TypeError(f"it returned {said!r}; expected a bool or a CheckpointPolicy of torch's")


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
    names = frozenset(map(str, operators))
    return OfOperation(f"save_these_operators({', '.join(sorted(names))})", _is_listed, names)


def as_policy(policy: Any) -> Policy:
    """What users may give for a policy, as one.

    Raises:
        TypeError: it is nothing known.
    """
    if policy is None or isinstance(policy, Policy):
        return policy or Everything(False)
    if isinstance(policy, (list, tuple, set, frozenset)):
        return save_these_operators(*policy)
    module = str(getattr(policy, "__module__", ""))
    if module == "functx.checkpoint_policies":
        name = policy.__name__
        raise TypeError(f"remat: policy={name} makes a policy: call it, policy={name}(...).")
    if module.split(".")[0] == "jax":
        said = f"remat: {policy!r} is a policy of jax.checkpoint. Take the one of the same name"
        raise TypeError(f"{said} from functx.checkpoint_policies.")
    if callable(policy) and not isinstance(policy, type):
        name = getattr(policy, "__qualname__", None) or repr(policy)
        return OfOperation(name, _said, policy)
    names = sys.modules["functx.checkpoint_policies"].__all__
    near = difflib.get_close_matches(str(policy), names, 1)
    hint = f" Did you mean functx.checkpoint_policies.{near[0]}?" if near else ""
    said = f"remat: unknown policy {policy!r}.{hint} Expected one of functx.checkpoint_policies, a"
    raise TypeError(f"{said} list of ATen operators, or a function p(ctx, op, *args, **kwargs).")


def as_contexts(policy: Policy | None) -> Any:
    """A ``context_fn`` that gives a policy to torch's checkpoint, in code that is compiled.

    ``None`` if it asks for what that does not know: names, before torch 2.13 outputs of operations.
    """
    if policy is None or not policy.known_to_torch:
        return compiler.same_numbers if policy is None else None
    return functools.partial(compiler.same_numbers, functools.partial(_say, policy))


def _say(policy: Policy, context: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy as a function that torch's checkpoint asks."""
    said = policy.decide(Value(op, args, kwargs, getattr(context, "op_output", None)))
    names = {Decision.OFFLOAD: "MUST_CPU_OFFLOAD", Decision.SAVE: "MUST_SAVE"}
    return CheckpointPolicy[names.get(said, "PREFER_RECOMPUTE")]
