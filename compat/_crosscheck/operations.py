"""Find the first operation whose numbers differ between torch and JAX.

The lowered graph runs operation by operation on both sides. In a first pass, both sides get torch's
operands, so that an error does not spread to later operations. If no operation differs, JAX gets
its own results in a second pass, which shows where rounding differences add up to more than is
allowed. Derivatives are compared in the first pass: the pullback of each operation, for torch's
operands and a fixed cotangent.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from functx._torch.lowering import map_tensors, tree_map
from functx.compat import random
from functx.compat._bridge import array_from_torch
from functx.compat._crosscheck.precision import Difference, difference
from functx.compat._to_jax import (
    FunctionalGraph,
    Interpreter,
    Source,
    apply_rule,
    body_of,
    custom_function_of,
    is_region,
    source_of,
)

# Operations that return uninitialized memory, whose values are not compared.
_UNSET = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


@dataclass(frozen=True)
class Operation:
    """An operation of the lowered graph whose numbers differ.

    Attributes:
        name: the name of the ATen operation.
        what: ``"value"``, ``"derivative"``, or ``"rounding"`` if only its operands have drifted
            apart.
        source: the line of user code that it comes from, if known.
        number: its position among the operations that ran, from 1.
        operands: shapes and dtypes of its operands.
        region: the names of the regions around it, outermost first.
        difference: the difference between the results.
    """

    name: str
    what: str
    source: Source | None
    number: int
    operands: str
    region: tuple[str, ...]
    difference: Difference

    def __str__(self) -> str:
        finding = {
            "value": "has different values",
            "derivative": "has different derivatives",
            "rounding": "is where rounding differences have added up",
        }[self.what]
        d = self.difference
        far = f"{d.relative:.2g} relative, {d.ulps:.3g} ulp"
        if not math.isfinite(d.absolute):
            far = "NaN or infinity in one framework only"
        where = f", at {self.source}" if self.source else ""
        line = f": `{self.source.text}`" if self.source and self.source.text else ""
        inside = f", in the region {' / '.join(self.region)}" if self.region else ""
        return (
            f"operation {self.number}, {self.name}({self.operands}), {finding}:"
            f" {far}{inside}{where}{line}"
        )


@dataclass
class _Walk:
    """One pass over the graph."""

    rtol: float | None  # None for the default of the dtype
    atol: float
    derivatives: bool  # whether to compare pullbacks as well
    drifting: bool  # whether JAX continues with its own results
    number: int = 0  # how many operations have run

    def run(
        self, module: GraphModule, ours: Sequence[Any], theirs: Sequence[Any], path: tuple[str, ...]
    ) -> Generator[Operation, None, tuple[list[Any], list[Any]]]:
        """Yield the operations that differ; returns the outputs on both sides."""
        env: dict[Node, Any] = {}
        env_jax: dict[Node, Any] = {}
        feed = iter(zip(ours, theirs))
        *nodes, output = module.graph.nodes
        for node in nodes:
            if node.op == "placeholder":
                env[node], env_jax[node] = next(feed)
            elif node.op == "get_attr":
                continue
            elif is_region(node):
                name = str(getattr(node.meta.get("functx_region"), "name", "region"))
                a, b = ([*map_arg(node.args[1:], side.__getitem__)] for side in (env, env_jax))
                env[node], env_jax[node] = yield from self.run(body_of(node), a, b, (*path, name))
            elif node.target is operator.getitem:
                of, at = node.args
                env[node], env_jax[node] = env[of][at], env_jax[of][at]
            else:
                yield from self._operation(node, env, env_jax, path)
        results = (list(map_arg(output.args[0], side.__getitem__)) for side in (env, env_jax))
        return next(results), next(results)

    def _operation(
        self, node: Node, env: dict[Node, Any], env_jax: dict[Node, Any], path: tuple[str, ...]
    ) -> Iterator[Operation]:
        """Run one operation. A custom autograd Function counts as one operation."""
        self.number += 1
        function = custom_function_of(node)
        nodes = (node.args if function is None else node.args[1:], node.kwargs)
        args, kwargs = map_arg(nodes, env.__getitem__)
        call: Any = node.target if function is None else function.results
        env[node] = call(*args, **kwargs)
        converted = {n: _arrays(env[n]) for n in node.all_input_nodes if n in env}
        theirs = Interpreter()._call(node, env_jax if self.drifting else converted)
        env_jax[node] = theirs
        if str(node.target).split(".")[-2:][0] in _UNSET:
            return
        found, what = self._compare(_tensors(env[node]), _tensors(theirs)), "value"
        if found is None and self.derivatives and function is None:
            found, what = self._compare_pullbacks(node, args, kwargs), "derivative"
        if found is not None:
            what = "rounding" if self.drifting else what
            tensors = [x for x in _tensors(args) if isinstance(x, Tensor)]
            operands = ", ".join(f"{str(x.dtype)[6:]}{list(x.shape)}" for x in tensors)
            name = str(node.target) if function is None else function.name
            yield Operation(name, what, source_of(node), self.number, operands, path, found)

    def _compare(self, ours: list[Any], theirs: list[Any]) -> Difference | None:
        if not ours:
            return None
        found = difference(ours, theirs, None, [], self.rtol, self.atol)
        return None if found.agrees else found

    def _compare_pullbacks(self, node: Node, args: Any, kwargs: Any) -> Difference | None:
        """Compare the results of the operation's pullbacks for one cotangent."""
        primals = [x for x in _tensors((args, kwargs)) if _real(x)]
        used = _used(node)
        outs = [x for x in used(node.meta.get("val")) if _real(x)]
        if not primals or not outs or any(x.is_complex() for x in _tensors((args, kwargs))):
            return None
        cotangents = [
            random.normal(random.fold_in(random.key(7), n), x.shape, x.dtype)
            for n, x in enumerate(outs)
        ]
        call: Any = node.target

        def torch_side(*xs: Any) -> Any:
            a, k = _replaced((args, kwargs), iter(xs))
            return [x for x in used(call(*a, **k)) if _real(x)]

        def jax_side(*xs: Any) -> Any:
            a, k = _replaced((args, kwargs), iter(xs))
            a, k = _arrays((a, k))
            outs = used(apply_rule(node, a, k))
            return [x for x in outs if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]

        try:
            pullback: Any = torch.func.vjp(torch_side, *primals)[1]
            ours = list(pullback(cotangents))
        except (RuntimeError, NotImplementedError):
            return None  # torch has no derivative for it
        pullback = jax.vjp(jax_side, *[array_from_torch(x) for x in primals])[1]
        theirs = list(pullback([array_from_torch(x) for x in cotangents]))
        return self._compare(ours, theirs)


