"""A custom ``autograd.Function`` in JAX, with its own backward and jvp at every order.

It becomes a call whose tangents are a linear call (``linear.py``). Evaluating the linear call runs
the Function's jvp or, if it has none, the transpose of its backward. Transposing it runs the
backward. So forward over reverse (``jax.hessian``) works, which ``jax.custom_vjp`` does not
support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from functx._core import LoweringError
from functx.compat._to_jax.lower.linear import linear, ruled, transpose
from functx.compat._to_jax.nodes import CustomFunction, DerivativeRule

Zeros = Callable[[], list[Any]]
Run = Callable[..., list[Any]]
"""A function of a random key, a graph and its inputs, which runs the graph. With ``stops=False``,
derivatives flow through ``detach`` and ``no_grad`` blocks."""


def apply_custom_function(
    function: CustomFunction, operands: Sequence[Any], rng: Any, run: Run
) -> tuple[Any, ...]:
    """The results of a custom Function, with its own derivatives.

    ``operands`` are its own, followed by the tensors that it closes over. ``rng`` is the random key
    of the program.
    """
    rules = _Rules(function, run)
    if not rules.of:
        return tuple(lax.stop_gradient(r) for r in rules.forward(rng, operands)[: rules.n])
    keys = [] if rng is None else [rng]

    def apart(f: Callable[..., Any]) -> Callable[..., Any]:
        """Separate the key from the operands."""
        return lambda xs, *rest: f((*xs[: len(keys)], None)[0], xs[len(keys) :], *rest)

    forward, tangents = apart(rules.forward), apart(rules.tangents)
    of = [len(keys) + i for i in rules.of]
    found = ruled(lambda *xs: forward(xs), tangents, [*keys, *operands], of, rules.to)
    return tuple(found[: rules.n])


class _Rules:
    """The derivative rules of a Function, on arrays."""

    def __init__(self, function: CustomFunction, run: Run) -> None:
        self._function = function
        self._run = run
        self._jvp = function.jvp
        self._back = function.backward if isinstance(function.backward, DerivativeRule) else None
        self.n = function.n_results  # the intermediates come after the results
        # Rules take tangents of the operands ``of`` and return tangents of the results ``to``.
        if self._jvp is not None:
            self.of, self.to = self._jvp.of, self._jvp.to
        elif self._back is not None:
            self.of, self.to = self._back.to, self._back.of
        else:
            self.of, self.to = function.unruled, tuple(range(self.n))

    def forward(self, rng: Any, xs: Sequence[Any]) -> tuple[Any, ...]:
        """The results, followed by the intermediates."""
        return tuple(self._run(rng, self._function.forward_graph, xs))

    def tangents(self, rng: Any, xs: Sequence[Any], out: Any, moved: Any) -> list[Any]:
        """The tangents of the results ``to``."""
        inputs, results = [xs[i] for i in self.of], [out[i] for i in self.to]
        for_jvp = []
        if self._jvp is not None:
            middle = self._run(rng, self._jvp.forward, xs)[self.n :]
            for_jvp = _residuals(self._jvp, xs, out, middle)
        for_back = [] if self._back is None else _residuals(self._back, xs, out, out[self.n :])
        rule_inputs = (rng, for_jvp, for_back)
        push = partial(self._push, _zeros_like(inputs), _zeros_like(results))
        if self._back is None and self._jvp is not None:
            return push(rule_inputs, moved)
        return linear(push, partial(self._pull, _zeros_like(inputs)), rule_inputs, moved, results)

    def _push(
        self, inputs: Zeros, results: Zeros, rule_inputs: Any, tangents: Sequence[Any]
    ) -> list[Any]:
        rng, residuals, _ = rule_inputs
        if self._jvp is not None:
            found = self._run(rng, self._jvp.graph, [*residuals, *tangents])
            return [z if t is None else t for t, z in zip(found, results())]

        # Without a jvp, transpose the backward.
        def pull(*cotangents: Any) -> list[Any]:
            return self._pull(inputs, rule_inputs, cotangents, stops=False)

        transposed = transpose(pull, results(), list(tangents))
        if transposed is None:
            raise LoweringError(
                f"{self._function.name}, a custom autograd.Function, has no jvp, and its backward"
                " is not linear in the cotangents, so it can't be transposed for forward mode."
                " Define a jvp for it"
            )
        return transposed

    def _pull(
        self, inputs: Zeros, rule_inputs: Any, cotangents: Sequence[Any], stops: bool = True
    ) -> list[Any]:
        rng, _, residuals = rule_inputs
        function = self._function
        if self._back is None:
            raise LoweringError(
                f"{function.name}, a custom autograd.Function, has no backward that JAX can use:"
                f" {function.backward}. Write its backward with torch operations"
            )
        # torch's gradient of a complex number is the conjugate of JAX's cotangent.
        inputs_of_rule = [*residuals, *map(jnp.conj, cotangents)]
        found = self._run(rng, self._back.graph, inputs_of_rule, stops)
        found = [z if g is None else jnp.conj(g) for g, z in zip(found, inputs())]
        if not stops or not function.once:
            return found
        return _once(function, found, [*residuals, *cotangents])


def _residuals(rule: DerivativeRule, xs: Any, out: Any, middle: Any) -> list[Any]:
    """The residuals of a rule. As in torch, no derivative flows through intermediates."""
    of = {"operand": xs, "result": out, "intermediate": lax.stop_gradient(middle)}
    return [of[kind][i] for kind, i in rule.residuals]


def _zeros_like(xs: Sequence[Any]) -> Zeros:
    """A function that makes zeros like ``xs``, without closing over tracers."""
    shapes = [(x.shape, x.dtype) for x in xs]
    return lambda: [jnp.zeros(*shape) for shape in shapes]


def _once(function: CustomFunction, gradients: list[Any], inputs: list[Any]) -> list[Any]:
    """Gradients that raise an error if they are differentiated again."""

    def refuse(*_: Any) -> Any:
        raise LoweringError(
            f"the backward of {function.name}, a custom autograd.Function, is"
            " once_differentiable, so it has no second derivative. Write it with differentiable"
            " operations, and without once_differentiable"
        )

    xs = [*gradients, *inputs]
    return ruled(lambda *xs: xs[: len(gradients)], refuse, xs, range(len(xs)), ())
