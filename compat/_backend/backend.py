"""The transforms of functx for JAX arrays: the same names and options, implemented by JAX.

An option that has no meaning in JAX raises an error that says what to use instead. Options that
only decide when torch frees memory are accepted, since JAX decides this itself.
`functx._core.backend_dispatch` calls this module.

NOTE [names in JAX]
In JAX, giving a name is a separate operation, an identity. A policy is asked about each operation
before it is known whether a name will follow. So a policy of operations ignores names here: it has
decided about the value at the operation that computed it. A policy that needs both, such as
"everything except these names", has no counterpart in JAX and raises an error.

NOTE [jaxlib's flatten]
``tree_leaves`` and similar functions of jaxlib count their recursion depth, but do not decrease the
count after an exception (for a container that contains itself, or a dict whose keys can't be
sorted). With ``is_leaf``, one list that contains itself leaves the process 9 frames of stack. So
arguments that may be torch's are flattened by `functx._core.tree`. JAX then flattens one level of
each remaining leaf, which does not change the count.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name as name_of_jax

from functx import _torch
from functx import checkpoint_policies as ours
from functx._core import tree as _tree
from functx._insight import Residual, ShapeAndDtype
from functx._policies import Combined, Everything, Names
from functx.compat import _jax
from functx.compat._backend import jax_loops as _jax_loops
from functx.compat._bridge import is_key
from functx.compat._jax import is_tracing

Function = Callable[..., Any]
JaxPolicy = Function

_TORCH, _JAX = "torch tensor", "JAX array"


def find(api: str, args: Any, kwargs: Any) -> ModuleType | None:
    """The module with the transforms for these arguments: this one if there are JAX arrays.

    Without any arrays, it is also this one if JAX is tracing, since the function may close over
    tracers. ``None`` means torch.

    Raises:
        TypeError: there are both torch tensors and JAX arrays. Typed random keys do not count.
    """
    found = [*_arrays_in((args, kwargs))]
    kinds = {kind for kind, _ in found}
    if len(kinds) > 1:
        if all(is_key(x) for kind, x in found if kind == _JAX):
            return None
        raise TypeError(_mixed(api, args, kwargs))
    if _JAX in kinds or (not kinds and is_tracing() and not _torch.tracing()):
        return sys.modules[__name__]
    return None


def _arrays_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """The arrays in a tree, each with its kind; see NOTE [jaxlib's flatten]."""
    for leaf in _tree.leaves(tree):
        cls: Any = type(leaf)
        if (kind := _kind(cls)) is not None:
            yield kind, leaf
        elif (parts := _parts(leaf)) is not None:
            yield from _arrays_in(parts)


def _parts(leaf: Any) -> list[Any] | None:
    """The children of an object whose class is a pytree only for JAX; ``None`` for others."""
    try:
        found = jax.tree_util.default_registry.flatten_one_level(leaf)
    except (TypeError, ValueError):  # the flatten function of the class raised it
        return None
    return None if found is None else [*found[0]]


@functools.lru_cache(1024)
def _kind(cls: Any) -> str | None:
    if issubclass(cls, torch.Tensor):
        return _TORCH
    return _JAX if issubclass(cls, (jax.Array, jax.core.Tracer)) else None


def _named(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The arrays in a tree, each with its path."""
    for path, leaf in zip(_tree.paths(tree), _tree.leaves(tree)):
        cls: Any = type(leaf)
        if _kind(cls) is not None:
            yield f"{name}{path}", leaf
        elif (parts := _parts(leaf)) is not None:
            yield from _named(parts, f"{name}{path}")


def _mixed(api: str, args: Any, kwargs: Any) -> str:
    found = [*_named(args, "args")]
    for name, value in kwargs.items():
        found += _named(value, name)
    what = ", ".join(
        f"{name} is a {_TORCH if isinstance(x, torch.Tensor) else _JAX}"
        for name, x in found
        if isinstance(x, (torch.Tensor, jax.Array))
    )
    return (
        f"functx.{api}: one call can't have both torch tensors and JAX arrays: {what}. Convert the"
        " arrays (torch.from_dlpack, jax.numpy.asarray), or convert the function"
        " (functx.compat.from_jax or functx.compat.to_jax). The function may close over arrays that"
        " are not differentiated"
    )


def _refuse(api: str, option: str, value: Any, default: Any, instead: str) -> None:
    if value is not default and value != default:
        raise TypeError(
            f"functx.{api}: {option}={value!r} has no meaning for JAX arrays; {instead}"
        )


def _without(transform: Function, option: str, default: Any, instead: str) -> Function:
    """A transform of JAX that accepts an option of torch only at its default."""

    def chosen(*args: Any, **options: Any) -> Any:
        _refuse(transform.__name__, option, options.pop(option, default), default, instead)
        return transform(*args, **options)

    return chosen


_KEYS = "JAX draws from explicit keys: split the key, and map over the keys"
_MAP = "use jax.lax.map(..., batch_size=)"

grad, value_and_grad, linearize, hessian = jax.grad, jax.value_and_grad, jax.linearize, jax.hessian
jvp = _without(jax.jvp, "strict", False, "JAX returns zeros for results that do not depend on x")
jacrev = _without(jax.jacrev, "chunk_size", None, f"{_MAP} of the pullback")
jacfwd = _without(jax.jacfwd, "randomness", "error", _KEYS)
remat_scan, remat_loop = _jax_loops.scan, _jax_loops.loop


def vmap(
    func: Function,
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Function:
    """``jax.vmap``, where keyword arguments are not mapped over, as in torch."""
    _refuse("vmap", "randomness", randomness, "error", _KEYS)
    _refuse("vmap", "chunk_size", chunk_size, None, _MAP)

    def batched(*args: Any, **kwargs: Any) -> Any:
        f = functools.partial(func, **kwargs) if kwargs else func
        return jax.vmap(f, in_axes=in_dims, out_axes=out_dims)(*args)

    return batched


def grad_and_value(func: Function, argnums: Any = 0, has_aux: bool = False) -> Any:
    """``jax.value_and_grad`` with the results in the opposite order."""
    transformed = jax.value_and_grad(func, argnums, has_aux)
    return lambda *args, **kwargs: transformed(*args, **kwargs)[::-1]


def vjp(func: Function, *primals: Any, has_aux: bool = False) -> Any:
    """``jax.vjp``; its pullback can always be called again, and differentiated."""
    transform: Any = jax.vjp
    output, pullback, *aux = transform(func, *primals, has_aux=has_aux)

    def vjp_fn(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        return pullback(cotangents)

    return (output, vjp_fn, *aux)


def can_scan(state: Any) -> bool:
    """Whether all leaves of a loop's state are arrays. A Python number must stay one."""
    return all(map(_is_array, jax.tree_util.tree_leaves(state)))


def checkpoint_name(x: Any, name: str) -> Any:
    """``jax.ad_checkpoint.checkpoint_name``."""
    return jax.tree.map(lambda a: name_of_jax(a, name) if _is_array(a) else a, x)


def remat(f: Function, policy: Any = None) -> Function:
    """``jax.checkpoint``, where leaves that are not arrays are static, as in torch."""
    translated = _jax_policy(policy)

    def rematted(*args: Any, **kwargs: Any) -> Any:
        arrays, join = _parted((args, kwargs))
        join_results: Any = None

        def flat(arrays: list[Any]) -> list[Any]:
            nonlocal join_results
            inner_args, inner_kwargs = join(arrays)
            outs, join_results = _parted(f(*inner_args, **inner_kwargs))
            return outs

        outs = jax.checkpoint(flat, policy=translated)(arrays)
        return join_results(outs)

    return rematted


def _parted(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays among the leaves, and a function that rebuilds the tree from such arrays."""
    leaves, spec = jax.tree_util.tree_flatten(tree)
    others = [None if _is_array(x) else (x,) for x in leaves]

    def joined(arrays: list[Any]) -> Any:
        it = iter(arrays)
        full = [next(it) if x is None else x[0] for x in others]
        return jax.tree_util.tree_unflatten(spec, full)

    return [x for x in leaves if _is_array(x)], joined


def saved_residuals(f: Function, *args: Any, **kwargs: Any) -> list[Any]:
    """The list that ``jax.ad_checkpoint.print_saved_residuals`` prints, as `Residual` s."""
    found = []
    for value, text in _jax.saved_residuals(f, *args, **kwargs):
        source = text.removeprefix("from ").removeprefix("the ")
        named = re.match(r"named '(.*?)' from", source)
        made = re.match(r"output of (jitted function '.*?'|\S+) from", source)
        kind = "argument" if source.startswith("argument") else "constant"
        residual = Residual(
            ShapeAndDtype(tuple(value.shape), value.dtype),
            source,
            nbytes=math.prod(value.shape) * value.dtype.itemsize,
            kind="named" if named else "output" if made else kind,
            names=(named[1],) if named else (),
            operation="name" if named else made[1] if made else "",
        )
        found.append(residual)
    return found


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _jax_policy(policy: Any) -> JaxPolicy | None:
    """The policy of ``jax.checkpoint`` with the same meaning.

    Raises:
        TypeError: JAX has no such policy.
    """
    if policy is None:
        return None
    translated = _translate(policy)
    if translated is None:
        raise TypeError(
            f"functx.remat: policy={policy!r} has no counterpart for JAX arrays. These policies of"
            " functx.checkpoint_policies have one: those that are in jax.checkpoint_policies too"
            " (except save_anything_except_these_names), their combinations by |, and combinations"
            " by & and ~ of those that do not depend on names"
        )
    return translated


def _translate(policy: Any) -> JaxPolicy | None:
    policies = jax.checkpoint_policies
    match policy:
        case ours.dots_saveable:
            return policies.dots_saveable
        case ours.dots_with_no_batch_dims_saveable:
            return policies.dots_with_no_batch_dims_saveable
        case Everything(saved):
            return policies.everything_saveable if saved else policies.nothing_saveable
        case Names(names, others=True):
            return policies.save_any_names_but_these(*names)
        case Names(names):
            return policies.save_only_these_names(*names)
        case Combined("offload", (ours.dots_with_no_batch_dims_saveable,)):
            return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        case Combined("offload", (Names(names, others=False),)):
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=sorted(names),
                offload_src="device",
                offload_dst="pinned_host",
            )
        case Combined("|", (first, second)):
            return _combined(_translate(first), _translate(second), lambda a, b: a or b)
        case Combined("&", (first, second)) if not policy.reads_names:
            both = _combined(_translate(first), _translate(second), lambda a, b: a and b)
            return _combined(_not_a_name, both, lambda a, b: a and b)
        case Combined("~", (inner,)) if not policy.reads_names:  # NOTE [names in JAX]
            return _combined(_not_a_name, _translate(inner), lambda a, b: a and not b)
    return None


def _combined(
    first: JaxPolicy | None, second: JaxPolicy | None, rule: Callable[[Any, Any], Any]
) -> JaxPolicy | None:
    if first is None or second is None:
        return None

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        answers = (p(primitive, *avals, **params) for p in (first, second))
        # JAX's answer "recompute" is an object, which would count as true.
        return rule(*(type(x).__name__ != "RecomputeType" and x for x in answers))

    return policy


def _not_a_name(primitive: Any, *avals: Any, **params: Any) -> bool:
    return bool(primitive.name != "name")
