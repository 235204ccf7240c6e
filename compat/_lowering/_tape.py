"""What a function asks of its tape while it is traced, and the hooks that it puts there.

A trace needs no tape: JAX takes the derivatives, of whatever it is asked for later.  So a traced
value does not require grad, and a function that branches on that, or hangs a hook on a value, would
be traced on the wrong side of its branch.

NOTE [asked]
A function that asks is traced once more, with every floating-point input on a tape: torch's own
answers are then those that it gives where derivatives are taken of all of them.  What asks: reading
``requires_grad``, ``is_leaf`` or ``grad_fn``, ``register_hook``, ``retain_grad``, and
``autograd.grad`` with respect to what has no tape.

NOTE [tensor hooks]
A hook is a custom Function: the identity, with the hook for its backward (and none for forward
mode, which hooks don't see).  It stands right behind the value in the graph, before every other
user, also those that came before the hook; a later hook before an earlier one, since cotangents
come from the other side.  In second derivatives JAX asks it for parts of a gradient that torch has
added up first: a hook that is not linear has none.  What else listens on a tape (nodes, modules,
parameters) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Node, Proxy

from functx import _torch as engine
from functx._errors import LoweringError
from functx.compat._lowering._functions import HOOKED
from functx.compat._torch import (
    FakeTensor,
    apply_function,
    called_by,
    is_functorch_wrapped,
    map_tensors,
    saved_tensors_hooks,
    storage_key,
)

_T: Any = torch.Tensor
_REQUIRES_GRAD, _IS_LEAF, _GRAD_FN = (
    _T.requires_grad.__get__,
    _T.is_leaf.__get__,
    _T.grad_fn.__get__,
)
_SETS = (_T.requires_grad_, _T.requires_grad.__set__)
ASKS = {
    _REQUIRES_GRAD,
    _IS_LEAF,
    _GRAD_FN,
    *_SETS,
    _T.register_hook,
    _T.register_post_accumulate_grad_hook,
    _T.retain_grad,
}
WITHOUT_TAPE = ("does not require grad", "doesn't require gradient")
"""What torch says where a derivative is asked for of what is on no tape."""
_OWN_CALLERS = (
    *("torch._", "torch.fx", "torch.fx.passes.shape_prop"),
    *("torch.autograd.function", "torch.autograd"),
)
_INSTEAD = "put what they do to gradients into an autograd.Function"


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
            raise LoweringError(
                f"{name} of a grad_fn: JAX's derivatives would leave such hooks out silently;"
                f" use Tensor.register_hook, or {_INSTEAD}"
            )
        return getattr(self._node, name)


class _Handle:
    """What registering a hook gives; a hook that is gone again can't be said in a graph."""

    id = -1

    def remove(self) -> None:
        """Refused."""
        raise LoweringError(
            "a tensor hook is removed again inside the function: JAX can't follow when. Register"
            " it only where it is to act"
        )

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.remove()


class Tape:
    """Answers what a function asks of its tape.

    Args:
        kept: whether inputs are on a tape.
    """

    def __init__(self, kept: bool) -> None:
        self._kept = kept
        self._inputs: dict[int, torch.Tensor] = {}
        self._hooked: dict[int, tuple[torch.Tensor, Proxy, Proxy]] = {}
        self._views: dict[int, torch.Tensor] = {}
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

    def __call__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        sees: AbstractContextManager[Any],
    ) -> Any:
        """Answer one of `ASKS`; ``sees`` sees the calls of hooks."""
        x = args[0]
        if not isinstance(x, FakeTensor) or is_functorch_wrapped(x):
            return func(*args, **kwargs)
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
        if func is _T.register_post_accumulate_grad_hook:
            raise LoweringError(
                "register_post_accumulate_grad_hook: nothing accumulates in JAX, and the hook would"
                f" be left out silently; {_INSTEAD}"
            )
        if func is _T.register_hook:
            return self._hook(sees, *args, **kwargs)
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

    def _hook(
        self,
        sees: AbstractContextManager[Any],
        x: torch.Tensor,
        hook: Callable[[torch.Tensor], Any],
    ) -> _Handle:
        x.register_hook(hook)  # on the tape of the trace, which the function itself may pull back
        mode = engine.proxy_mode()
        if mode is not None:
            with sees:
                self._emit(x, hook, mode.tracer)
            if engine.view_base(x) is not None:
                self._views[storage_key(x)] = x
        return _Handle()

    def _emit(self, x: torch.Tensor, hook: Callable[[torch.Tensor], Any], tracer: Any) -> None:
        """``NOTE [tensor hooks]``."""
        now = tracer.unwrap_proxy(x)
        _, value, last = self._hooked.get(id(x), (x, now, now))
        if last.node is not now.node:  # written to since: another value
            value = last = now
        engine.track_proxies(x, value, tracer)
        users = list(value.node.users)  # of a second hook: the first one
        with torch.enable_grad():
            behind = tracer.unwrap_proxy(_hooked(hook, x, later=last is not value).apply(x))
        if users:
            function = behind.node.args[0]
            _move([*_constants(function), function, *function.users], value.node)
            for user in users:
                user.replace_input_with(value.node, behind.node)
        last = behind if last is value else last
        engine.track_proxies(x, last, tracer)
        self._hooked[id(x)] = (x, value, last)

    def written(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a write to memory of which a hooked value is a view: it is one no longer."""
        if any(storage_key(t) in self._views for t in tensors) if self._views else False:
            raise LoweringError(
                "a value with a tensor hook is a view of memory that is written to in place:"
                " hook a .clone() of it, or write before the hook is registered"
            )

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


def _hooked(hook: Callable[[torch.Tensor], Any], x: torch.Tensor, later: bool) -> Any:
    class TensorHook(torch.autograd.Function):
        later = False  # than another hook of this value

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            changed = hook(cotangent)
            return cotangent if changed is None else changed

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
            return tangent.view_as(tangent)

    setattr(TensorHook, HOOKED, x)
    TensorHook.later = later
    return TensorHook


def _constants(function: Node) -> list[Node]:
    return [n for n in function.all_input_nodes if n.op == "get_attr"]


def _move(nodes: Sequence[Node], value: Node) -> None:
    """Put nodes right behind a value."""
    moved = {*nodes, value}
    for node in nodes:
        late = [n for n in node.all_input_nodes if n not in moved and not n < value]
        if any(n.op == "call_function" for n in late):
            raise LoweringError(
                "a tensor hook reads what is computed after the value that it hangs on, and the"
                " value was used before: register the hook before the value is used"
            )
    last = value
    if value.op == "placeholder":
        last = [n for n in value.graph.nodes if n.op == "placeholder"][-1]
    for node in nodes:
        last.append(node)
        last = node
