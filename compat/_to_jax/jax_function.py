"""``to_jax``: convert a torch function to a JAX function.

The function is traced and lowered once for each signature (structure, shapes, dtypes, static
arguments, and the `Environment`), and the result is cached. The values of tensors that it closes
over are not part of the trace: they are read at every call, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.export import ExportedProgram

from functx._core import LoweringError
from functx._models import Where, find
from functx._remat import called
from functx._torch.lowering import TRACING, original_of
from functx.compat._bridge import (
    array_from_torch,
    as_module,
    check_fits,
    function_of,
    function_with_buffers,
    is_key,
    state_of,
    teach_jax,
    to_jax_dtype,
    to_torch_dtype,
)
from functx.compat._jax import x64_enabled
from functx.compat._to_jax.environment import Environment
from functx.compat._to_jax.functional_graph import FunctionalGraph, Spec, trace
from functx.compat._to_jax.lower.interpreter import Interpreter, Observe
from functx.compat._to_jax.lower.refusals import check
from functx.compat._to_jax.lower.scan import layers_of
from functx.compat._to_jax.source_lines import warn
from functx.compat._to_jax.trace.known_values import unchanged
from functx.compat.random._draws import lowering
from functx.compat.random._keys import words_of_jax

_STATIC = (bool, int, float, complex, str, bytes, type(None))
_MOST_PROGRAMS = 128
_MANY_TRACES = 8


def to_jax(
    f: Callable[..., Any] | torch.nn.Module | ExportedProgram,
    *,
    rng: bool = False,
    buffers: bool = False,
    scan: bool | Where = False,
) -> Any:
    """Turn a torch function, module or exported program into a JAX function.

    The result takes and returns pytrees of JAX arrays instead of torch tensors, and works under
    ``jax.jit``, ``grad``, ``vmap``, ``jvp``, ``vjp``, ``hessian``, ``lax.scan`` and
    ``jax.checkpoint``. A :func:`functx.remat` region inside becomes ``jax.checkpoint`` with the
    same inputs and outputs. Gradients stop where they stop in torch: at ``detach`` and in
    ``no_grad`` blocks. A custom ``autograd.Function`` keeps its own backward and jvp; without a
    jvp, forward mode is the transpose of its backward. Hooks that see gradients are errors. If a
    function reads ``requires_grad`` or similar attributes, it is traced a second time, and sees the
    values that they have if derivatives are taken with respect to all floating-point arguments.

    Tensors that ``f`` closes over are read at each call, so an optimizer step between two calls has
    its effect. Inside ``jax.jit`` they are constants of the compiled function, like all captured
    values in JAX. Python numbers, strings and flags are static: another value triggers a new trace.
    The same holds for all other values that ``f`` reads, as in `functx.jit`: closures, globals that
    its code names, attributes of modules and other objects, lists and dicts. After eight traces for
    one signature (for example because of a counter), a warning is given.

    With x64 off, ``f`` sees a JAX ``int32`` as torch's default ``int64``, and results computed from
    it wrap at 32 bits. For a function that ``torch.compile`` compiled, the original function is
    used. A write to an argument stays inside the call, with a warning, since the caller will not
    see it. Where a ``torch.distributions`` object would raise a ``ValueError``, all floating-point
    results are NaN, since JAX compiles before it sees data.

    Args:
        f: a torch function of pytrees of tensors, a module, or a program of ``torch.export``.
        rng: whether ``f`` draws random numbers. The JAX function then takes a ``jax.random`` key,
            before all other arguments or as ``rng=``. Equal keys give equal draws, also in a
            recompute. Under ``jax.vmap``, keys that are mapped over give each example its own
            draws. Within ``f``, draws repeat where torch's would: if a generator's state is
            restored.
        buffers: whether the buffers of a module are arguments and results too. This is needed if
            the module writes to them (as normalisation layers in training do).
        scan: whether consecutive regions with the same code become one ``lax.scan`` over their
            stacked parameters, which is traced and compiled once. For a module, it may select
            submodules, as for :func:`functx.apply_remat` (``"layers.*"``). These need not be
            regions, and then nothing is recomputed.

    Returns:
        For a function, the JAX function. For a module, the pair ``(params, fn)``: its parameters by
        name as JAX arrays, and ``fn(params, *args, **kwargs)``. Buffers are closed over, unless
        ``params`` has their names too. Tied parameters appear once. With ``buffers``, the triple
        ``(params, buffers, fn)``, where ``fn(params, buffers, *args, **kwargs)`` returns
        ``(result, new_buffers)``.

    Raises:
        TypeError: if ``f`` is not callable; at a call, if given a torch tensor.
        ValueError: if ``f`` is not a module, and ``buffers`` is true or ``scan`` names submodules.
        LoweringError: at the first call with a new signature, if the function can't be expressed in
            JAX. The message lists every operation without a rule.

    Example:
        >>> import torch, jax, jax.numpy as jnp
        >>> from functx.compat import to_jax
        >>> square = to_jax(lambda x: (x * x).sum())
        >>> jax.jit(jax.grad(square))(jnp.arange(3.0)).tolist()
        [0.0, 2.0, 4.0]
        >>> params, fn = to_jax(torch.nn.Linear(3, 2))
        >>> {name: p.shape for name, p in params.items()}
        {'weight': (2, 3), 'bias': (2,)}
        >>> fn(params, jnp.ones((5, 3))).shape
        (5, 2)
        >>> params, buffers, fn = to_jax(torch.nn.BatchNorm1d(3), buffers=True)
        >>> y, buffers = fn(params, buffers, jnp.ones((5, 3)))
        >>> int(buffers["num_batches_tracked"])
        1
    """
    f = original_of(f)
    module = as_module(f)
    if module is not None:
        params, state = state_of(module)
        make = function_with_buffers if buffers else function_of
        layers = [] if isinstance(scan, bool) else [*find(module, scan, "to_jax").values()]
        lowered = Lowered(make(module, layers), rng, scan is not False)
        return (params, state, lowered) if buffers else (params, lowered)
    if buffers:
        raise ValueError("to_jax: buffers=True needs a module; a function has no buffers")
    if not isinstance(scan, bool):
        raise ValueError(f"to_jax: scan={scan!r} needs a module; for a function use scan=True")
    if isinstance(f, jax.Array | torch.Tensor) or not callable(f):
        raise TypeError(
            f"to_jax takes a torch function, module or exported program, not {type(f).__name__};"
            " to convert an array use jnp.asarray"
        )
    if str(getattr(f, "__module__", "")).split(".")[0] == "jax":
        raise TypeError(
            f"to_jax takes a torch function, but {f!r} is a JAX function: call it directly"
        )
    return Lowered(f, rng, scan)


@dataclass(frozen=True)
class Signature:
    """The trace of a function for one signature."""

    program: FunctionalGraph
    environment: Environment
    # For each leaf of the result, (True, index of an output) or (False, a static value).
    out_leaves: tuple[tuple[bool, Any], ...]
    out_tree: Any  # the structure of the result
    run: Callable[[Sequence[Any], Sequence[Any], Any], list[Any]]  # takes inputs, captures, key

    def result(self, outputs: Sequence[Any]) -> Any:
        """The function's result from the graph's outputs."""
        leaves = [outputs[value] if traced else value for traced, value in self.out_leaves]
        return jax.tree_util.tree_unflatten(self.out_tree, leaves)


class Lowered:
    """A torch function as a JAX function; see :func:`to_jax`."""

    def __init__(self, f: Callable[..., Any], rng: bool = False, scan: bool = False) -> None:
        self.__wrapped__ = f
        self._rng = rng
        self._scan = scan
        self.__name__ = getattr(f, "__name__", type(f).__name__)
        self.__doc__ = getattr(f, "__doc__", None)
        self._programs: dict[tuple[Hashable, Hashable], Signature] = {}
        self._arrays: dict[int, tuple[torch.Tensor, jax.Array]] = {}

    def __repr__(self) -> str:
        return f"to_jax({self.__name__})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on pytrees of JAX arrays."""
        key, args, kwargs = self._split(args, kwargs)
        traced, arrays = self._prepare(args, kwargs)
        return traced.result(traced.run(arrays, self.captured(traced.program), key))

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        if not self._rng:
            return None, args, kwargs
        if _is_key(kwargs.get("rng")):
            return kwargs["rng"], args, {n: x for n, x in kwargs.items() if n != "rng"}
        if not args or not _is_key(args[0]):
            raise TypeError(
                f"{self!r} takes a jax.random key, such as jax.random.key(seed), as its first"
                " argument or as rng="
            )
        return args[0], args[1:], kwargs

    def observed(self, observe: Observe, *args: Any) -> Any:
        """Call without ``jit``; ``observe`` sees the operands of each outermost region."""
        traced, arrays = self._prepare(args, {})
        inputs = [*arrays, *self.captured(traced.program)]
        return traced.result(Interpreter(observe).run(traced.program.module, inputs))

    def program(self, *args: Any, **kwargs: Any) -> FunctionalGraph:
        """The traced program for these arguments."""
        return self._prepare(args, kwargs)[0].program

    def _prepare(self, args: Any, kwargs: dict[str, Any]) -> tuple[Signature, list[Any]]:
        while teach_jax((args, kwargs)):
            pass
        paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        leaves = [_leaf(self, path, leaf) for path, leaf in paths]
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        kinds = tuple(
            Spec(x.shape, to_torch_dtype(x.dtype)) if isinstance(x, jax.Array) else (type(x), x)
            for x in leaves
        )
        environment = Environment(self.__wrapped__)
        key = ((kinds, tree, x64_enabled()), environment.key)
        found = self._programs.get(key)
        if found is None or not unchanged(found.program.reads):
            traces = sum(signature == key[0] for signature, _ in list(self._programs))
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
                self._arrays.clear()
            found = _trace(
                self.__wrapped__, leaves, kinds, tree, environment, self._rng, self._scan
            )
            self._programs[key] = found
            if traces == _MANY_TRACES:
                warn(
                    f"{self!r} has been traced {_MANY_TRACES} times for arguments of one signature,"
                    " because a value that it closes over (a number, a list, a global counter)"
                    " changes from call to call. Pass this value as an array"
                )
        return found, arrays

    def captured(self, program: FunctionalGraph) -> list[jax.Array]:
        """The current values of the tensors that a program closes over.

        If the values of a tensor do not change, calls get the same array, so that ``jit`` has one
        constant for it.
        """
        what = f"a tensor closed over by {self.__name__}"
        arrays = []
        for t in program.captures:
            _, held = self._arrays.get(id(t), (t, None))
            arrays.append(array_from_torch(t, what, held))
            self._arrays[id(t)] = t, arrays[-1]
        return arrays


