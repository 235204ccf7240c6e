"""The table of rules: ATen overload -> a function of JAX arrays.

Invariant: a rule takes what its overload takes (same order, same keyword names) and returns arrays
of the same shapes.  Result dtypes are set by the interpreter from the traced graph, so a rule
need not repeat torch's promotion; a rule registered with ``cast=True`` gets its arguments already
in the result dtype (arithmetic and float functions compute there in torch).

A rule named without an overload serves all overloads of its packet that have no rule of their own.
A rule goes before any decomposition.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from functx.compat._torch import OpOverload, decompositions_without, name_of

Fn = Callable[..., Any]

_FAMILIES = (
    "_pointwise",
    "_activations",
    "_special",
    "_reductions",
    "_sorting",
    "_views",
    "_creation",
    "_indexing",
    "_embedding",
    "_kinks",
    "_linalg",
    "_conv",
    "_pool",
    "_norm",
    "_nn",
    "_rnn",
    "_resize",
    "_fft",
    "_prims",
    "_random",
    "_polynomials",
    "_bessel",
)


@dataclass(frozen=True)
class Rule:
    """How one operation is said in JAX.

    Attributes:
        fn: the function of JAX arrays and plain Python values.
        cast: whether arrays and numbers are converted to the result dtype first.
        context: whether ``fn`` wants ``ctx=``, the interpreter's :class:`Context`.
        random: whether ``fn`` draws (it then wants ``ctx=`` too, for its key).
    """

    fn: Fn
    cast: bool = False
    context: bool = False
    random: bool = False


_rules: dict[str, Rule] = {}
_refusals: dict[str, str] = {}


def rule(
    *names: str, cast: bool = False, context: bool = False, random: bool = False
) -> Callable[[Fn], Fn]:
    """Register a function for ``names``: ``"add"``, ``"sum.dim_IntList"``, ``"prims::sum"``."""

    def register(fn: Fn) -> Fn:
        for name in names:
            full = name if "::" in name else f"aten::{name}"
            if full in _rules:
                raise ValueError(f"two rules for {full}")
            _rules[full] = Rule(fn, cast, context or random, random)
        return fn

    return register


def refuse(reason: str, *names: str) -> None:
    """Declare that operations can't be said in JAX, and why."""
    _refusals.update((name if "::" in name else f"aten::{name}", reason) for name in names)


@functools.cache
def load() -> None:
    """Import every family of rules."""
    for family in _FAMILIES:
        importlib.import_module(f"functx.compat._lowering.{family}")


def names_of(op: OpOverload) -> tuple[str, str]:
    """``("aten::sum.dim_IntList", "aten::sum")``."""
    return name_of(op), name_of(op).rpartition(".")[0]


def registered(name: str) -> Rule | None:
    """The rule of a full name such as ``"aten::sum.dim_IntList"``, or None."""
    return _rules.get(name)


def lookup(op: OpOverload) -> Rule | None:
    """The rule of an overload, or None."""
    load()
    full, packet = names_of(op)
    return _rules.get(full) or _rules.get(packet)


def refusal(op: OpOverload) -> str | None:
    """Why an overload is refused by name, or None."""
    load()
    full, packet = names_of(op)
    return _refusals.get(full) or _refusals.get(packet)


@functools.cache
def decompositions() -> dict[Any, Fn]:
    """The decomposition table for tracing: everything but what has a rule or is refused."""
    return decompositions_without(lambda op: lookup(op) is not None or refusal(op) is not None)
