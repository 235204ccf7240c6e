"""The table of rules: a rule maps an ATen overload to a function of JAX arrays.

Invariant: a rule takes the arguments of its overload (in the same order, with the same keyword
names) and returns arrays of the same shapes. The interpreter sets the dtypes of the results from
the traced graph, so a rule need not repeat torch's promotion. A rule that is registered with
``cast=True`` gets its arguments in the result dtype, in which torch computes arithmetic and float
functions.

A rule without the name of an overload applies to all overloads of its packet that have no rule of
their own. An operation of ``prims`` without a rule uses that of ``aten``, and ``x_copy`` uses that
of ``x``, since arrays have no views. A rule is preferred to a decomposition.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from functx._torch.lowering import (
    OpOverload,
    core_aten_decompositions,
    decomposition_table,
    name_of,
)

Fn = Callable[..., Any]

_FAMILIES = """
rules.pointwise rules.activations rules.special rules.reductions rules.sorting rules.views
rules.indexing rules.linalg rules.windows rules.nn rules.sample_grid rules.fft
rules.random_operations trace.value_checks
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Rule:
    """The implementation of one operation in JAX."""

    fn: Fn  # a function of JAX arrays and plain Python values
    cast: bool = False  # whether arrays and numbers are converted to the result dtype first
    context: bool = False  # whether ``fn`` takes ``ctx=``, the interpreter's :class:`Context`
    random: bool = False  # whether ``fn`` draws random numbers


_rules: dict[str, Rule] = {}


def rule(*names: str, cast: bool = False, random: bool = False) -> Callable[[Fn], Fn]:
    """Register a function for ``names``: ``"add"``, ``"sum.dim_IntList"``, ``"prims::sum"``."""

    def register(fn: Fn) -> Fn:
        rules({" ".join(names): fn}, cast=cast, random=random)
        return fn

    return register


def rules(table: Mapping[str, Fn], *, cast: bool = False, random: bool = False) -> None:
    """Register functions, each for the names in its key, which are separated by blanks."""
    for names, fn in table.items():
        made = Rule(fn, cast, "ctx" in inspect.signature(fn).parameters, random)
        for name in names.split():
            full = name if "::" in name else f"aten::{name}"
            if full in _rules:
                raise ValueError(f"two rules for {full}")
            _rules[full] = made


@functools.cache
def load() -> None:
    """Import every family of rules."""
    for family in _FAMILIES:
        importlib.import_module(f"functx.compat._to_jax.{family}")


def names_of(op: OpOverload) -> tuple[str, str]:
    """``("aten::sum.dim_IntList", "aten::sum")``."""
    return name_of(op), name_of(op).rpartition(".")[0]


def lookup(op: OpOverload) -> Rule | None:
    """The rule of an overload, or ``None``."""
    load()
    full, packet = names_of(op)
    same = full.replace("_copy.", "."), packet.removesuffix("_copy")
    in_aten = packet.replace("prims::", "aten::")
    found = (_rules[name] for name in (full, packet, *same, in_aten) if name in _rules)
    return next(found, None)


@functools.cache
def decompositions() -> dict[Any, Fn]:
    """The decompositions for tracing: those of all operations that have no rule."""
    table = {**decomposition_table, **core_aten_decompositions()}
    aten = torch.ops.aten
    # A fake zero without memory would make later operations compute on "meta".
    table[aten._efficientzerotensor.default] = aten.zeros.default
    return {op: f for op, f in table.items() if isinstance(op, OpOverload) and lookup(op) is None}


def named() -> dict[str, Rule]:
    """All rules, by the names under which they are registered."""
    load()
    return dict(_rules)
