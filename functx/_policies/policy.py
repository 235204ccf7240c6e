"""Policies: which values a region saves in addition to its inputs. Policies can be combined.

A policy decides about one value at a time: the result of an operation, with the names that
`checkpoint_name` gave to it. It decides what *may* be saved; a value that the pullback does not
read is dropped in any case.

NOTE [names and operations]
A region asks its policy when an operation has run, and again whenever the result is given a name.
At the second time the operation's arguments are gone. So a policy that decides by operation stores
its first answer in ``Value.memo``, and ``dots_saveable & ~save_only_these_names("z")`` can combine
that answer with the name.
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
    """What happens to a value; true if it is saved, on its device or in host memory."""

    RECOMPUTE = 0
    SAVE = 1
    OFFLOAD = 2


@dataclass
class Value:
    """The result of an operation in a region, as a policy sees it.

    Attributes:
        func: the ATen overload; ``None`` if it is not known.
        args: its positional arguments for one example. Under ``vmap`` they are meta tensors.
        kwargs: its keyword arguments, in the same form.
        out: its result, in the same form.
        names: the names that `checkpoint_name` gave to the value.
        memo: what the parts of a policy decided about the operation, by the part's id.
            ``NOTE [names and operations]``.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    names: frozenset[str] = frozenset()
    memo: dict[int, Decision] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop all tensors. After this only names may change, so no policy reads the tensors."""
        self.args, self.kwargs, self.out = (), {}, None


class Policy(ABC):
    """A frozen, hashable rule for what a region may save; combine with ``|``, ``&`` and ``~``."""

    # Whether the decision depends on names, and on operations.
    reads_names: bool = False
    reads_operations: bool = True
    # Whether torch's checkpoint, which is used in compiled code, can pass on all that this reads.
    known_to_torch: bool = True

    @abstractmethod
    def decide(self, value: Value) -> Decision:
        """Decide what happens to a value."""

    def __or__(self, other: Any) -> Policy:
        return Combined("|", (self, as_policy(other)))

    def __and__(self, other: Any) -> Policy:
        return Combined("&", (self, as_policy(other)))

    def __invert__(self) -> Policy:
        return Combined("~", (self,))


@dataclass(frozen=True)
class Combined(Policy):
    """A policy that combines others by a rule.

    - ``"|"`` saves what either part saves, as the first part that saves it says.
    - ``"&"`` saves what both parts save, in host memory if one of them says so.
    - ``"~"`` saves what its part does not save.
    - ``"offload"`` saves in host memory what its part saves.
    """

    rule: Literal["|", "&", "~", "offload"]
    parts: tuple[Policy, ...]

    def __post_init__(self) -> None:
        traits = {"reads_names": any, "reads_operations": any, "known_to_torch": all}
        for trait, rule in traits.items():
            vars(self)[trait] = rule(getattr(part, trait) for part in self.parts)
        vars(self)["reads_operations"] |= self.rule == "~"  # it may save values without a name

    def decide(self, value: Value) -> Decision:
        """Combine the decisions of the parts.

        Every part is asked every time, since it can't decide about an operation later.
        """
        decisions = [part.decide(value) for part in self.parts]
        if self.rule == "|":
            return decisions[0] or decisions[1]
        if self.rule == "&":
            return max(decisions) if all(decisions) else Decision.RECOMPUTE
        if self.rule == "~":
            return Decision(not decisions[0])
        return Decision.OFFLOAD if decisions[0] else Decision.RECOMPUTE

    def __repr__(self) -> str:
        looser = {"&": "|", "~": "|&"}.get(self.rule, "")
        texts = [f"({p!r})" if getattr(p, "rule", "-") in looser else repr(p) for p in self.parts]
        if self.rule in "|&":
            return f" {self.rule} ".join(texts)
        return f"~{texts[0]}" if self.rule == "~" else f"offload({texts[0]})"


@dataclass(frozen=True)
class Everything(Policy):
    """Saves every value, or no value."""

    saved: bool

    def decide(self, value: Value) -> Decision:
        """The same decision for every value."""
        return Decision(self.saved)

    def __repr__(self) -> str:
        return "everything_saveable" if self.saved else "nothing_saveable"


@dataclass(frozen=True)
class Names(Policy):
    """Saves values with one of these names; with ``others``, values with any other name."""

    names: frozenset[str]
    others: bool = False

    reads_names = True
    reads_operations = False
    known_to_torch = False

    def decide(self, value: Value) -> Decision:
        """Decide by the names of the value."""
        found = value.names - self.names if self.others else value.names & self.names
        return Decision(bool(found))

    def __repr__(self) -> str:
        function = "save_any_names_but_these" if self.others else "save_only_these_names"
        return f"{function}({', '.join(map(repr, sorted(self.names)))})"


@dataclass(frozen=True)
class OfOperation(Policy):
    """Decides by ``function(value, option)``, which looks at the operation.

    The function is called once, when the operation has run. ``NOTE [names and operations]``.
    """

    name: str
    function: Callable[[Value, Any], Decision | bool]
    option: Any = None
    known_to_torch: bool = True

    def decide(self, value: Value) -> Decision:
        """Call the function, or return its earlier decision."""
        if id(self) not in value.memo and value.func is not None:
            value.memo[id(self)] = Decision(self.function(value, self.option))
        return value.memo.get(id(self), Decision.RECOMPUTE)

    def __repr__(self) -> str:
        return self.name


def _names_in(policy: Policy) -> tuple[frozenset[str], frozenset[str]]:
    """All names that a policy lists, and those among them by which it saves a value."""
    if isinstance(policy, Names):
        return policy.names, frozenset() if policy.others else policy.names
    if not isinstance(policy, Combined):
        return frozenset(), frozenset()
    parts = [_names_in(part) for part in policy.parts]
    listed = frozenset[str]().union(*(part[0] for part in parts))
    wanted = frozenset[str]().union(*(part[1] for part in parts))
    return listed, frozenset() if policy.rule == "~" else wanted


_warned: set[tuple[Policy, frozenset[str]]] = set()  # a policy, and names that it does not list


def warn_of_unlisted_names(policy: Policy, names: frozenset[str], title: str) -> None:
    """Warn once if values of a region have ``names``, and its policy lists none of these names.

    The policy may list a name of another region. But more likely a name is misspelled, and the
    region recomputes values that it was meant to save.
    """
    listed, wanted = _names_in(policy)
    if not wanted or listed & names or (policy, names) in _warned:
        return
    _warned.add((policy, names))
    found = ", ".join(map(repr, sorted(names)))
    near = [n for name in sorted(wanted) for n in difflib.get_close_matches(name, names, 1)]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    file, line, _ = line_of(where())
    warnings.warn_explicit(
        f"remat: in {title}, checkpoint_name gives the names {found}. None of them is in the "
        f"policy {policy!r}, which therefore saves no value by its name.{hint}",
        RuntimeWarning,
        file,
        line,
    )


def is_dot(value: Value, batch_dims: bool) -> bool:
    """Whether an operation consists of matrix products, perhaps with batch dimensions."""
    return aten_ops.is_dot(value.func, None if batch_dims else value.args)


def is_of_size(value: Value, bounds: tuple[float, float]) -> bool:
    """Whether the bytes of the results are at least the first bound, and less than the second."""
    nbytes = sum(t.numel() * t.element_size() for t in tree.partition(value.out)[0])
    return bounds[0] <= nbytes < bounds[1]


def _is_listed(value: Value, names: frozenset[str]) -> bool:
    return not names.isdisjoint((str(value.func), str(getattr(value.func, "overloadpacket", ""))))


def _by_function(value: Value, policy: Callable[..., Any]) -> Decision | bool:
    """Call a policy function of the user, as torch's selective checkpoint calls it."""
    context = SimpleNamespace(is_recompute=False, op_output=value.out)
    answer = policy(context, value.func, *value.args, **value.kwargs)
    if isinstance(answer, CheckpointPolicy):
        return Decision.OFFLOAD if "OFFLOAD" in answer.name else "SAVE" in answer.name
    if isinstance(answer, bool):
        return answer
    raise TypeError(
        f"it returned {answer!r}; expected a bool or a torch.utils.checkpoint.CheckpointPolicy"
    )