def _is_key(x: Any) -> bool:
    return is_key(x) or (isinstance(x, jax.Array) and x.dtype == jnp.uint32 and x.ndim == 1)


def _leaf(f: Lowered, path: Any, x: Any) -> Any:
    where = f"{f.__name__}: the argument at {jax.tree_util.keystr(path)}"
    if isinstance(x, torch.Tensor):
        raise TypeError(
            f"{where} is a torch tensor, but a function made by to_jax takes JAX arrays. Convert it"
            " with jnp.asarray(x.numpy()), or call the original torch function"
        )
    if isinstance(x, jax.Array):
        if is_key(x):
            return words_of_jax(x, where)
        # Weak types would change the dtypes of results, and the carry of a scan must keep its type.
        return jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x
    if isinstance(x, np.ndarray | np.generic):
        check_fits(np.asarray(x), where)
        return jnp.asarray(x)
    try:
        hash(x)
    except Exception:  # __hash__ may raise any error
        raise TypeError(
            f"{where} is a {type(x).__name__}, which is neither an array nor hashable. Register it"
            " as a JAX pytree, or make it hashable to pass it as a static value"
        ) from None
    return x


def _trace(
    f: Callable[..., Any],
    leaves: list[Any],
    kinds: Sequence[Any],
    tree: Any,
    environment: Environment,
    rng: bool,
    scan: bool,
) -> Signature:
    out_leaves: list[tuple[bool, Any]] = []
    out_tree: Any = None

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal out_tree
        feed = iter(tensors)
        full = [next(feed) if isinstance(x, jax.Array) else x for x in leaves]
        args, kwargs = jax.tree_util.tree_unflatten(tree, full)
        result = called(f, args, kwargs, name, LoweringError)
        while teach_jax(result):
            pass
        flat_result, out_tree = jax.tree_util.tree_flatten(result)
        outputs: list[torch.Tensor] = []
        out_leaves.clear()
        for leaf in flat_result:
            if isinstance(leaf, torch.Tensor):
                out_leaves.append((True, len(outputs)))
                outputs.append(leaf)
            elif isinstance(leaf, _STATIC):
                out_leaves.append((False, leaf))
            else:
                raise TypeError(
                    f"{getattr(f, '__name__', f)} returned a {type(leaf).__name__}, which is not a"
                    " pytree of JAX. Return tensors in tuples, lists, dicts or registered pytrees"
                    " (and call a Hugging Face model with use_cache=False, so that it returns no"
                    " cache)"
                )
        return outputs

    specs = [kind for kind in kinds if isinstance(kind, Spec)]
    name = getattr(f, "__name__", type(f).__name__)
    with TRACING, torch.enable_grad(), torch.inference_mode(False), lowering():
        program = trace(flat, [Spec(s.shape, s.dtype, environment.device) for s in specs], name)
    check(program, rng)
    for spec in specs:
        to_jax_dtype(spec.dtype)

    layers, why = layers_of(program.module.graph) if scan else ({}, "")
    if scan and not layers:
        warn(f"to_jax: scan has no effect on {name}, since no two layers can be one scan: {why}")

    def run(inputs: Sequence[Any], captures: Sequence[Any], key: Any) -> list[Any]:
        return Interpreter(rng=key, layers=layers).run(program.module, [*inputs, *captures])

    return Signature(program, environment, tuple(out_leaves), out_tree, jax.jit(run, inline=True))
