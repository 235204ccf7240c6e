"""The functorch stack, and tensors taken apart and put together, level by level.

A value "at level k" is wrapped by the levels 1 to k at most; level 0 is plain autograd. Modes see
nothing of wrapping and unwrapping, making duals aside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat, starmap
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from functx import _torch
from functx._torch import level_of
from functx._torch.graphs import same_value

GRAD, VMAP, JVP, FUNCTIONALIZE = "Grad", "Vmap", "Jvp", "Functionalize"
_KINDS = {getattr(_torch.TransformType, kind): kind for kind in (GRAD, VMAP, JVP, FUNCTIONALIZE)}
_RANDOMNESS = {getattr(_torch.RandomnessType, s.title()): s for s in ("error", "same", "different")}
_LEAVE = {
    GRAD: _torch.leave_grad,
    VMAP: _torch.leave_vmap,
    JVP: _torch.exit_jvp_nesting,
    FUNCTIONALIZE: _torch.leave_functionalize,
}
T = TypeVar("T")
alive = _torch.alive


class Frame:
    """One level: what it takes to enter one like it again, and to take its tensors apart.

    A *slot* says how a value of the level is made of values of the level below: ``None`` is one
    that does not belong to the level; for vmap the batch dimension; for grad whether it requires
    grad; for jvp whether it has a tangent, which is then a second value below.
    """

    def __init__(self, interpreter: Any) -> None:
        self.kind = _KINDS[interpreter.key()]
        self.size, self.randomness = 0, ""
        if self.kind is VMAP:
            vmap = _torch.vmap_interpreter(interpreter)
            self.size, self.randomness = vmap.batchSize(), _RANDOMNESS[vmap.randomness()]
        elif self.kind is FUNCTIONALIZE:
            functionalize = _torch.functionalize_interpreter(interpreter)
            self.reapply_views = functionalize.functionalizeAddBackViews()

    def enter(self) -> int:
        """Enter such a level; returns its number."""
        if self.kind is GRAD:
            return _torch.enter_grad()
        if self.kind is VMAP:
            return _torch.enter_vmap(self.size, self.randomness)
        if self.kind is FUNCTIONALIZE:
            return _torch.enter_functionalize(self.reapply_views)
        level = _torch.enter_jvp_nesting()
        if fwAD._current_level < 0:  # one dual level serves all nested ones, as in torch.func.jvp
            fwAD.enter_dual_level()
        _torch.set_fwd_grad_enabled(True)
        return level

    def lower(self, t: Tensor, level: int) -> tuple[tuple[Tensor, ...], Any]:
        """The values one level down that make ``t``, and its slot."""
        if level_of(t) != level:
            return (t,), None
        if self.kind is VMAP:
            value, dim = _torch.unwrap_batch(t, level)
            return (value,), dim
        if self.kind is FUNCTIONALIZE:
            _torch.sync(t)
            return (_torch.unwrap_functional(t, self.reapply_views),), True
        value = _torch.unwrap_grad(t, level)
        if self.kind is GRAD:
            return (value,), t.requires_grad
        tangent = at_depth(level, lambda: fwAD.unpack_dual(t).tangent)
        if tangent is None:
            return (value,), False
        return (value, _torch.unwrap_grad(tangent, level)), True

    def lift(self, values: Sequence[Tensor], slot: Any, level: int) -> Tensor:
        """The value that ``values`` make, one level up."""
        if slot is None:
            return values[0]
        if self.kind is VMAP:
            return _torch.wrap_batch(values[0], slot, level)
        if self.kind is FUNCTIONALIZE:
            return _torch.wrap_functional(values[0], level)
        wrapped = [_torch.wrap_grad(value, level) for value in values]  # with its tangent, if any
        return wrapped[0] if len(wrapped) == 1 else at_depth(level, lambda: _dual(*wrapped))

    def width(self, slot: Any) -> int:
        """The number of values one level down that make a value with this slot."""
        return 2 if slot and self.kind is JVP else 1

    def lower_all(self, values: list[Tensor], level: int) -> tuple[list[Tensor], list[Any]]:
        """The values one level down that make ``values``, and the slots of ``values``."""
        lowered = [self.lower(t, level) for t in values]
        return [t for below, _ in lowered for t in below], [slot for _, slot in lowered]

    def lift_all(self, values: Sequence[Tensor], slots: list[Any], level: int) -> list[Tensor]:
        """The values, one level up, that ``values`` make."""
        it = iter(values)
        return [self.lift([next(it) for _ in range(self.width(s))], s, level) for s in slots]


def _dual(t: Tensor, tangent: Tensor) -> Tensor:
    if 0 in t.stride() and t.numel() > 1:  # torch refuses duals of expanded memory
        t = t.contiguous()
    with torch.enable_grad():  # a stand-in may be made while grad mode is off
        return fwAD.make_dual(t, tangent)


def frames() -> list[Frame]:
    """The active levels, outermost first."""
    return [Frame(i) for i in _torch.interpreter_stack() or ()]


def has_jvp() -> bool:
    """Whether a jvp level is active."""
    return any(i.key() == _torch.TransformType.Jvp for i in _torch.interpreter_stack() or ())


def at_depth(n: int, body: Callable[[], T]) -> T:
    """Call ``body`` with only the levels 1 to ``n`` active; returns its result."""
    depth = _torch.functorch_depth()
    if depth <= n:
        return body()
    popped: list[Any] = []
    try:
        # (All in one call of C code, because an interrupt between two calls would lose a level.)
        popped.extend(starmap(_torch.pop_layer, repeat((), depth - n)))
        return body()
    finally:
        leave_to(depth - len(popped))
        [*map(_torch.push_layer, reversed(popped))]


def leave_to(n: int) -> None:
    """End the levels above ``n``."""
    while _torch.functorch_depth() > n:
        _LEAVE[_KINDS[_torch.peek_interpreter().key()]]()


def require_grad(t: Tensor) -> Tensor:
    """Make a stand-in a leaf, inside of transforms as well."""
    return t.requires_grad_() if _torch.peek_interpreter() is None else _torch.require_grad(t)


def detached(t: Tensor) -> Tensor:
    """A plain tensor without its tape, made below all levels."""
    if _torch.peek_interpreter() is None and _torch.proxy_mode() is None:
        return t.detach()
    return at_depth(0, partial(same_value, t, t.detach))


def base_of(t: Tensor) -> Tensor:
    """The plain tensor inside of all wrappers."""
    while level_of(t) > 0:
        t = _torch.inner_of(t)
    return t


def inside(t: Tensor, depth: int) -> Tensor:
    """The tensor within the wrappers that ``t`` has at the levels above ``depth``."""
    while level_of(t) > depth:
        t = _torch.inner_of(t)
    return t


def rebased(t: Tensor, base: Tensor, depth: int = 0) -> Tensor:
    """``t`` with another tensor inside of its wrappers of the levels above ``depth``."""
    level = level_of(t)
    if level <= depth:
        return base
    if _torch.is_batched(t):
        value, dim = _torch.unwrap_batch(t, level)
        return _torch.wrap_batch(rebased(value, base, depth), dim, level)
    return _torch.wrap_grad(rebased(_torch.unwrap_grad(t, level), base, depth), level)


def is_mapped_only(t: Tensor, depth: int) -> bool:
    """Whether all levels above ``depth`` that ``t`` belongs to are levels of ``vmap``."""
    while level_of(t) > depth:
        if not _torch.is_batched(t):
            return False
        t = _torch.inner_of(t)
    return True


def are_one(t: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors are the same object, or the same elements of the same memory."""
    if t is other:
        return True
    if level_of(t) > 0 or level_of(other) > 0 or not _torch.is_dense(t) or _torch.tracing():
        return False
    looks = [
        (x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg(), x.data_ptr())
        for x in (t, other)
    ]
    return looks[0] == looks[1]


def has_no_node(t: Tensor) -> bool:
    """Whether no node has made ``t``.

    For a view that was made and written under ``no_grad()``, torch raises an error instead. No node
    has made such a view.
    """
    try:
        return t.grad_fn is None
    except RuntimeError as error:
        if "created in no_grad mode" not in str(error):
            raise
        return True


def is_tracked(t: Tensor) -> bool:
    """Whether some level has ``t`` on its tape.

    ``vmap`` has no tape: a mapped tensor requires grad only if `requires_grad_()` was called on it,
    and nothing that is computed from it does.
    """
    while not t.requires_grad or _torch.is_batched(t):
        if level_of(t) <= 0:
            return False
        t = _torch.inner_of(t)
    return True
