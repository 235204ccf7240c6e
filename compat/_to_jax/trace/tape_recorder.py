"""What autograd means at each operation of a trace, recorded into the graph.

A trace below autograd sees values only.  Three facts decide what a later ``jax.grad`` may
differentiate, and each is written into the graph while the function runs:

- outputs of operations that ran with grad mode off (``no_grad`` blocks, pullbacks without
  ``create_graph``) pass through ``aten.detach``, which lowers to ``lax.stop_gradient``;
- a ``detach`` that the user wrote stays; one that autograd itself makes when it saves an output
  is only an alias, or second derivatives would be cut;
- a write in a ``no_grad`` block changes the value and leaves the derivative: ``straight_through``.

Every draw of random numbers is numbered (``traced_draws.py``).  A custom ``autograd.Function`` has
a node of its own (``functions.py``).  An operation whose result shape or Python value depends on
data is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from functx import _torch as engine
from functx._errors import LoweringError
from functx.compat._to_jax.source_lines import note_source
from functx.compat._to_jax.trace.composites import RECURRENT, REPLACED, layer_by_layer
from functx.compat._to_jax.trace.distribution_checks import is_check
from functx.compat._to_jax.trace.functions import within
from functx.compat._to_jax.trace.policies import with_examples
from functx.compat._to_jax.trace.tape import ASKS, Tape
from functx.compat._to_jax.trace.traced_draws import Draws, draws
from functx.compat._torch import (
    LOCAL_SCALAR,
    DataDependentOutputException,
    DynamicOutputShapeException,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    called_by,
    called_by_us,
    grad_under_modes,
    is_mutable,
    map_tensors,
)

aten = torch.ops.aten

_library = torch.library.Library("functx", "FRAGMENT")
_library.define("straight_through(Tensor value, Tensor gradient_of) -> Tensor")
_library.impl("straight_through", lambda value, _: value.clone(), "CompositeExplicitAutograd")

_SAYS_DETACH = {
    torch.Tensor.detach,
    torch.Tensor.detach_,
    torch.detach,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
}
_READS_VALUE = (LOCAL_SCALAR, aten.item.default)


class _State(threading.local):
    user_detach = 0


_state = _State()


class UserCalls(TorchFunctionMode):
    """Sees calls by name: the user's ``detach``, and what ``tape`` and ``composites`` name."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        note_source()
        if func in ASKS and not called_by_us(func):
            return self._tape(func, args, kwargs or {})
        if func in RECURRENT:
            return layer_by_layer(func, *args)
        if func in _INSIDE:
            with self:
                return _INSIDE[func](*args, **(kwargs or {}))
        if func not in _SAYS_DETACH or called_by_us(func):
            return with_examples(func, args, kwargs or {})
        _state.user_detach += 1
        try:
            if func is torch.Tensor.detach_:
                # Autograd does this one alone, without an operation that a trace could see.
                args[0].copy_(args[0].detach())
            return func(*args, **(kwargs or {}))
        finally:
            _state.user_detach -= 1


def _backward(
    x: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(x, gradient, retain_graph, create_graph, inputs=inputs)


_INSIDE: dict[Any, Callable[..., Any]] = {
    **REPLACED,
    torch.autograd.grad: grad_under_modes,
    torch.Tensor.backward: _backward,
}


def _differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class Observer(TorchDispatchMode):
    """Runs inside the traced function, next to the tracer; see the module docstring.

    Attributes:
        seen: ids of the tensors that operations took as arguments; the traced function used them.
    """

    supports_higher_order_operators = True

    def __init__(self, random_draws: Draws, tape: Tape) -> None:
        super().__init__()
        self._draws = random_draws
        self._tape = tape
        self.seen: set[int] = set()
        # Views made without grad, by id: (the detached view handed out, the view itself).  Writing
        # to the first must write through the second, whose derivative is still attached.
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*[self._inside(a) for a in args], **kwargs)
        if func.namespace == "prim":  # asks for the device, say; reads no values
            return func(*args, **kwargs)
        map_tensors(lambda t: self.seen.add(id(t)), (args, kwargs))
        if func in _READS_VALUE and is_check(args[0], again=within.plain):
            return True
        state = None
        if draws(func):
            # A generator is no value of a graph: its state is in the number.
            state = self._draws.advance(kwargs.get("generator"))
            kwargs = {name: None if name == "generator" else v for name, v in kwargs.items()}
        mode = engine.proxy_mode()
        if mode is None or state is None:
            return self._dispatch(func, args, kwargs)
        last = next(iter(reversed(mode.tracer.graph.nodes)), None)
        out = self._dispatch(func, args, kwargs)
        made = [*takewhile(lambda n: n is not last, reversed(mode.tracer.graph.nodes))]
        for i, node in enumerate(n for n in made if draws(n.target)):
            node.meta["functx_draw"] = self._draws.number((state, i))
        return out

    def _dispatch(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten.detach.default:
            if not _state.user_detach and torch.is_grad_enabled():
                return aten.alias.default(*args)
            if called_by("torch.utils.checkpoint"):
                # A tape that its hooks hand a value to takes it for the one that it saved.
                return aten.alias.default(*args)
        if torch.is_grad_enabled() or within.forward:
            self._tape.saves((args, kwargs))
            return _run(func, args, kwargs)
        if is_mutable(func):
            return self._write_without_grad(func, args, kwargs)
        out = _run(func, args, kwargs)
        return map_tensors(lambda t: self._stop(func, t), out)

    def _inside(self, arg: Any) -> Any:
        # A region's body runs with this mode popped; it has to be observed too.
        if isinstance(arg, torch.Tensor | torch.fx.GraphModule) or not callable(arg):
            return arg

        def observed(*operands: Any) -> Any:
            with self:
                return arg(*operands)

        return observed

    def _stop(self, func: OpOverload, out: torch.Tensor) -> torch.Tensor:
        if not _differentiable(out):
            return out
        stopped: torch.Tensor = aten.detach.default(out)
        if func.is_view:
            self._views[id(stopped)] = (stopped, out)
        return stopped

    def _write_without_grad(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        target = args[0] if args else None
        if not isinstance(target, torch.Tensor) or not _differentiable(target):
            return _run(func, args, kwargs)
        attached = self._views.get(id(target), (target, target))[1]
        before = aten.clone.default(attached)
        out = _run(func, (attached, *args[1:]), kwargs)
        after = torch.ops.functx.straight_through.default(attached, before)
        aten.copy_.default(attached, after)
        return target if out is attached else out


def _run(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as err:
        raise _data_dependent(func) from err
    except RuntimeError as err:
        if func in _READS_VALUE and "tracing tensor" in str(err):
            raise _data_dependent(func) from err
        raise


def _data_dependent(func: OpOverload) -> LoweringError:
    how = (
        "needs the value of a tensor as a Python number (item(), float(x), bool(x), tolist())"
        if func in _READS_VALUE
        else "has a result whose shape or value depends on data"
    )
    return LoweringError(
        f"{func} {how}; JAX compiles a function before it sees data. Use torch.where, masks or"
        " fixed sizes, or pass the value as a static Python argument."
    )
