"""The table of rules: ATen overload -> a function of JAX arrays.

Invariant: a rule takes what its overload takes (same order, same keyword names) and returns arrays
of the same shapes.  Result dtypes are set by the interpreter from the traced graph, so a rule
need not repeat torch's promotion; a rule registered with ``cast=True`` gets its arguments already
in the result dtype (arithmetic and float functions compute there in torch).

A rule named without an overload serves all overloads of its packet that have none of their own;
``prims`` without a rule are as in ``aten``, and ``x_copy`` is as ``x``, since arrays have no views.
A rule goes before any decomposition.
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
    """How one operation is said in JAX."""

    fn: Fn  # of JAX arrays and plain Python values
    cast: bool = False  # whether arrays and numbers are converted to the result dtype first
    context: bool = False  # whether ``fn`` takes ``ctx=``, the interpreter's :class:`Context`
    random: bool = False  # whether ``fn`` draws


_rules: dict[str, Rule] = {}


def rule(*names: str, cast: bool = False, random: bool = False) -> Callable[[Fn], Fn]:
    """Register a function for ``names``: ``"add"``, ``"sum.dim_IntList"``, ``"prims::sum"``."""

    def register(fn: Fn) -> Fn:
        rules({" ".join(names): fn}, cast=cast, random=random)
        return fn

    return register


def rules(table: Mapping[str, Fn], *, cast: bool = False, random: bool = False) -> None:
    """Register functions, each for the names in its key, separated by blanks."""
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
    """The rule of an overload, or None."""
    load()
    full, packet = names_of(op)
    same = full.replace("_copy.", "."), packet.removesuffix("_copy")
    in_aten = packet.replace("prims::", "aten::")
    found = (_rules[name] for name in (full, packet, *same, in_aten) if name in _rules)
    return next(found, None)


@functools.cache
def decompositions() -> dict[Any, Fn]:
    """The decomposition table for tracing: everything but what has a rule."""
    known = {**decomposition_table, **core_aten_decompositions()}
    aten = torch.ops.aten
    known[aten._efficientzerotensor.default] = aten.zeros.default  # its kernels compute on "meta"
    return {op: f for op, f in known.items() if isinstance(op, OpOverload) and lookup(op) is None}


def named() -> dict[str, Rule]:
    """All rules by the names that they are registered for."""
    load()
    return dict(_rules)
