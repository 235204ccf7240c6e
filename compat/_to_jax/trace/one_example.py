"""Policies under ``functx.vmap`` inside a lowered function: asked about one example.

A trace below ``vmap`` holds batched operations, which a policy is not meant to judge.  So each
function that the body of such a region calls is traced once more, on shapes of one example, and
what it runs there is written at the nodes of the real one, matched by order, kind and size.  Only
what is kept depends on the match, never a value; NOTE [one example] in
`functx._remat.examples` says the same of running torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Node, map_arg

from functx import _torch as engine
from functx._aten import is_dot
from functx._remat import batch_being_traced
from functx._save_policies import Value
from functx.compat._to_jax.rules.table import decompositions
from functx.compat._torch import OpOverload, make_fx, map_tensors

EXAMPLE = "functx_example"
"""Under which ``node.meta["custom"]`` has what a batched operation is for one example."""


def with_examples(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of a region's body; mark its nodes if a policy will ask about one example."""
    batch = batch_being_traced()
    mode = engine.proxy_mode() if batch > 1 else None
    if mode is None:
        return func(*args, **kwargs)
    last = next(iter(reversed(mode.tracer.graph.nodes)), None)
    out = func(*args, **kwargs)
    made = [*takewhile(lambda n: n is not last, reversed(mode.tracer.graph.nodes))][::-1]
    if made:
        _mark(made, _one_example(func, args, kwargs), batch)
    return out


def _one_example(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Node]:
    given = args, kwargs
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, given)

    def run(*inputs: torch.Tensor) -> Any:
        feed = iter(inputs)
        again, named = map_tensors(lambda _: next(feed), given)
        return func(*again, **named)

    try:
        with (
            engine.without_proxies(),
            engine.cleared_interpreter_stack(),
            engine.without_modes(),
            torch.no_grad(),
        ):
            metas = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
            graph = make_fx(run, decomposition_table=decompositions())(*metas).graph
    except Exception:  # what has no shapes without values
        return []
    return [n for n in graph.nodes if n.op == "call_function"]


def _mark(nodes: Sequence[Node], examples: Sequence[Node], batch: int) -> None:
    at = 0
    for example in examples:
        for i in range(at, len(nodes)):
            if _same(example, nodes[i], batch):
                nodes[i].meta.setdefault("custom", {})[EXAMPLE] = (
                    example.target,
                    map_arg(example.args, _value),
                    map_arg(example.kwargs, _value),
                    example.meta["val"],
                )
                at = i + 1
                break


def _value(node: Node) -> Any:
    return node.meta.get("val", node)


def _same(example: Node, node: Node, batch: int) -> bool:
    one, all_of_them = example.target, node.target
    if not isinstance(one, OpOverload) or not isinstance(all_of_them, OpOverload):
        return False
    same = one.overloadpacket is all_of_them.overloadpacket
    if not same and not (is_dot(one) and is_dot(all_of_them)):
        return False
    a, b = _first(example), _first(node)
    if a is None or b is None or a.dtype != b.dtype:
        return False
    if not a.numel() or not b.numel():
        return a.numel() == b.numel()
    times, rest = divmod(b.numel(), a.numel())
    return not rest and batch % times == 0


def _first(node: Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return next((v for v in values if isinstance(v, torch.Tensor)), None)


def value_of(node: Node, per_example: bool) -> Value:
    """A node's value as a policy is to see it; without an operation if nothing is known of it."""
    if not per_example:
        target = node.target
        own = isinstance(target, OpOverload) and not target.is_view
        args, kwargs = map_arg(node.args, _value), map_arg(node.kwargs, _value)
        return Value(target if own else None, args, kwargs, node.meta["val"])
    target, args, kwargs, out = node.meta.get("custom", {}).get(EXAMPLE, (None, (), {}, None))
    own = target is not None and not target.is_view
    return Value(target if own else None, args, kwargs, out)
