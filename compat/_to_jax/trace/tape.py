"""Record into the graph of a trace where derivatives flow.

A trace below autograd sees only values. Three facts decide what a later ``jax.grad`` may
differentiate, and each is recorded in the graph while the function runs:

- Results of operations that ran with grad mode off (``no_grad`` blocks, pullbacks without
  ``create_graph``) pass through ``aten.detach``, which lowers to ``lax.stop_gradient``.
- A ``detach`` of user code stays in the graph. A ``detach`` that autograd makes when it saves an
  output becomes an alias, because otherwise second derivatives would be zero.
- A write in a ``no_grad`` block changes the value but not the derivative: ``straight_through``.

Every draw of random numbers is numbered (``traced_draws.py``). A custom ``autograd.Function``
becomes one node (``functions.py``). An operation whose result shape or Python value depends on data
raises an error.

A trace needs no tape, because JAX takes the derivatives later. So traced values do not require
grad. But a function that branches on ``requires_grad`` would then take the wrong branch.

NOTE [asked]
A function that asks about its tape is traced once more, with every floating-point input on a tape.
torch then answers as it does if derivatives are taken with respect to all of them. A function asks
by reading ``requires_grad``, ``is_leaf`` or ``grad_fn``, by ``retain_grad``, or by
``autograd.grad`` with respect to a tensor without a tape. Hooks that see gradients are errors,
since JAX's derivatives would ignore them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from functx import _torch as engine
from functx._core import LoweringError, has_derivatives
from functx._torch.lowering import (
    LOCAL_SCALAR,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    apply_function,
    asking_no_mode,
    called_by,
    called_by_us,
    is_functorch_wrapped,
    is_mutable,
    map_tensors,
    saved_tensors_hooks,
)
from functx.compat._to_jax.nodes import draws, nodes_from_now
from functx.compat._to_jax.passes.policies import with_examples
from functx.compat._to_jax.rules.table import decompositions, lookup
from functx.compat._to_jax.source_lines import at_line, note_source, warn
from functx.compat._to_jax.trace.composites import RECURRENT, REPLACED, layer_by_layer, stacked
from functx.compat._to_jax.trace.functions import within
from functx.compat._to_jax.trace.known_values import READS, KnownValues
from functx.compat._to_jax.trace.traced_draws import TracedDraws
from functx.compat._to_jax.trace.value_checks import is_check

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

_T: Any = torch.Tensor
_REQUIRES_GRAD, _IS_LEAF = _T.requires_grad.__get__, _T.is_leaf.__get__
_GRAD_FN = _T.grad_fn.__get__
_SETS = (_T.requires_grad_, _T.requires_grad.__set__)
_HOOKS = (_T.register_hook, _T.register_post_accumulate_grad_hook)
_OF_DATA = (torch.tensor, torch.as_tensor)
ASKS = {_REQUIRES_GRAD, _IS_LEAF, _GRAD_FN, *_SETS, *_HOOKS, _T.retain_grad}
WITHOUT_TAPE = ("does not require grad", "doesn't require gradient")
"""Words of torch's errors for derivatives of a tensor that is on no tape."""
_OWN_CALLERS = (
    *("torch._", "torch.fx", "torch.fx.passes.shape_prop"),
    *("torch.autograd.function", "torch.autograd"),
)


def _refuse_hook(name: str) -> None:
    raise LoweringError(
        f"{name}: JAX's derivatives would ignore the hook silently; change gradients in an"
        " autograd.Function instead"
    )


class Asked(BaseException):
    """The function asked for its tape in a trace without one. ``NOTE [asked]``."""


class _Enter(engine.SingleLevelFunction):
    """Puts a tensor on a tape without changing it, and without an operation in the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[None, None]:
        """Return no gradients: the tape begins here."""
        return None, None


class _NodeWithoutHooks:
    """A ``grad_fn`` as user code sees it. Hooks are errors, since JAX would ignore them."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            _refuse_hook(f"{name} of a grad_fn")
        return getattr(self._node, name)


