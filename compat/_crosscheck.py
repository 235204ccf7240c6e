"""``crosscheck``: one function, two frameworks, the same answers at the same memory?

Every figure has one meaning on both sides.  Values and derivatives are compared with each other and
with torch in float64; bytes kept at region boundaries have to be equal exactly (see ``_kept.py``);
torch's peak and XLA's temporary bytes are shown side by side, since they count different things.
"""

from __future__ import annotations

import re
import time as clock
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import functx
from functx.compat._dlpack import array_from_torch
from functx.compat._jax import KEEP_RECOMPUTE
from functx.compat._kept import kept_by_jax, kept_by_torch
from functx.compat._report import Crosscheck, Difference, Run
from functx.compat._to_jax import Lowered, to_jax

InDims = Any
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_DOT = re.compile(r"\b(?:dot|convolution|custom-call)\(")


def crosscheck(
    f: Callable[..., Any],
    *args: Any,
    in_dims: InDims = None,
    peak: bool = True,
    repeats: int = 0,
    name: str | None = None,
) -> Crosscheck:
    """Run a torch loss and its gradients in torch and in JAX, and compare.

    Without ``in_dims``, ``f(*args)`` is a scalar.  With it, ``f`` is the loss of one example:
    ``functx.vmap`` and ``jax.vmap`` make the batch, the value compared is the mean, and the
    per-example gradients ``vmap(grad(f))`` are compared as well.  Gradients are those of the first
    argument.  JAX runs with 64-bit types on, so that no dtype changes on the way.

    Args:
        f: a torch function to a scalar; it may contain `functx.remat`.
        *args: pytrees of torch tensors.
        in_dims: as in `functx.vmap`: which axis of each argument numbers the examples.
        peak: whether to measure torch's peak and XLA's temporary bytes.
        repeats: how many times to run each for the times in seconds; 0 measures none.
        name: names the comparison; by default that of ``f``.

    Returns:
        A `Crosscheck`: prints as a table, ``.to_json(path)``, ``.assert_agrees(rtol=...)``.

    Raises:
        TypeError: if ``f`` is not callable, there is no argument, an argument is a JAX array, or
            the loss is not a scalar.
        LoweringError: if ``f`` can't be expressed in JAX.

    Example:
        >>> import torch
        >>> from functx.compat import crosscheck
        >>> w, x = torch.randn(3, 3), torch.randn(5, 3)
        >>> report = crosscheck(lambda w, x: torch.tanh(x @ w).sum(), w, x, in_dims=(None, 0))
        >>> report.assert_agrees(rtol=1e-5)
    """
    _validate(f, args)
    with jax.enable_x64(True):
        return _compare(f, args, in_dims, peak, repeats, name or _name(f))


def _name(f: Any) -> str:
    return str(getattr(f, "__name__", type(f).__name__))


def _validate(f: Any, args: Sequence[Any]) -> None:
    if not callable(f):
        raise TypeError(f"crosscheck takes a torch function, not {type(f).__name__}")
    if not args:
        raise TypeError(
            "crosscheck needs the arguments of the function; the gradient is in the first"
        )
    for leaf in jax.tree_util.tree_leaves(args):
        if isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(
                "crosscheck converts arguments itself: pass torch tensors, not"
                f" {type(leaf).__name__}"
            )


def _compare(
    f: Callable[..., Any], args: Any, in_dims: InDims, peak: bool, repeats: int, name: str
) -> Crosscheck:
    jax_args = to_arrays(args)
    lowered = to_jax(f)
    torch_batch, jax_batch = _batched(in_dims)
    torch_loss, jax_loss = torch_batch(f), jax_batch(lowered)
    _check_scalar(torch_loss(*args), name)
    torch_fns = {"value": torch_loss, "gradient": functx.grad(torch_loss)}
    jax_fns = {"value": jax_loss, "gradient": jax.grad(jax_loss)}
    if in_dims is not None:
        torch_fns["per-example gradient"] = functx.vmap(functx.grad(f), in_dims)
        jax_fns["per-example gradient"] = jax.vmap(jax.grad(lowered), in_dims)
    wide = _wide(args)
    runs, differences = {}, {}
    for what, torch_fn in torch_fns.items():
        program = _compiled(jax_fns[what], jax_args)
        ours, theirs = torch_fn(*args), program(*jax_args)
        differences[what] = _difference(ours, theirs, _reference(torch_fn, wide))
        runs[what] = Run(
            torch_peak=functx.memory.peak(torch_fn, *args) if peak else None,
            xla_temp=int(program.memory_analysis().temp_size_in_bytes) if peak else None,
            torch_seconds=_seconds(partial(torch_fn, *args), repeats),
            jax_seconds=_seconds(partial(_finish, program, jax_args), repeats),
            dots=count_dots(program),
        )
    closed_over, arrays = _closed_over(lowered, in_dims, jax_args)
    return Crosscheck(
        name=name,
        differences=differences,
        runs=runs,
        kept_torch=kept_by_torch(torch_loss, args, closed_over),
        kept_jax=kept_by_jax(lowered, jax_args, jax_batch, arrays),
        merged_dots=count_dots(jax.jit(jax_fns["gradient"]).lower(*jax_args).compile()),
    )


