"""Check, before a graph runs, that JAX can express it; list all problems in one error.

Invariant: a program that passes has a rule for every operation, and 64-bit floats only if x64 is
on.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from functx._core import LoweringError
from functx._torch.lowering import OpOverload, typed_arguments
from functx.compat._bridge import ENABLE_X64, WIDE_FLOATS, WIDE_INTEGERS
from functx.compat._jax import x64_enabled
from functx.compat._to_jax.functional_graph import FunctionalGraph
from functx.compat._to_jax.lower.interpreter import NEEDS_KEY
from functx.compat._to_jax.nodes import custom_function_of, is_region, modules_of, tensors_of
from functx.compat._to_jax.rules.table import lookup
from functx.compat._to_jax.source_lines import at_source

aten = torch.ops.aten
_ALL_BITS = (aten.random.default, aten.random_.default)
_OTHER_BITS = (aten.view.dtype,)
_SHIFTS = (aten.bitwise_left_shift.Tensor_Scalar, aten.__lshift__.Scalar)


def check(program: FunctionalGraph, rng: bool = False) -> None:
    """Raise one error that lists every reason why a program can't be lowered.

    Random operations are a reason if ``rng`` is false, since there is no key for them.
    """
    problems = [*_operations(program), *_random(program, rng), *_wide(program)]
    if problems:
        listed = "\n".join(f"  - {p}" for p in problems)
        raise LoweringError(f"the function can't be lowered to JAX:\n{listed}")


def _calls(program: FunctionalGraph) -> list[Node]:
    graphs = [m.graph for m in modules_of(program.module)]
    nodes = [n for g in graphs for n in g.nodes if n.op == "call_function"]
    return [n for n in nodes if n.target is not operator.getitem]


def _listed(found: Iterable[tuple[str, Node]]) -> str:
    """The texts in ``found``, each with its count and the line of user code of its first node."""
    nodes: dict[str, list[Node]] = {}
    for text, node in found:
        nodes.setdefault(text, []).append(node)
    return ", ".join(f"{text} ({len(at)}x{at_source(at[0])})" for text, at in sorted(nodes.items()))


def _operations(program: FunctionalGraph) -> list[str]:
    missing = [
        (str(node.target), node)
        for node in _calls(program)
        if not is_region(node)
        and custom_function_of(node) is None
        and not (isinstance(node.target, OpOverload) and lookup(node.target))
    ]
    if not missing:
        return []
    return [
        f"{len(dict(missing))} operations have no rule: {_listed(missing)}. Use other operations of"
        " torch, or functx.compat.from_jax(g) with a JAX function g, which the lowered function"
        " calls directly"
    ]


def _random(program: FunctionalGraph, rng: bool) -> list[str]:
    drawing = [
        (str(node.target), node)
        for node in _calls(program)
        if isinstance(node.target, OpOverload) and (rule := lookup(node.target)) and rule.random
    ]
    if rng or not drawing:
        return []
    return [f"random operations need a key: {_listed(drawing)}; {NEEDS_KEY}"]


def _wide(program: FunctionalGraph) -> list[str]:
    """Problems with 64-bit numbers while x64 is off."""
    if x64_enabled():
        return []
    floats, integers = [], []
    for node in _calls(program):
        if isinstance(node.target, OpOverload):
            wide = {v.dtype for v in tensors_of(node) if v.dtype in WIDE_FLOATS}
            floats += [(f"{node.target} of {dtype}", node) for dtype in wide]
            integers += [(f"{node.target} of {what}", node) for what in _wide_integers(node)]
    problems = []
    if floats:
        problems.append(
            f"64-bit values, which JAX would narrow silently: {_listed(floats)}; {ENABLE_X64}"
        )
    if integers:
        problems.append(
            "64-bit integers, which do not fit while JAX's 64-bit types are off:"
            f" {_listed(integers)}; {ENABLE_X64}"
        )
    return problems


def _wide_integers(node: Node) -> list[str]:
    """The reasons why a node needs more than 32 bits of its integers."""
    op: Any = node.target
    out = [v.dtype in WIDE_INTEGERS for v in tensors_of(node)]
    read = [v.dtype in WIDE_INTEGERS for n in node.all_input_nodes for v in tensors_of(n)]
    if not any(out + read):
        return []
    if op in _ALL_BITS:
        return ["all bits of torch.int64"]
    if op in _OTHER_BITS:
        return ["a view in another dtype"]
    rule = lookup(op)
    draws = rule is not None and rule.random
    if not any(out) and rule is not None and rule.cast:
        return []  # the rule converts the numbers to the dtype of the result
    return [
        str(x)
        for kind, x in typed_arguments(op, node.args, node.kwargs)
        if (isinstance(x, int) or (isinstance(x, float) and any(out)))
        and not -(1 << 31) <= x < (32 if op in _SHIFTS else 1 << 31)
        # For sizes and ends of slices, the largest int64 means "to the end".
        and (draws or "int" not in kind)
    ]
