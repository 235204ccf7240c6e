"""``crosscheck``: compare the results and the memory of one function in torch and in JAX.

Every figure has the same meaning on both sides. Values and derivatives are compared with each other
and with torch in float64. Bytes kept at region boundaries must be equal (``kept_bytes.py``).
torch's peak and XLA's temporary bytes are only shown side by side, since they count different
things.
"""

from __future__ import annotations

import logging
import platform
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

import functx
from functx._core import LoweringError, has_derivatives, tree
from functx.compat._bridge import array_from_torch
from functx.compat._crosscheck.case import Case, case_of
from functx.compat._crosscheck.derivatives import TRANSFORMS, Library, as_torch_says, chosen
from functx.compat._crosscheck.kept_bytes import Kept, kept_by_jax, kept_by_torch
from functx.compat._crosscheck.operations import first_difference
from functx.compat._crosscheck.precision import Difference, difference, in_float64
from functx.compat._crosscheck.products import count
from functx.compat._crosscheck.report import Crosscheck, Run
from functx.compat._crosscheck.ways import COMPILED, EAGER, JAX, TRACED, Way, traced
from functx.compat._crosscheck.ways import compiled as compiled_way
from functx.compat._jax import KEEP_RECOMPUTE
from functx.compat._to_jax import Lowered, to_jax

_LOG = logging.getLogger(__name__)


@contextmanager
def _wide_types() -> Iterator[None]:
    """A context with JAX's 64-bit types on, which adds the remedy to errors of `to_jax`."""
    with jax.enable_x64(True):
        try:
            yield
        except LoweringError as error:
            if "random" in str(error):
                error.add_note(
                    "crosscheck: torch's generator has no counterpart in JAX. If a module draws"
                    " from it (for dropout), compare the module in eval mode: model.eval(). In your"
                    " own code, draw from keys with functx.compat.random, and pass the key as an"
                    " argument"
                )
            elif "to_jax(" in str(error):
                error.add_note(
                    "crosscheck has no such option; compare the module in eval mode: model.eval()"
                )
            raise


@_wide_types()
def crosscheck(
    f: Callable[..., Any] | torch.nn.Module,
    *args: Any,
    transforms: Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    argnums: int | Sequence[int] = 0,
    in_dims: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    peak: bool = True,
    repeats: int = 0,
    locate: bool = True,
    compiled: Any = False,
    name: str | None = None,
) -> Crosscheck:
    """Run a torch function and its derivatives in torch and in JAX, and compare.

    Different numbers are not an error. The result shows them, and its ``assert_agrees()`` raises an
    error. JAX runs with 64-bit types on, so that no dtype is narrowed.

    ======================  =====================================================================
    transform               compared
    ======================  =====================================================================
    ``value``               every tensor of the result
    ``grad``                the gradients of the result, reduced to a number
    ``vmap(grad)``          the gradients of each example; needs ``in_dims``
    ``jvp``                 the tangents of the result along a fixed direction
    ``hvp``                 the derivative of ``grad`` along it
    ``jacrev``, ``jacfwd``  the Jacobians of the result
    ``hessian``             the second derivatives of the result, reduced to a number
    ======================  =====================================================================

    A result that is not a single number is reduced by its inner product with fixed normal numbers;
    with ``in_dims``, by the mean of these products over the examples.

    Args:
        f: a torch function of pytrees of tensors, or a module, whose parameters are then the first
            argument; it may contain `functx.remat`.
        *args: its arguments, pytrees with torch tensors.
        transforms: which of the above; by default ``value`` and ``grad`` (with ``in_dims`` also
            ``vmap(grad)``), or only ``value`` if nothing can be differentiated.
        rtol: the largest difference allowed, relative to the largest entry of a tensor. The default
            is 2e-5 in float32, 1e-11 in float64, 2e-2 in float16, and 1e-1 in bfloat16. If torch's
            own result differs from its float64 result by more than a fourth of that, four times
            this difference is allowed, up to 0.1.
        atol: an absolute difference that is allowed in addition.
        argnums: which positional arguments to differentiate with respect to, in their real and
            complex tensors; for a module, 0 means its parameters.
        in_dims: as in `functx.vmap` (without an entry for a module's parameters). Then ``f`` takes
            one example.
        kwargs: keyword arguments of ``f``, which all examples share.
        peak: whether to measure torch's peak and XLA's temporary bytes.
        repeats: how often to run each transform to measure its time; 0 measures no times.
        locate: whether to find the first operation that differs, if numbers differ.
        compiled: whether to compare four ways to compute each transform: in eager, the trace of
            `functx.jit`, its compiled function, and JAX. A value other than True and False is the
            ``backend`` of `functx.jit`.
        name: the name of the comparison; by default that of ``f``.

    Returns:
        A `Crosscheck`: prints as a table, ``.to_json(path)``, ``.to_html(path)``,
        ``.assert_agrees()``.

    Raises:
        TypeError: if ``f`` is not a torch function, has no arguments, has an array of another
            framework as an argument, or can't be differentiated as requested.
        ValueError: for unknown transforms, or ``argnums`` or ``in_dims`` that don't fit.
        LoweringError: if ``f`` can't be expressed in JAX.
        functx.TracingError: with ``compiled``, if `functx.jit` can't trace ``f``.
        AssertionError: if shapes, dtypes or the number of results differ.

    Example:
        >>> import torch
        >>> from functx.compat import crosscheck
        >>> w, x = torch.randn(3, 3), torch.randn(5, 3)
        >>> report = crosscheck(lambda w, x: torch.tanh(x @ w).sum(), w, x, in_dims=(None, 0))
        >>> report.assert_agrees()
    """
    case = case_of(f, args, kwargs or {}, argnums, in_dims, name)
    lowered = to_jax(case.function)
    ours, theirs = Library(case, case.function, functx), Library(case, lowered, jax)
    torch_args = (case.primals, case.rest)
    jax_args = _arrays(case.primals), _arrays(case.rest)
    results = ours.value(*torch_args)
    differentiable = bool(case.primals) and any(map(has_derivatives, results))
    options: Any = KEEP_RECOMPUTE if jax.default_backend() == "cpu" else None
    differences, runs = dict[str, Difference](), dict[str, Run]()
    all_ways = dict[str, dict[str, Way]]()
    names = chosen(transforms, case, differentiable)
    kept: tuple[Kept | None, Kept | None] = (None, None)
    if any(what != "value" for what in names):
        kept = _kept(ours, theirs, lowered, jax_args)
    for what in names:
        _LOG.info("comparing %s ...", what)
        in_torch, in_jax = TRANSFORMS[what](ours), TRANSFORMS[what](theirs)
        program: Any = jax.jit(in_jax).lower(*jax_args).compile(compiler_options=options)
        got = tree.leaves(in_torch(*torch_args))
        expected = as_torch_says(what, jax.tree_util.tree_leaves(program(*jax_args)))
        reference = in_float64(lambda *xs, f=in_torch: tree.leaves(f(*xs)), *torch_args)
        paths = case.result_paths if what in ("value", "jvp") else case.paths
        exact = what == "value"
        differences[what] = difference(got, expected, reference, paths, rtol, atol, dtypes=exact)
        run_torch = partial(in_torch, *torch_args)
        runs[what] = Run(
            torch_peak=functx.memory.peak(run_torch) if peak else None,
            xla_temp=program.memory_analysis().temp_size_in_bytes if peak else None,
            torch_seconds=_seconds(run_torch, repeats),
            jax_seconds=_seconds(lambda: jax.block_until_ready(program(*jax_args)), repeats),  # noqa: B023
            products=None if what == "value" else count(run_torch, program),
        )
        if compiled:
            backend = "inductor" if compiled is True else compiled
            compare = partial(
                difference,
                got,
                reference=reference,
                paths=paths,
                rtol=rtol,
                atol=atol,
                dtypes=exact,
            )
            all_ways[what] = _ways(
                in_torch, torch_args, backend, peak, program, compare, differences[what]
            )
    differ = [what for what, d in differences.items() if not d.agrees]
    searched = locate and bool(differ)
    first = None
    if searched:
        program = to_jax(case.function).program(*_first_example(case, jax_args))
        primals, rest = _first_example(case, torch_args)
        inputs = [*primals, *rest]
        first = first_difference(program, inputs, differ != ["value"], rtol, atol)
    environment = {
        "functx": functx.__version__,
        "torch": torch.__version__,
        "jax": jax.__version__,
        "jax device": str(jnp.zeros(()).device),
        "machine": platform.machine(),
    }
    return Crosscheck(case.name, differences, runs, *kept, first, searched, environment, all_ways)