def save_these_operators(*operators: Any) -> Policy:
    """Save the results of these ATen operators.

    Args:
        *operators: overloads (``torch.ops.aten.mm.default``) or packets (``torch.ops.aten.mm``).

    Raises:
        TypeError: an argument is not an ATen operator.
    """
    for op in operators:
        if not isinstance(op, (_torch.OpOverload, _torch.OpOverloadPacket)):
            raise TypeError(
                f"remat: a policy lists {op!r}, which is not an ATen operator. Expected overloads "
                "such as torch.ops.aten.mm.default, or packets such as torch.ops.aten.mm."
            )
    names = frozenset(map(str, operators))
    return OfOperation(f"save_these_operators({', '.join(sorted(names))})", _is_listed, names)


def as_policy(policy: Any) -> Policy:
    """Convert a value that users may pass for ``policy=`` to a `Policy`.

    Raises:
        TypeError: it can't be converted.
    """
    if policy is None or isinstance(policy, Policy):
        return policy or Everything(False)
    if isinstance(policy, (list, tuple, set, frozenset)):
        return save_these_operators(*policy)
    module = str(getattr(policy, "__module__", ""))
    if module == "functx.checkpoint_policies":
        name = policy.__name__
        raise TypeError(
            f"remat: {name} is a function that returns a policy. Call it: policy={name}(...)."
        )
    if module.split(".")[0] == "jax":
        raise TypeError(
            f"remat: {policy!r} is a policy of jax.checkpoint. Use the one of the same name from "
            "functx.checkpoint_policies."
        )
    if callable(policy) and not isinstance(policy, type):
        name = getattr(policy, "__qualname__", None) or repr(policy)
        return OfOperation(name, _by_function, policy)
    names = sys.modules["functx.checkpoint_policies"].__all__
    near = difflib.get_close_matches(str(policy), names, 1)
    hint = f" Did you mean functx.checkpoint_policies.{near[0]}?" if near else ""
    raise TypeError(
        f"remat: unknown policy {policy!r}.{hint} Expected one of functx.checkpoint_policies, a "
        "list of ATen operators, or a function p(ctx, op, *args, **kwargs)."
    )


def as_contexts(policy: Policy | None) -> Any:
    """A ``context_fn`` that passes a policy to torch's checkpoint, for compiled code.

    ``None`` if the policy reads something that torch's checkpoint does not pass on: names, or
    (before torch 2.13) the outputs of operations.
    """
    if policy is None or not policy.known_to_torch:
        return compiler.same_numbers if policy is None else None
    return functools.partial(compiler.same_numbers, functools.partial(_as_function, policy))


def _as_function(
    policy: Policy, context: Any, op: Any, /, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """A policy in the form of a policy function of torch's selective checkpoint."""
    decision = policy.decide(Value(op, args, kwargs, getattr(context, "op_output", None)))
    names = {Decision.OFFLOAD: "MUST_CPU_OFFLOAD", Decision.SAVE: "MUST_SAVE"}
    return CheckpointPolicy[names.get(decision, "PREFER_RECOMPUTE")]
