"""``to_jax``: a torch function as a JAX function.

The function is traced once for each signature (structure, shapes, dtypes, static arguments, and
what ``environment`` sees around it), lowered, and kept.  Tensors that it closes over are no part of
the trace: their values are read at every call, as in torch.
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

    The result takes and returns pytrees of JAX arrays in place of torch tensors and works under
    ``jax.jit``, ``grad``, ``vmap``, ``jvp``, ``vjp``, ``hessian``, ``lax.scan`` and
    ``jax.checkpoint``.  A :func:`functx.remat` region inside becomes ``jax.checkpoint`` at the same
    cut.  Gradients stop where torch's stop: at ``detach`` and in ``no_grad`` blocks.  A custom
    ``autograd.Function`` keeps its own backward and jvp; without a jvp, forward mode is the
    transpose of its backward.  Hooks that see gradients are refused.  A function that asks for
    ``requires_grad`` and the like, which is traced twice then, is answered as if derivatives were
    taken of all its floating-point arguments.

    Tensors that ``f`` closes over are read at each call, so an optimizer step between two calls is
    seen; inside ``jax.jit`` they are constants of the compiled function, as any closure in JAX.
    Python numbers, strings and flags are static: another value traces again.  So it is with what
    ``f`` reads otherwise, as in `functx.jit`: closures, globals that its code names, attributes of
    modules and other objects, lists and dicts (after eight traces, of a counter say, it warns).
    With x64 off a JAX ``int32`` is seen by ``f`` as torch's default ``int64``, and what is computed
    of it wraps at 32 bits.  Of what ``torch.compile`` made the original is taken.  A write to an
    argument stays inside the call (with a warning, since the caller will not see it).  What a
    ``torch.distributions`` object refuses with a ``ValueError`` makes all floating-point results
    NaN, since JAX compiles before it sees data.

    Args:
        f: a torch function of pytrees of tensors, a module, or what ``torch.export`` made of one.
        rng: whether ``f`` draws random numbers.  The JAX function then takes a ``jax.random`` key,
            before all other arguments or as ``rng=``.  Equal keys give equal draws, also in a
            recompute; under ``jax.vmap``, keys that are mapped over give each example its own.
            Within ``f`` draws repeat where torch's would: at a generator's restored state.
        buffers: whether a module's buffers are arguments and results too.  Needed where it writes
            to them (the running statistics of normalisation layers in training).
        scan: whether regions of the same code that follow each other become one ``lax.scan`` over
            their stacked parameters, which is traced and compiled once.  Of a module it may say
            which submodules, as for :func:`functx.apply_remat` (``"layers.*"``): these need not be
            regions otherwise, and nothing is recomputed then.

    Returns:
        For a function, the JAX function.  For a module the pair ``(params, fn)``: its parameters by
        name as JAX arrays, and ``fn(params, *args, **kwargs)``; buffers are closed over, unless
        ``params`` has their names too.  Parameters that are tied are one.  With ``buffers`` the
        triple ``(params, buffers, fn)``, and ``fn(params, buffers, *args, **kwargs)`` returns
        ``(result, new_buffers)``.

    Raises:
        TypeError: if ``f`` is not callable; at a call, if given a torch tensor.
        ValueError: for ``buffers`` without a module, or submodules to ``scan`` of none.
        LoweringError: at the first call with a new signature, if the function can't be expressed:
            the message lists every operation without a rule.

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
        raise ValueError("to_jax(f, buffers=True) is for modules: a function has no buffers")
    if not isinstance(scan, bool):
        raise ValueError("to_jax(f, scan=WHERE) is for modules; a function takes scan=True")
    if isinstance(f, jax.Array | torch.Tensor) or not callable(f):
        raise TypeError(
            f"to_jax takes a torch function, module or exported program, not {type(f).__name__};"
            " to convert an array use jnp.asarray"
        )
    if str(getattr(f, "__module__", "")).split(".")[0] == "jax":
        raise TypeError(f"to_jax takes a torch function; {f!r} is one of JAX's: call it as it is")
    return Lowered(f, rng, scan)


@dataclass(frozen=True)
class Signature:
    """One traced signature of a function."""

    program: FunctionalGraph
    environment: Environment
    out_leaves: tuple[tuple[bool, Any], ...]  # (True, number among the outputs), (False, value)
    out_tree: Any  # the structure of the result
    run: Callable[[Sequence[Any], Sequence[Any], Any], list[Any]]  # of inputs, captures and key

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
                f"{self!r} takes a jax.random key, as its first argument or as rng=:"
                " jax.random.key(seed)"
            )
        return args[0], args[1:], kwargs

    def observed(self, observe: Observe, *args: Any) -> Any:
        """Call without ``jit``, showing the operands of each outermost region to ``observe``."""
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
            how = environment, self._rng, self._scan
            found = _trace(self.__wrapped__, leaves, kinds, tree, *how)
            self._programs[key] = found
            if traces == _MANY_TRACES:
                warn(
                    f"{self!r} has been traced {_MANY_TRACES} times for arguments of one signature:"
                    " what it closes over (a number, a list, a global counter) is another one at"
                    " each call. Pass what changes as an array"
                )
        return found, arrays

    def captured(self, program: FunctionalGraph) -> list[jax.Array]:
        """The current values of the tensors that a program closes over.

        Calls share the array of a tensor that keeps its values: one ``jit`` has it as one constant.
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
            f"{where} is a torch tensor, but a function made by to_jax takes JAX arrays: convert it"
            " with jnp.asarray(x.numpy()), or call the torch function itself"
        )
    if isinstance(x, jax.Array):
        if is_key(x):
            return words_of_jax(x, where)
        # Weak types would leak into results, and a scan's carry must keep its type.
        return jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x
    if isinstance(x, np.ndarray | np.generic):
        check_fits(np.asarray(x), where)
        return jnp.asarray(x)
    try:
        hash(x)
    except Exception:  # __hash__ may raise any error
        raise TypeError(
            f"{where} is a {type(x).__name__}, neither an array nor hashable; register it as a JAX"
            " pytree, or make it hashable to pass it as a static value"
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
                    f"{getattr(f, '__name__', f)} returned a {type(leaf).__name__}, which JAX can't"
                    " take apart: return tensors in tuples, lists, dicts or registered pytrees (and"
                    " no cache: call a Hugging Face model with use_cache=False)"
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
        warn(f"to_jax: no two layers of {name} become one scan: {why}")

    def run(inputs: Sequence[Any], captures: Sequence[Any], key: Any) -> list[Any]:
        return Interpreter(rng=key, layers=layers).run(program.module, [*inputs, *captures])

    return Signature(program, environment, tuple(out_leaves), out_tree, jax.jit(run, inline=True))
