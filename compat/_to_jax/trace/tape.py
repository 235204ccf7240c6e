"""What a function asks of its tape while it is traced.

A trace needs no tape: JAX takes the derivatives, of whatever it is asked for later.  So a traced
value does not require grad, and a function that branches on that would be traced on the wrong side
of its branch.

NOTE [asked]
A function that asks is traced once more, with every floating-point input on a tape: torch's own
answers are then those that it gives where derivatives are taken of all of them.  What asks: reading
``requires_grad``, ``is_leaf`` or ``grad_fn``, ``retain_grad``, and ``autograd.grad`` with respect
to what has no tape.  Hooks that see gradients are refused: JAX's derivatives would leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functx import _torch as engine
from functx._errors import LoweringError
from functx.compat._torch import (
    FakeTensor,
    apply_function,
    called_by,
    is_functorch_wrapped,
    map_tensors,
    saved_tensors_hooks,
)

_T: Any = torch.Tensor
_REQUIRES_GRAD, _IS_LEAF, _GRAD_FN = (
    _T.requires_grad.__get__,
    _T.is_leaf.__get__,
    _T.grad_fn.__get__,
)
_SETS = (_T.requires_grad_, _T.requires_grad.__set__)
_HOOKS = (_T.register_hook, _T.register_post_accumulate_grad_hook)
ASKS = {
    _REQUIRES_GRAD,
    _IS_LEAF,
    _GRAD_FN,
    *_SETS,
    *_HOOKS,
    _T.retain_grad,
}
WITHOUT_TAPE = ("does not require grad", "doesn't require gradient")
"""What torch says where a derivative is asked for of what is on no tape."""
_OWN_CALLERS = (
    *("torch._", "torch.fx", "torch.fx.passes.shape_prop"),
    *("torch.autograd.function", "torch.autograd"),
)


def _refuse_hook(name: str) -> None:
    raise LoweringError(
        f"{name}: JAX's derivatives would leave the hook out silently; put what it does to"
        " gradients into an autograd.Function"
    )


class Asked(BaseException):
    """The function asked for its tape, and has none.  ``NOTE [asked]``."""


class _Enter(engine.SingleLevelFunction):
    """Puts a tensor on a tape as it is, without an operation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[None, None]:
        """The tape begins here."""
        return None, None


class _Watched:
    """A node of the tape as the function sees it: what is hung on it, JAX would not see."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            _refuse_hook(f"{name} of a grad_fn")
        return getattr(self._node, name)


class Tape:
    """Answers what a function asks of its tape.

    Args:
        kept: whether inputs are on a tape.
    """

    def __init__(self, kept: bool) -> None:
        self._kept = kept
        self._inputs: dict[int, torch.Tensor] = {}
        self._around = saved_tensors_hooks()

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Put the inputs on the tape, if there is to be one."""
        for x in inputs if self._kept else ():
            if _differentiable(x):
                with engine.without_proxies():
                    token = torch.zeros((), requires_grad=True)
                apply_function(_Enter, x, token)
                x.retain_grad()
                self._inputs[id(x)] = x

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Answer one of `ASKS`."""
        x = args[0]
        if not isinstance(x, FakeTensor) or is_functorch_wrapped(x):
            return func(*args, **kwargs)
        if func in _HOOKS:
            _refuse_hook(func.__name__)
        if func in _SETS:
            return self._set(x, func, args, kwargs)
        if func in (_REQUIRES_GRAD, _IS_LEAF, _GRAD_FN) and called_by(*_OWN_CALLERS):
            return func(x)
        if not self._kept and _differentiable(x):
            if func == _REQUIRES_GRAD and func(x):
                return True
            raise Asked
        if func == _IS_LEAF:
            return id(x) in self._inputs or func(x)
        if func == _GRAD_FN:
            node = None if id(x) in self._inputs else func(x)
            return None if node is None else _Watched(node)
        return func(*args, **kwargs)

    def _set(self, x: torch.Tensor, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flag = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
        if not flag and _differentiable(x):
            if not self._kept:
                raise Asked
            if x.requires_grad:
                raise LoweringError(
                    "requires_grad is set to False for a value that derivatives may be taken of:"
                    " JAX can't be told so afterwards; use x.detach(), or torch.no_grad()"
                )
        return func(*args, **kwargs)

    def saves(self, arguments: Any) -> None:
        """Refuse hooks that may change what a tape saves: JAX would not ask them."""
        hooks = saved_tensors_hooks()
        if hooks is None or hooks == self._around:
            return
        module = str(getattr(hooks[0], "__module__", None))
        if module == "torch.utils.checkpoint" or module.partition(".")[0] == "functx":
            return
        taped: list[bool] = []
        map_tensors(lambda t: taped.append(t.requires_grad), arguments)
        if module != "torch.autograd.graph" or any(taped):  # save_on_cpu changes nothing
            raise LoweringError(
                "torch.autograd.graph.saved_tensors_hooks inside the function: JAX's derivatives"
                " would not go through them; use functx.remat with a policy in their place"
            )


def _differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
