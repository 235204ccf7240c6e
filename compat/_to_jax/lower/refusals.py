"""Before a graph is interpreted: everything that JAX can't say, in one error.

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

    Random operations are one, unless there will be a key (``rng``).
    """
    problems = [*_operations(program), *_random(program, rng), *_wide(program)]
    if problems:
        raise LoweringError("can't be lowered to JAX:\n" + "\n".join(f"  - {p}" for p in problems))


def _calls(program: FunctionalGraph) -> list[Node]:
    graphs = [m.graph for m in modules_of(program.module)]
    nodes = [n for g in graphs for n in g.nodes if n.op == "call_function"]
    return [n for n in nodes if n.target is not operator.getitem]


def _listed(found: Iterable[tuple[str, Node]]) -> str:
    """Each of some texts with how often it was found, and at which line of the user first."""
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
        f"{len(dict(missing))} operations have no rule: {_listed(missing)}; write them with other"
        " operations of torch, or with functx.compat.from_jax(g) of a JAX function g, which is g"
        " itself in the lowered function"
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
    """What 64 bits would be narrowed, or cut off, with x64 off."""
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
            "64-bit integers, which JAX has no room for while 64-bit types are off:"
            f" {_listed(integers)}; {ENABLE_X64}"
        )
    return problems


def _wide_integers(node: Node) -> list[str]:
    """What a node needs more than 32 bits of its integers for."""
    op: Any = node.target
    out = [v.dtype in WIDE_INTEGERS for v in tensors_of(node)]
    read = [v.dtype in WIDE_INTEGERS for n in node.all_input_nodes for v in tensors_of(n)]
    if not any(out + read):
        return []
    if op in _ALL_BITS:
        return ["all bits of torch.int64"]
    if op in _OTHER_BITS:
        return ["other dtypes of the same bits"]
    rule = lookup(op)
    draws = rule is not None and rule.random
    if not any(out) and rule is not None and rule.cast:
        return []  # the numbers are taken in the dtype of the result
    return [
        str(x)
        for kind, x in typed_arguments(op, node.args, node.kwargs)
        if (isinstance(x, int) or (isinstance(x, float) and any(out)))
        and not -(1 << 31) <= x < (32 if op in _SHIFTS else 1 << 31)
        # Of sizes and ends of slices, the greatest number there is means all of them.
        and (draws or "int" not in kind)
    ]
