"""Run a functional ATen graph on JAX arrays.

Invariant: each value has the shape and (up to :func:`to_jax_dtype`) the dtype that torch's trace
recorded for it, regardless of JAX's own type promotion. A region becomes a ``jax.checkpoint`` with
the same inputs and outputs; see NOTE [replays].
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import GraphModule, Node

from functx._core import LoweringError
from functx._torch.lowering import name_of
from functx.compat._bridge import ENABLE_X64, to_jax_dtype
from functx.compat._jax import RECOMPUTED
from functx.compat._to_jax.lower.custom_rule import apply_custom_function
from functx.compat._to_jax.lower.scan import Layers
from functx.compat._to_jax.nodes import body_of, custom_function_of, is_region, tensors_of
from functx.compat._to_jax.passes.hand_over import AGAIN
from functx.compat._to_jax.passes.policies import from_result, named, names_of_node, saving
from functx.compat._to_jax.rules.table import lookup, names_of
from functx.compat._to_jax.source_lines import at_source

# NOTE [replays]
# A ``functx.grad`` inside the lowered function makes two regions: the forward, and "replay, then
# pull back". JAX does not differentiate the pair, so XLA would merge the replay's recomputation
# with the forward pass (same operations, same operands), and keep every activation.
# ``optimization_barrier`` on the operands of the replay makes them different values. Because the
# cotangent is among them, the recomputation can't be scheduled before the cotangent is there.

NEEDS_KEY = "use to_jax(f, rng=True), and pass a jax.random key as the first argument"
_STOPS = ("aten::detach.default", "functx::straight_through.default")
Observe = Callable[[Sequence[Any], str], Sequence[Any]]


@dataclass(frozen=True)
class Context:
    """Information for a rule about its node."""

    shape: tuple[int, ...]  # the shape of the (first) result
    dtype: Any  # the JAX dtype of the (first) result
    node: Node
    rng: Any = None  # the random key of the node, if the function got a key

    def key(self) -> Any:
        """The random key of this node; a ``LoweringError`` if it was lowered without one."""
        if self.rng is None:
            raise LoweringError(f"{self.node.target} draws random numbers; {NEEDS_KEY}")
        return self.rng


@dataclass(frozen=True)
class Interpreter:
    """Evaluates graphs.

    Attributes:
        observe: called with the operands of each outermost region and its name; its result replaces
            the operands (``crosscheck`` records them this way).
        depth: the number of regions around the graph that runs.
        rng: the random key of the program, if any; each draw folds its number into it.
        stops: whether derivatives stop where torch stops them.
        saved: names under which ``jax.checkpoint`` saves values of the graph that runs.
        layers: by the node of each call, the run of layers that becomes one loop.
        numbers: the numbers of random draws inside a loop, where they differ by iteration.
    """

    observe: Observe | None = None
    depth: int = 0
    rng: Any = None
    stops: bool = True
    saved: Mapping[Node, tuple[str, ...]] = field(default_factory=dict)
    layers: Mapping[Node, Layers] = field(default_factory=dict)
    numbers: Mapping[Node, Any] = field(default_factory=dict)

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Evaluate a functional graph, with a JAX array for each placeholder and each output."""
        env: dict[Node, Any] = {}
        feed = iter(inputs)
        saved = self.saved
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(feed)
            elif node.op == "call_function":
                names = names_of_node(node) + saved.get(node, ())
                if node in self.layers:
                    self._layers(self.layers[node], env)
                    continue
                with jax.named_scope(RECOMPUTED) if node.meta.get(AGAIN) else nullcontext():
                    env[node] = self._call(node, env, names)
            elif node.op == "output":
                outputs = torch.fx.map_arg(node.args[0], env.__getitem__)
                return list(outputs)
        raise AssertionError("a graph without an output")

    def _call(self, node: Node, env: dict[Node, Any], names: tuple[str, ...] = ()) -> Any:
        function = custom_function_of(node)
        if function is not None or is_region(node):
            operands = [env[n] if isinstance(n, Node) else n for n in node.args[1:]]
            if function is None:
                return named(self._region(node, operands), *names)
            out = apply_custom_function(function, operands, self.rng, self._within)
            return named(out, *names)
        args: Any = torch.fx.map_arg(node.args, env.__getitem__)
        kwargs: Any = torch.fx.map_arg(node.kwargs, env.__getitem__)
        if node.target is operator.getitem:
            return named(args[0][args[1]], *names)
        if not self.stops and name_of(node.target) in _STOPS:  # type: ignore[arg-type]
            return args[0]
        if names:
            return from_result(
                names_of(node.target)[1],  # type: ignore[arg-type]
                lambda *xs: apply_rule(node, xs, kwargs, self._key(node)),
                args,
                lambda y: named(y, *names),
            )
        return apply_rule(node, args, kwargs, self._key(node))

    def _layers(self, layers: Layers, env: dict[Node, Any]) -> None:
        """Evaluate all calls of a run of layers, when the first of them is reached."""
        first = layers.calls[0]
        if first in env:
            return

        def call(operands: list[Any], numbers: Mapping[Node, Any]) -> tuple[Any, ...]:
            return replace(self, numbers=numbers)._region(first, operands)

        operands = [
            [env.get(n) if isinstance(n, Node) else n for n in c.args[1:]] for c in layers.calls
        ]
        for node, results in zip(layers.calls, layers.run(operands, call)):
            env[node] = named(results, *names_of_node(node))

    def _key(self, node: Node) -> Any:
        # The key depends on the number of the draw, so a region draws the same when it is replayed.
        number = self.numbers.get(node, node.meta.get("functx_draw"))
        if self.rng is None or number is None:
            return None
        return partial(jax.random.fold_in, self.rng, number)

    def _within(
        self,
        rng: Any,
        graph: GraphModule,
        inputs: Sequence[Any],
        stops: bool = True,
        saved: Mapping[Node, tuple[str, ...]] | None = None,
    ) -> list[Any]:
        """Run the graph of a region or a Function inside this one."""
        inner = replace(
            self,
            depth=self.depth + 1,
            rng=rng,
            stops=self.stops and stops,
            saved=saved or {},
            layers={},
        )
        return inner.run(graph, inputs)

    def _region(self, node: Node, operands: list[Any]) -> tuple[Any, ...]:
        body = body_of(node)
        region = node.meta.get("functx_region")
        name = str(getattr(region, "name", "region"))
        saved, policy = saving(
            body, getattr(region, "policy", None), getattr(region, "per_example", False)
        )

        def run(rng: Any, *xs: Any) -> tuple[Any, ...]:
            return tuple(self._within(rng, body, xs, saved=saved))

        rng = self.rng
        if self.observe is None:
            if getattr(region, "replay", False):
                rng, operands = lax.optimization_barrier((rng, operands))
        elif self.depth == 0:  # it runs without jit, so XLA merges nothing
            operands = list(self.observe(operands, name))
        return jax.checkpoint(run, policy=policy)(rng, *operands)