def _ways(
    run: Callable[..., Any],
    args: tuple[list[Tensor], list[Tensor]],
    backend: Any,
    peak: bool,
    program: Any,
    compare: Callable[[Sequence[Any]], Difference],
    from_jax: Difference,
) -> dict[str, Way]:
    """The figures of one transform for the four ways: eager, traced, compiled and JAX."""
    eager = partial(run, *args)
    products = count(eager, program)
    trace, graphs = traced(run, args, peak)
    binary = compiled_way(run, args, peak, backend, graphs)
    eager_peak = functx.memory.peak(eager) if peak else None
    temp = program.memory_analysis().temp_size_in_bytes if peak else None
    return {
        EAGER: Way(None, products.torch, products.torch_recomputed, eager_peak),
        TRACED: Way(compare(_arrays(trace.results)), trace.products, trace.again, trace.peak),
        COMPILED: Way(compare(_arrays(binary.results)), binary.products, binary.again, binary.peak),
        JAX: Way(from_jax, products.jax, products.jax_recomputed, temp),
    }


def _arrays(xs: Sequence[Tensor]) -> list[Any]:
    return [array_from_torch(x) for x in xs]


def _kept(
    ours: Library, theirs: Library, lowered: Lowered, jax_args: tuple[list[Any], list[Any]]
) -> tuple[Kept, Kept]:
    """The bytes that the pullback of the loss keeps at region boundaries, in torch and in JAX."""
    case = ours.case
    program = lowered.program(*_first_example(case, jax_args))

    def observed(observe: Any) -> Callable[..., Any]:
        return replace(theirs, one=partial(lowered.observed, observe)).loss

    return (
        kept_by_torch(ours.loss, (case.primals, case.rest), program.captures),
        kept_by_jax(observed, jax_args, lowered.captured(program)),
    )


def _first_example(case: Case, args: Sequence[Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """The arguments for one call of the case's function: those of the first example."""
    dims = (case.primal_dims, case.rest_dims)
    first = [
        [x if d is None else x[(slice(None),) * (d % x.ndim) + (0,)] for x, d in zip(xs, ds)]
        for xs, ds in zip(args, dims)
    ]
    return first[0], first[1]


def _seconds(run: Callable[[], Any], repeats: int) -> float | None:
    if not repeats:
        return None
    return min(timeit.repeat(run, number=1, repeat=repeats + 1)[1:])  # the first is a warm-up