def _batched(in_dims: InDims) -> tuple[Wrapper, Wrapper]:
    """How a framework makes the loss of the batch from that of one example."""
    if in_dims is None:
        return _itself, _itself
    return partial(_mean, functx.vmap, in_dims), partial(_mean, jax.vmap, in_dims)


def _itself(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


def _mean(vmap: Any, in_dims: InDims, f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: vmap(f, in_dims)(*args).mean()


def _check_scalar(value: Any, name: str) -> None:
    if not isinstance(value, torch.Tensor) or value.ndim:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
        raise TypeError(
            f"crosscheck needs a function to a scalar tensor, but {name} returned {got}; sum or"
            " average it, or give in_dims if the function is the loss of one example"
        )


def to_arrays(tree: Any) -> Any:
    """A pytree of torch tensors as JAX arrays; everything else as it is."""
    convert = lambda x: array_from_torch(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
    return jax.tree_util.tree_map(convert, tree)


def _compiled(f: Callable[..., Any], args: Any) -> Any:
    """Compiled so that a recompute stays one (XLA's CPU compiler would merge it away)."""
    options: Any = KEEP_RECOMPUTE if jax.default_backend() == "cpu" else None
    return jax.jit(f).lower(*args).compile(compiler_options=options)


def count_dots(compiled: Any) -> int:
    """Matrix products and convolutions in a compiled program."""
    return len(_DOT.findall(compiled.as_text()))


def _finish(program: Any, args: Any) -> None:
    jax.block_until_ready(program(*args))


def _seconds(run: Callable[[], Any], repeats: int) -> float | None:
    if not repeats:
        return None
    run()
    times = []
    for _ in range(repeats):
        start = clock.perf_counter()
        run()
        times.append(clock.perf_counter() - start)
    return min(times)


def _wide(args: Any) -> Any:
    def widen(x: Any) -> Any:
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return jax.tree_util.tree_map(widen, args)


def _reference(f: Callable[..., Any], wide: Any) -> Any:
    # A function that closes over float32 parameters can't run in float64; then there is no
    # reference, and the report says so.
    try:
        return f(*wide)
    except RuntimeError as err:
        if "dtype" in str(err) or "type" in str(err):
            return None
        raise


def _difference(ours: Any, theirs: Any, reference: Any) -> Difference:
    a = [_numbers(x) for x in jax.tree_util.tree_leaves(ours)]
    b = [np.asarray(x, np.float64) for x in jax.tree_util.tree_leaves(theirs)]
    shapes = [x.shape for x in a], [x.shape for x in b]
    if shapes[0] != shapes[1]:
        raise AssertionError(f"torch and JAX disagree about shapes: {shapes[0]} and {shapes[1]}")
    r = None
    if reference is not None:
        r = [_numbers(x) for x in jax.tree_util.tree_leaves(reference)]
    scale = max((np.abs(x).max(initial=0.0) for x in r or a), default=0.0)
    scale = float(scale) or 1.0
    absolute = _largest(a, b)
    return Difference(
        absolute=absolute,
        relative=absolute / scale,
        torch_error=None if r is None else _largest(a, r) / scale,
        jax_error=None if r is None else _largest(b, r) / scale,
    )


def _numbers(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return x.detach().double().cpu().numpy()


def _largest(a: Sequence[Any], b: Sequence[Any]) -> float:
    differences = [np.abs(x - y).max(initial=0.0) for x, y in zip(a, b)]
    # A NaN on one side only must not vanish in a maximum.
    return float(np.max(differences, initial=0.0)) if differences else 0.0


def _closed_over(
    lowered: Lowered, in_dims: InDims, jax_args: Any
) -> tuple[list[torch.Tensor], list[jax.Array]]:
    example = jax_args
    if in_dims is not None:
        example = _first_example(in_dims, jax_args)
    program = lowered.program(*example)
    return list(program.captures), lowered.captured(program)


def _first_example(in_dims: InDims, args: Any) -> Any:
    shapes: list[Any] = []

    def record(*xs: Any) -> Any:
        shapes.append(jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), xs))
        return 0.0

    jax.eval_shape(lambda *xs: jax.vmap(record, in_dims)(*xs), *args)
    return shapes[0]