def apply_rule(
    node: Node, args: Any, kwargs: dict[str, Any], key: Callable[[], Any] | None = None
) -> Any:
    """Apply the rule of a node to JAX arrays, and convert the result to its traced dtypes.

    Raises a ``LoweringError`` with the line of user code if the rule does not support the
    arguments, if it returns another shape than torch, or if a number does not fit.
    """
    try:
        return _apply(node, args, kwargs, key)
    except LoweringError as err:
        raise LoweringError(f"{node.target}{at_source(node)}: {err}") from err
    except OverflowError as err:
        raise LoweringError(
            f"{node.target}{at_source(node)} gets a number that does not fit: {err}. If it needs"
            f" 64 bits, {ENABLE_X64}"
        ) from err


def _apply(node: Node, args: Any, kwargs: Any, key: Callable[[], Any] | None) -> Any:
    rule = lookup(node.target)  # type: ignore[arg-type]
    assert rule is not None, node.target
    value = node.meta.get("val")
    first = next(iter(tensors_of(node)), None)
    shape = tuple(first.shape) if first is not None else ()
    dtype = to_jax_dtype(first.dtype) if first is not None else None
    if rule.cast and first is not None:
        args = tuple(_cast(a, dtype) for a in args)
        kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    if rule.context:
        rng = key() if key and rule.random else None
        kwargs = {**kwargs, "ctx": Context(shape, dtype, node, rng)}
    return _conform(rule.fn(*args, **kwargs), value, node)


def _cast(x: Any, dtype: Any) -> Any:
    if isinstance(x, jax.Array):
        return x if x.dtype == dtype else x.astype(dtype)
    return _number(x, dtype) if isinstance(x, bool | int | float | complex) else x


def _number(x: complex, dtype: Any) -> Any:
    """Convert a Python number to the kind of an array's dtype; small ones stay weakly typed."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return x
    if jnp.issubdtype(dtype, jnp.floating):
        return x if isinstance(x, complex) else float(x)
    if jnp.issubdtype(dtype, jnp.bool_):
        return bool(x)
    whole = int(x.real if isinstance(x, complex) else x)
    # JAX would promote to 64 bits for a Python number that needs more than 32.
    return whole if -(1 << 31) <= whole < 1 << 31 else np.asarray(whole, dtype)


def _conform(out: Any, value: Any, node: Node) -> Any:
    if isinstance(value, tuple | list):
        assert len(out) == len(value), f"{node.target}: {len(out)} results for {len(value)}"
        return tuple(_conform(o, v, node) for o, v in zip(out, value))
    if not isinstance(value, torch.Tensor):
        return out
    if out is None:
        return None
    dtype = to_jax_dtype(value.dtype)
    if not isinstance(out, jax.Array) or out.dtype != dtype or out.weak_type:
        out = _convert(out, dtype)
    if out.shape != tuple(value.shape):
        raise LoweringError(
            f"the rule returned shape {out.shape}, but torch returns {tuple(value.shape)}; please"
            " report this"
        )
    return out


def _convert(x: Any, dtype: Any) -> Any:
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x != 0 if dtype == jnp.bool_ else x.real
    return lax.convert_element_type(x, dtype)