def _used(node: Node) -> Callable[[Any], list[Any]]:
    """A function that selects, from the results of an operation, the tensors that the graph uses.

    The others are statistics for the operation's backward pass, which have no derivatives.
    """
    users = list(node.users)
    if not users or any(user.target is not operator.getitem for user in users):
        return _tensors
    numbers = sorted({int(user.args[1]) for user in users if user.users})  # type: ignore[arg-type]
    return lambda results: [x for n in numbers for x in _tensors(results[n])]


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _tensors(tree: Any) -> list[Any]:
    """Tensors and arrays in nested tuples, lists and dictionaries."""
    found: list[Any] = []
    tree_map(lambda x: found.append(x) if isinstance(x, Tensor | jax.Array) else None, tree)
    return found


def _replaced(tree: Any, feed: Iterator[Any]) -> Any:
    """``tree`` with its real tensors replaced by those of ``feed``."""
    return tree_map(lambda x: next(feed) if _real(x) else x, tree)


def _arrays(tree: Any) -> Any:
    return map_tensors(array_from_torch, tree)


def first_difference(
    program: FunctionalGraph,
    inputs: Sequence[Tensor],
    derivatives: bool,
    rtol: float | None,
    atol: float,
) -> Operation | None:
    """The first operation of a lowered function that differs for these inputs, or ``None``.

    ``rtol`` is relative to an operation's largest result; ``None`` for the default of the dtype.
    """
    ours = [*inputs, *(t.detach() for t in program.captures)]
    for drifting in (False, True):
        walk = _Walk(rtol, atol, derivatives and not drifting, drifting)
        theirs = [array_from_torch(x) for x in ours]
        with torch.no_grad() if not derivatives else torch.enable_grad():
            for found in walk.run(program.module, ours, theirs, ()):
                return found
    return None
