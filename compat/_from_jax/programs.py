"""Flat JAX functions, and the functions that transforms derive from them.

A :class:`Program` maps a list of arrays to a list of arrays. Its derivatives in forward and reverse
mode and its batched form are programs too. Each is made once and cached, and is compiled once per
signature. They all call the same jitted function, so the user's code is traced only once.

Invariant: the results of a program share memory with no other array, so that torch may write to
them.

NOTE [residuals]
The forward half of reverse mode (`Program.forward`) returns the results, followed by the residuals.
Residuals that are inputs or results are not returned again; `ForwardResiduals.sources` says which.
The pullback is a function of the residuals alone. This is right if an outer transform
differentiates the forward half. If the inputs are differentiated a second time, the pullback must
be a function of inputs and cotangents (`Program.vjp`), since only that can be differentiated with
respect to inputs.

NOTE [conjugate]
For complex numbers, JAX's pullback is the transpose of the derivative, and torch's is the conjugate
transpose. So cotangents are conjugated before and after JAX's pullback.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functx._torch.lowering import TRACING
from functx.compat._bridge import Settings, decoder, encode
from functx.compat._jax import batch_dim_of

Arrays = Sequence[Any]
Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class ForwardResiduals:
    """The residuals of the forward half of reverse mode.

    Attributes:
        results: shapes and dtypes of the results.
        sources: for each array that the pullback reads, where it is: among the inputs, the results,
            or the additional outputs of the forward half.
        rebuild: makes the pullback from these arrays.
    """

    results: tuple[jax.ShapeDtypeStruct, ...]
    sources: tuple[tuple[str, int], ...]
    rebuild: Callable[[Arrays], Function]


class Program:
    """A flat JAX function, and the programs that are derived from it.

    Attributes:
        name: the name of the function, for messages.
        handle: the name of the program in operators and graphs, which is unique in all processes.
        settings: the JAX settings under which it is traced and run.
        info: facts that are found by tracing, ``None`` before. They depend on the kind of program.
        irreversible: whether JAX can't differentiate it in reverse mode.
    """

    def __init__(self, fn: Function, name: str, settings: Settings) -> None:
        self.name = name
        self.handle = f"{name} {secrets.token_hex(8)}"
        self.settings = settings
        self.info: Any = None
        # With jit disabled nothing is traced, so residuals can't be distinguished from constants.
        self._traced = self.irreversible = bool(settings.disable_jit)
        # Derived programs call this function, so that JAX traces it only once.
        self.inner = inner = jax.jit(fn)

        def run(*arrays: Any) -> list[Any]:
            return [own(out) for out in inner(*arrays)]

        run.__name__ = run.__qualname__ = name
        self._run = jax.jit(run)
        self._derived: dict[Hashable, Program] = {}
        PROGRAMS[self.handle] = self

    def __repr__(self) -> str:
        return f"<{self.handle}>"

    def __call__(self, arrays: Arrays) -> list[Any]:
        """Run the program; the results share no memory with other arrays."""
        if not self._traced:
            self.shapes(arrays)  # it traces under a lock, so that threads trace only once
            self._traced = True
        return self._run(*arrays)

    def shapes(self, arrays: Arrays) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the results."""
        with TRACING:
            return jax.eval_shape(self._run, *arrays)

    def _derive(
        self, kind: str, key: tuple[Hashable, ...], fn: Callable[..., list[Any]]
    ) -> Program:
        """The program for ``fn(program, *arrays)``, which may set ``program.info``."""
        program = self._derived.get((kind, *key))
        if program is None:
            made: Program

            def derived(*arrays: Any) -> list[Any]:
                return fn(made, *arrays)

            made = Program(derived, f"{kind}({self.name})", self.settings)
            program = self._derived.setdefault((kind, *key), made)
        return program

    def vmapped(self, in_dims: tuple[int | None, ...], size: int) -> Program:
        """The batched function. Its ``info`` has 0 for each batched result, else ``None``."""

        def fn(program: Program, *arrays: Any) -> list[Any]:
            shared: dict[int, Any] = {}
            dims: list[int | None] = []

            def one(*arrays: Any) -> list[Any]:
                batched = []
                for i, out in enumerate(self.inner(*arrays)):
                    if batch_dim_of(out) is None:
                        shared[i] = out
                    else:
                        batched.append(out)
                    dims.append(None if i in shared else 0)
                return batched

            batched = iter(jax.vmap(one, in_axes=in_dims, axis_size=size)(*arrays))
            program.info = tuple(dims)
            return [shared[i] if i in shared else next(batched) for i in range(len(dims))]

        return self._derive("vmap", (in_dims, size), fn)

    def jvp(self, has_tangent: tuple[bool, ...]) -> Program:
        """Results, followed by the tangents of those that can have one, according to ``info``."""

        def fn(program: Program, *arrays: Any) -> list[Any]:
            primals, tangents = arrays[: len(has_tangent)], arrays[len(has_tangent) :]
            moving, f = _of_some(self.inner, primals, has_tangent)
            outs, out_tangents = jax.jvp(f, moving, tangents)
            program.info = tuple(map(_is_inexact, outs))
            return [*outs, *(t for t, has in zip(out_tangents, program.info) if has)]

        return self._derive("jvp", (has_tangent,), fn)

    def forward(self, needs: tuple[bool, ...]) -> Program:
        """Results, followed by residuals of reverse mode; ``info`` is a `ForwardResiduals`."""

        def fn(program: Program, *arrays: Any) -> list[Any]:
            primals, f = _of_some(self.inner, arrays, needs)
            outs, pullback = jax.vjp(f, *primals)
            sources, rest, rebuild = _take_apart(pullback, arrays, outs)
            if program.info is None:
                program.info = ForwardResiduals(_avals(outs), sources, rebuild)
            elif program.info.sources != sources:
                raise RuntimeError(
                    f"from_jax: JAX traced {self.name} twice with different results; the function"
                    " must be pure"
                )
            return [*outs, *rest]

        return self._derive("forward", (needs,), fn)

    def pullback(
        self, residuals: ForwardResiduals, needs: tuple[bool, ...], wanted: tuple[int, ...]
    ) -> Program:
        """The pullback as a function of residuals and of cotangents of the ``wanted`` results.

        ``needs`` says for each differentiated input whether its gradient is returned.
        """

        def fn(_: Program, *arrays: Any) -> list[Any]:
            n = len(residuals.sources)
            pull = residuals.rebuild(arrays[:n])
            return _pull(pull, residuals.results, arrays[n:], wanted, needs)

        return self._derive("pullback", (residuals, needs, wanted), fn)

    def vjp(self, needs: tuple[bool, ...], wanted: tuple[int, ...]) -> Program:
        """The pullback as a function of inputs and of cotangents; it runs the forward again."""

        def fn(_: Program, *arrays: Any) -> list[Any]:
            primals, f = _of_some(self.inner, arrays[: len(needs)], needs)
            outs, pull = jax.vjp(f, *primals)
            return _pull(pull, _avals(outs), arrays[len(needs) :], wanted, [True] * len(primals))

        return self._derive("vjp", (needs, wanted), fn)


