"""Nested derivatives of normalisation layers, taken from their definition.

torch's formulas for the derivatives of layer_norm, batch_norm and instance_norm read the saved mean
and deviation, which carry no derivative. So many derivatives beyond the first are silently wrong
(torch 2.11 to 2.14): forward mode differentiated again, ``grad(vmap(grad))`` and ``jacrev(jacrev)``
with respect to weights, and the third order in reverse mode. Where derivatives nest inside a functx
transform, functx therefore returns the value that torch computes, with the derivatives of the
layer's definition.

NOTE [one dtype]
Under autocast on a CPU, and in a model that mixes dtypes, a normalisation gets an input in bfloat16
and a weight in float32. torch's kernels accept that, but its rules for ``vmap`` do not.
Under ``vmap(grad)`` and ``jacrev``, layer_norm, instance_norm and batch_norm raise "expected scalar
type BFloat16 but found Float". group_norm raises "Expected scalar types of X and dY are same" where
no second derivative is recorded. So under these transforms the layer runs in the wider dtype, and
its result is rounded to the dtype of the input. The kernel does the same without ``vmap``.

What could be improved: where derivatives nest, a layer is computed twice, once by torch's kernel
for the value and once by the definition for the derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from functx import _torch
from functx._core import tree as _tree

# How normalisations are treated. Each level includes the ones before it.
IN_ONE_DTYPE = 1  # see NOTE [one dtype]
BY_DEFINITION = 2  # nested derivatives are those of the definition
STANDING_IN = 3  # the same, inside `standing_in`


def around(tree: Any, *, once: bool = False) -> AbstractContextManager[Any]:
    """The function mode that a transform enters while its function runs.

    It is `NormsByDefinition` if another derivative may be taken around this one. Plain autograd may
    always do so, since the function may read tensors in addition to its arguments.

    Args:
        tree: the arguments of the transform.
        once: whether the transform takes one pullback, without ``vmap``. torch's second derivative
            is right in that case, so no mode is needed unless an argument requires a gradient.
    """
    may_be_mapped = not once or _torch.functorch_depth() > 0
    follows = _levels() > 0
    if not follows and torch.is_grad_enabled():
        follows = may_be_mapped or _any_requires_grad(_tree.leaves(tree))
    if follows:
        return NormsByDefinition()
    return NormsInOneDtype() if may_be_mapped else nullcontext()


def are_defined() -> int:
    """How normalisations are treated here, by a mode or by a region that acts like one."""
    return max((getattr(mode, "norms", 0) for mode in _modes()), default=0)


def _modes() -> Iterator[Any]:
    return map(_torch.function_mode_at, range(_torch.function_depth()))


class NormsByDefinition(TorchFunctionMode):
    """Takes the derivatives of normalisations from their definition, where they nest."""

    norms, active = BY_DEFINITION, True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.active and func in NORMALISATIONS:
            return normalised(func, args, kwargs or {}, max(self.norms, are_defined()))
        return func(*args, **kwargs) if kwargs else func(*args)


class NormsInOneDtype(NormsByDefinition):
    """Runs normalisations of mixed dtypes in one dtype; see NOTE [one dtype]."""

    norms = IN_ONE_DTYPE


class _StandingIn(NormsByDefinition):
    norms = STANDING_IN


@contextmanager
def standing_in() -> Iterator[None]:
    """Enter this around a `functx.grad` that replaces a derivative taken outside.

    Inside, the two count as one derivative.
    """
    outside = [mode for mode in _modes() if isinstance(mode, NormsByDefinition) and mode.active]
    for mode in outside:  # torch would call these modes as well
        mode.active = False
    try:
        with _StandingIn():
            yield
    finally:
        for mode in outside:
            mode.active = True


def normalised(func: Any, args: Any, kwargs: Any, norms: int) -> Any:
    """Run a normalisation; where derivatives nest, with the derivatives of its definition."""
    if (wide := _widened(func, args, kwargs)) is not None:
        x, args, kwargs = wide
        return normalised(func, args, kwargs, norms).to(x.dtype)
    out = func(*args, **kwargs)
    if norms < BY_DEFINITION:
        return out
    # This must give the same answer in a region's forward and in its replays.
    n = _levels() - (norms == STANDING_IN)
    nests = n > 1 or (n == 1 and _any_requires_grad((out, *args, *kwargs.values())))
    if not nests or (exact := _definition(func, args, kwargs)) is None:
        return out
    exact = exact.to(out.dtype)
    return out.detach() + (exact - exact.detach())


def mixes_dtypes(func: Any, operands: Sequence[Any]) -> bool:
    """Whether ``func`` is a normalisation called with several dtypes; see NOTE [one dtype]."""
    if func not in NORMALISATIONS:
        return False
    return len({t.dtype for t in operands if isinstance(t, Tensor)}) > 1


def _widened(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Any, Any] | None:
    """The input of a call, and the arguments with the input in the dtype of weight or statistics.

    ``None`` if the input has that dtype already, or is not on a CPU.
    """
    named = dict(zip(NORMALISATIONS[func], args)) | kwargs
    x = named.get("input")
    if not isinstance(x, Tensor) or x.dtype not in _NARROW or x.device.type != "cpu":
        return None
    others = [named.get(name) for name in (*_AFFINE, *_STATISTICS)]
    wider = [t.dtype for t in others if isinstance(t, Tensor) and t.dtype != x.dtype]
    if not wider:
        return None
    wide = x.to(wider[0])
    return x, (wide, *args[1:]) if args else (), kwargs if args else kwargs | {"input": wide}


def _levels() -> int:
    """How many transforms that take derivatives are active; plain forward mode counts as one."""
    grad, jvp = _torch.TransformType.Grad, _torch.TransformType.Jvp
    active = [level.key() for level in _torch.interpreter_stack() or ()]
    plain = _torch.dual_level() >= 0 and jvp not in active
    return sum(key in (grad, jvp) for key in active) + plain


def _any_requires_grad(values: Sequence[Any]) -> bool:
    """Whether plain autograd tracks one of ``values``, below all transforms."""
    for t in values:
        while isinstance(t, Tensor) and _torch.level_of(t) > 0:
            t = _torch.inner_of(t)
        if isinstance(t, Tensor) and t.requires_grad:
            return True
    return False


def _definition(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """A normalisation by its definition; ``None`` where its statistics are constants."""
    named = dict(zip(NORMALISATIONS[func], args)) | kwargs
    x, weight, bias = named["input"], named.get("weight"), named.get("bias")
    if "normalized_shape" in named:
        shape = named["normalized_shape"]
        over = list(range(-len(shape), 0))
    elif "num_groups" in named:
        return None  # torch's derivatives of group_norm are right
    else:
        of_instances = "use_input_stats" in NORMALISATIONS[func]
        if not named.get("use_input_stats" if of_instances else "training", of_instances):
            return None
        over = [d for d in range(2 if of_instances else 0, x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    deviation = (x.var(over, correction=0, keepdim=True) + named.get("eps", 1e-5)).sqrt()
    x = (x - x.mean(over, keepdim=True)) / deviation
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


_NARROW = (torch.bfloat16, torch.float16)
_OF_LAYER = ("input", "normalized_shape", "weight", "bias", "eps")
_OF_GROUPS = ("input", "num_groups", "weight", "bias", "eps")
_STATISTICS, _AFFINE = ("running_mean", "running_var"), ("weight", "bias")
_OF_BATCH = ("training", "momentum", "eps")
_OF_INSTANCE = ("use_input_stats", "momentum", "eps")
NORMALISATIONS: dict[Any, tuple[str, ...]] = {
    F.layer_norm: _OF_LAYER,
    torch.layer_norm: _OF_LAYER,
    F.group_norm: _OF_GROUPS,
    torch.group_norm: _OF_GROUPS,
    F.batch_norm: ("input", *_STATISTICS, *_AFFINE, *_OF_BATCH),
    torch.batch_norm: ("input", *_AFFINE, *_STATISTICS, *_OF_BATCH),
    F.instance_norm: ("input", *_STATISTICS, *_AFFINE, *_OF_INSTANCE),
    torch.instance_norm: ("input", *_AFFINE, *_STATISTICS, *_OF_INSTANCE),
}
"""The functions, and the names of their parameters."""