class Tape:
    """Answers questions about the tape. With ``exists``, inputs are put on a tape."""

    def __init__(self, exists: bool) -> None:
        self._exists = exists
        self._inputs: dict[int, torch.Tensor] = {}
        self._hooks_around, self._has_warned = saved_tensors_hooks(), False
        self.detaches = 0  # how many calls of ``detach`` by user code are running

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Put the inputs on the tape, if there is one."""
        for x in inputs if self._exists else ():
            if has_derivatives(x):
                with engine.without_proxies():
                    token = torch.zeros((), requires_grad=True)
                apply_function(_Enter, x, token)
                x.retain_grad()
                self._inputs[id(x)] = x

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Answer one of the calls in `ASKS`."""
        x = args[0]
        if not isinstance(x, FakeTensor) or is_functorch_wrapped(x):
            return func(*args, **kwargs)
        if func in _HOOKS:
            _refuse_hook(func.__name__)
        if func in _SETS:
            return self._set(x, func, args, kwargs)
        if func in (_REQUIRES_GRAD, _IS_LEAF, _GRAD_FN) and called_by(*_OWN_CALLERS):
            return func(x)
        if not self._exists and has_derivatives(x):
            if func == _REQUIRES_GRAD and func(x):
                return True
            raise Asked
        if func == _IS_LEAF:
            return id(x) in self._inputs or func(x)
        if func == _GRAD_FN:
            node = None if id(x) in self._inputs else func(x)
            return None if node is None else _NodeWithoutHooks(node)
        return func(*args, **kwargs)

    def _set(self, x: torch.Tensor, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flag = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
        if not flag and has_derivatives(x):
            if not self._exists:
                raise Asked
            if x.requires_grad:
                raise LoweringError(
                    "requires_grad is set to False for a value that may be differentiated, which"
                    " has no counterpart in JAX; use x.detach() or torch.no_grad() instead"
                )
        return func(*args, **kwargs)

    def saves(self, arguments: Any) -> None:
        """Refuse saved-tensor hooks that may change what a tape saves; JAX would not call them."""
        hooks = saved_tensors_hooks()
        if hooks is None or hooks == self._hooks_around:
            return
        module = str(getattr(hooks[0], "__module__", None))
        if module == "torch.utils.checkpoint" and not self._has_warned:
            self._has_warned = True
            warn(
                "the JAX function saves what torch.utils.checkpoint recomputes. Use"
                " functx.apply_remat or functx.checkpoint instead, or functx.patch_checkpoint"
                " (which has no effect on torch.distributed._composable.checkpoint)"
            )
        if module == "torch.utils.checkpoint" or module.partition(".")[0] == "functx":
            return
        taped: list[bool] = []
        map_tensors(lambda t: taped.append(t.requires_grad), arguments)
        if module != "torch.autograd.graph" or any(taped):  # save_on_cpu changes nothing
            raise LoweringError(
                "the function uses torch.autograd.graph.saved_tensors_hooks, which JAX's"
                " derivatives would ignore; use functx.remat with a policy instead"
            )


class UserCalls(TorchFunctionMode):
    """Sees calls of user code: ``detach``, and those that ``Tape`` and ``composites`` replace."""

    def __init__(self, tape: Tape, known: KnownValues) -> None:
        super().__init__()
        self._tape, self._known = tape, known

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        note_source()
        if func in ASKS and not called_by_us(func):
            return self._tape(func, args, kwargs or {})
        if func in READS and (value := self._known.read(args[0])) is not None:
            with engine.without_dispatch_modes():
                return func(value, *args[1:], **(kwargs or {}))
        if func in _OF_DATA and args and (data := stacked(args[0])) is not args[0]:
            return torch.as_tensor(data, *args[1:], **(kwargs or {}))
        if func in RECURRENT:
            return layer_by_layer(func, *args)
        if func in _INSIDE:
            with self:
                return _INSIDE[func](*args, **(kwargs or {}))
        if func not in _SAYS_DETACH or called_by_us(func):
            return with_examples(func, args, kwargs or {})
        self._tape.detaches += 1
        try:
            if func is torch.Tensor.detach_:
                # `detach_` has no operation below autograd, so write the detached value instead.
                args[0].copy_(args[0].detach())
            return func(*args, **(kwargs or {}))
        finally:
            self._tape.detaches -= 1


_INSIDE: dict[Any, Callable[..., Any]] = {
    **REPLACED,
    torch.autograd.grad: asking_no_mode(torch.autograd.grad),
    torch.nn.functional.gumbel_softmax: asking_no_mode(torch.nn.functional.gumbel_softmax),
    torch.Tensor.backward: asking_no_mode(torch.Tensor.backward),
}


class Observer(TorchDispatchMode):
    """Runs inside the traced function, next to the tracer; see the module docstring."""

    supports_higher_order_operators = True

    def __init__(self, random_draws: TracedDraws, tape: Tape, known: KnownValues) -> None:
        super().__init__()
        self._draws, self._tape, self._known = random_draws, tape, known
        # Ids of the tensors that were arguments of operations, so the traced function used them.
        self.seen: set[int] = set()
        # Views made without grad, by id: the detached view, which user code has, and the view
        # itself. A write to the first must write to the second, which still has its derivative.
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*[self._inside(a) for a in args], **kwargs)
        if func.namespace == "prim":  # such as a query of the device, which reads no values
            return func(*args, **kwargs)
        map_tensors(lambda t: self.seen.add(id(t)), (args, kwargs))
        if func in _READS_VALUE and is_check(args[0], again=within.plain):
            return True
        state = None
        if draws(func, args):
            # A graph can't contain a generator. The number of the draw represents its state.
            state = self._draws.advance(kwargs.get("generator"))
            kwargs = {name: None if name == "generator" else v for name, v in kwargs.items()}
        mode = engine.proxy_mode()
        new_nodes = None if mode is None else nodes_from_now(mode.tracer.graph)
        out = self._dispatch(func, args, kwargs)
        self._known.follow(func, args, kwargs, out)
        if new_nodes is not None and state is not None:
            for i, node in enumerate(n for n in reversed(new_nodes()) if draws(n.target, n.args)):
                node.meta["functx_draw"] = self._draws.number((state, i))
        return out

    def _dispatch(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten.detach.default:
            by_autograd = not self._tape.detaches and torch.is_grad_enabled()
            # autograd, and checkpoint's hooks, detach values that still have their derivatives.
            if by_autograd or called_by("torch.utils.checkpoint"):
                return aten.alias.default(*args)
        if torch.is_grad_enabled() or within.forward:
            self._tape.saves((args, kwargs))
            return self._run(func, args, kwargs)
        if is_mutable(func):
            return self._write_without_grad(func, args, kwargs)
        out = self._run(func, args, kwargs)
        return map_tensors(lambda t: self._stop(func, t), out)

    def _inside(self, arg: Any) -> Any:
        # The body of a region runs with this mode popped, and has to be observed too.
        if isinstance(arg, torch.Tensor | torch.fx.GraphModule) or not callable(arg):
            return arg

        def observed(*operands: Any) -> Any:
            with self:
                return arg(*operands)

        return observed

    def _stop(self, func: OpOverload, out: torch.Tensor) -> torch.Tensor:
        if not has_derivatives(out):
            return out
        stopped: torch.Tensor = aten.detach.default(out)
        if func.is_view:
            self._views[id(stopped)] = (stopped, out)
        return stopped

    def _write_without_grad(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        target = args[0] if args else None
        if not isinstance(target, torch.Tensor) or not has_derivatives(target):
            return self._run(func, args, kwargs)
        attached = self._views.get(id(target), (target, target))[1]
        before = aten.clone.default(attached)
        out = self._run(func, (attached, *args[1:]), kwargs)
        after = torch.ops.functx.straight_through.default(attached, before)
        aten.copy_.default(attached, after)
        return target if out is attached else out

    def _run(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        without_node = func in _READS_VALUE or _is_constant(func, args)
        if without_node and (out := self._known.compute(func, args, kwargs)) is not None:
            return out
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError) as err:
            is_read = func in _READS_VALUE and "tracing tensor" in str(err)
            if type(err) is RuntimeError and not is_read:
                raise
            if (out := self._known.compute(func, args, kwargs)) is not None:
                return out
            if func is aten.index.Tensor and (places := self._known.places(args[1])) is not None:
                return func(args[0], places)
            raise _data_dependent(func) from err


def _is_constant(op: OpOverload, args: Any) -> bool:
    """Whether an operation without a rule returns a constant, like a window or FFT frequencies."""
    plain = not draws(op, args) and not any("Tensor" in str(a.type) for a in op._schema.arguments)
    return plain and lookup(op) is None and op not in decompositions()


def _data_dependent(func: OpOverload) -> LoweringError:
    how = (
        "needs the value of a tensor as a Python number (item(), float(x), bool(x), tolist(), or"
        " BatchNorm with momentum=None in training)"
        if func in _READS_VALUE
        else "has a result whose shape or value depends on data"
    )
    return LoweringError(
        f"{func} {how}{at_line()}; JAX compiles a function before it sees data. Use torch.where,"
        " masks or fixed sizes, or pass the value as a static Python argument."
    )