PROGRAMS: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
"""All programs that are alive, by handle."""


def own(x: Any) -> Any:
    """A copy. Without it, JAX may return arguments, constants, or one array for equal results."""
    return jnp.array(x, copy=True)


def _of_some(
    f: Function, arrays: Arrays, which: Sequence[bool]
) -> tuple[tuple[Any, ...], Function]:
    """The inputs of ``f`` that ``which`` selects, and ``f`` as a function of these."""

    def of_some(*some: Any) -> Any:
        it = iter(some)
        return f(*(next(it) if is_one else a for a, is_one in zip(arrays, which, strict=True)))

    return tuple(a for a, is_one in zip(arrays, which, strict=True) if is_one), of_some


def _take_apart(
    pullback: Any, inputs: Arrays, results: Arrays
) -> tuple[tuple[tuple[str, int], ...], list[Any], Callable[[Arrays], Function]]:
    """Split a pullback into arrays.

    Returns:
        Where each array is, the arrays that are neither inputs nor results, and a function that
        rebuilds the pullback.
    """
    leaves, treedef = jax.tree_util.tree_flatten(pullback)
    places = {id(a): ("result", i) for i, a in enumerate(results)}
    places |= {id(a): ("input", i) for i, a in enumerate(inputs)}
    sources: list[tuple[str, int]] = []
    rest: list[Any] = []
    decoders: list[Callable[[Any], Any] | None] = []
    constants: dict[int, Any] = {}
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.core.Tracer):
            constants[i] = leaf
            continue
        if id(leaf) not in places:
            places[id(leaf)] = ("rest", len(rest))
            rest.append(encode(leaf))
        sources.append(places[id(leaf)])
        decoders.append(decoder(leaf) if places[id(leaf)][0] == "rest" else None)

    n = len(leaves)

    def rebuild(arrays: Arrays) -> Function:
        decoded = iter(
            a if decode is None else decode(a) for a, decode in zip(arrays, decoders, strict=True)
        )
        full = [constants[i] if i in constants else next(decoded) for i in range(n)]
        return jax.tree_util.tree_unflatten(treedef, full)

    return tuple(sources), rest, rebuild


def _pull(
    pull: Function,
    results: Sequence[jax.ShapeDtypeStruct],
    cotangents: Arrays,
    wanted: Sequence[int],
    needs: Sequence[bool],
) -> list[Any]:
    """Call a pullback of JAX with torch's convention. NOTE [conjugate]."""
    by_result = dict(zip(wanted, cotangents, strict=True))
    full = [
        _conjugate(by_result[i]) if i in by_result else _zero(aval)
        for i, aval in enumerate(results)
    ]
    gradients = pull(full)
    return [_conjugate(g) for g, need in zip(gradients, needs, strict=True) if need]


def _avals(arrays: Arrays) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)


def _conjugate(x: Any) -> Any:
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _zero(aval: Any) -> Any:
    if _is_inexact(aval):
        return jnp.zeros(aval.shape, aval.dtype)
    return np.zeros(aval.shape, jax.dtypes.float0)


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
