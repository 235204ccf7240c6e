"""The graph that ``make_fx`` or AOTAutograd is tracing while regions run in it.

A trace sees the operations below all transforms. So a region appears in the graph as its operations
and, where it is differentiated, those of its replay. The functions here annotate and clean up the
graph. They do nothing if no trace is running.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor as _proxy_tensor

from functx import _torch
from functx._torch import FUNCTIONAL, infra_mode

# torch's error messages where code reads the values of a tensor that has none, for example by
# ``numpy()`` or by formatting it.
_READS = (
    *(".numpy() is not supported for", "tolist() shouldn't be called on", "FakeTensor.__format__"),
    "Cannot access data pointer of Tensor that doesn't have storage",
)


def reads_values(error: BaseException) -> bool:
    """Whether ``error`` means that Python code or a shape needed the value of a traced tensor."""
    kinds = _torch.DataDependentOutputException, _torch.DynamicOutputShapeException
    if isinstance(error, kinds) or type(error).__name__ == "GuardOnDataDependentSymNode":
        return True
    return any(text in str(error) for text in _READS)


def make(f: Callable[..., Any], *args: torch.Tensor, dynamic: bool) -> torch.fx.GraphModule:
    """Trace ``f`` on fake tensors; real tensors that it reads become constants of the graph.

    Args:
        f: a function of tensors that returns a list of tensors.
        args: tensors with the shapes, strides, dtypes and devices to trace for.
        dynamic: whether the sizes of ``args`` become symbols; see `holds_for`.
    """

    def on_fakes(*args: Any) -> Any:
        try:
            with _NothingIsReal():
                return f(*args)
        finally:
            # A fake tensor that outlives the trace then raises an error when user code combines it
            # with a real one, and does not silently compute a fake result.
            infra_mode(_torch.FAKE).allow_non_fake_inputs = False

    mode: Any = "symbolic" if dynamic else "fake"
    return _proxy_tensor.make_fx(on_fakes, tracing_mode=mode, _allow_non_fake_inputs=True)(*args)


def holds_for(fakes: list[Any]) -> Callable[[Any], bool]:
    """A function that says whether the graph traced on ``fakes`` is valid for other tensors.

    Call this after the graph is compiled, since compilers add conditions on sizes.
    """
    sizes: Any = fakes[0].fake_mode.shape_env if fakes else None
    guards = sizes and sizes.produce_guards_expression(fakes, ignore_static=False)
    return lambda args: not guards or bool(sizes.evaluate_guards_expression(guards, [*args]))


class _Thread(threading.local):
    """The trace that this thread runs."""

    # Maps a captured tensor to the traced tensor that replaces it.
    standin: Callable[[torch.Tensor], torch.Tensor] | None = None
    # All errors that were raised in the trace, including those that user code catches.
    refusals: list[Exception] | None = None


_thread = _Thread()


def note_refusal(error: Exception) -> Exception:
    """Let the current trace end with ``error`` even if user code catches it; returns ``error``."""
    refusals = _thread.refusals
    if refusals is not None:
        refusals.append(error)
    return error


@contextmanager
def refusing() -> Iterator[None]:
    """Enter this around a traced function: at the end, raise the first error that was noted."""
    before = _thread.refusals
    refusals = _thread.refusals = []
    try:
        yield
        if refusals:
            raise refusals[0]
    finally:
        _thread.refusals = before


@contextmanager
def exchanging(standin: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A context in which `standin_of` replaces each tensor ``t`` by ``standin(t)``."""
    before, _thread.standin = _thread.standin, standin
    try:
        yield
    finally:
        _thread.standin = before


def standin_of(t: torch.Tensor) -> torch.Tensor:
    """The tensor to compute with in place of ``t``: ``t`` itself unless in `exchanging`."""
    return t if _thread.standin is None else _thread.standin(t)


_asked_at_draws: list[Callable[[], None]] = []


@contextmanager
def asked_at_draws(ask: Callable[[], None]) -> Iterator[None]:
    """A context that calls ``ask`` before each traced operation that draws random numbers."""
    _asked_at_draws.append(ask)
    try:
        yield
    finally:
        _asked_at_draws.remove(ask)


def unnoted(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call what runs no code of the user's, without noting the code that runs.

    Before Python 3.12 each call of a Python function is noted by a function of `sys.settrace`, and
    most calls in a trace are torch's own, below an operator.
    """
    noting = sys.gettrace()
    if not getattr(noting, NOTES_CODE, False):
        return function(*args, **kwargs)
    sys.settrace(None)
    try:
        return function(*args, **kwargs)
    finally:
        sys.settrace(noting)


NOTES_CODE = "functx_notes_code"  # an attribute of such a trace function
_OF_TORCH = {"aten", "prim", "prims"}


class _NothingIsReal(_torch.TorchDispatchMode):
    """Traces operations on real tensors instead of running them; a buffer must not change.

    Operations that need the value of a tensor raise an error, where torch would make a symbol.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise note_refusal(_torch.DataDependentOutputException(func))
        if torch.Tag.dynamic_output_shape in func.tags and not _is_by_numbers(func, args):
            raise note_refusal(_torch.DynamicOutputShapeException(func))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for ask in _asked_at_draws:
                ask()
        if func in _torch.ANSWERS:
            return _torch.ANSWERS[func](*args)
        if func is torch.ops.aten._to_copy.default and not isinstance(args[0], torch.Tensor):
            # vmap makes this call with a size that is a symbol.
            func = torch.ops.aten.scalar_tensor.default
        if func is torch.ops.aten._efficientzerotensor.default:
            # A fake zero without memory would make later operations compute on "meta".
            func = torch.ops.aten.zeros.default
        if types != (_torch.FakeTensor,):
            args, kwargs = torch.utils._pytree.tree_map(self._fake, (args, kwargs))
        if func.namespace in _OF_TORCH:  # operators of others may have rules in Python
            return unnoted(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _fake(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, _torch.FakeTensor):
            return x
        mode = infra_mode(_torch.FAKE)
        return same_value(x, lambda: mode.from_tensor(x.detach(), static_shapes=True))


def _is_by_numbers(func: Any, args: Any) -> bool:
    """Whether ``func`` indexes by positions. With a mask, the size would depend on values."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return not any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def number(x: Any) -> Any:
    """``x``; a symbol becomes its current number, and the graph is then valid for that only."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds.get(type(x), lambda x: x)(x)


def same_value(t: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call ``make``, which returns ``t`` in another form, and give both the same graph node."""
    mode = _torch.proxy_mode()
    if mode is None or infra_mode(FUNCTIONAL) is not None:
        return make()
    slot = _proxy_tensor.get_proxy_slot(t, mode.tracer, None)
    if slot is None:  # a constant
        proxy = torch.fx.Proxy(mode.tracer.create_arg(t), mode.tracer)
        slot = _proxy_tensor._ProxyTensor(proxy, None)
    with _torch.without_proxies():
        twin = make()
    _proxy_tensor.set_proxy_slot(twin, mode.tracer, slot)
    return twin


def fake_of(t: torch.Tensor) -> torch.Tensor:
    """A fake tensor like ``t``, made below all transforms and outside the current graph."""
    mode = infra_mode(_torch.FAKE)
    with _torch.without_dispatch_modes(), _torch.cleared_interpreter_stack():
        return mode.from_tensor(t.detach(), static_shapes=True)


def empty_like(graph: torch.fx.Graph) -> torch.fx.Graph:
    """An empty graph with the calling convention of ``graph``."""
    new = torch.fx.Graph()
    new.set_codegen(graph._codegen)
    return new


def last_node() -> Any:
    """The last node of the current graph, or ``None`` outside a trace."""
    mode = _torch.proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def _nodes_after(since: Any, mode: Any) -> Iterable[Any]:
    """The nodes that were made after ``since``, newest first."""
    for node in reversed(mode.tracer.graph.nodes):
        if node is since:
            return
        yield node


def noted_after(since: Any) -> Counter[int]:
    """For each storage, how many results of the nodes after ``since`` use it."""
    counts: Counter[int] = Counter()
    if (mode := _torch.proxy_mode()) is not None:
        for node in _nodes_after(since, mode):
            value = node.meta.get("val")
            values = value if isinstance(value, (tuple, list)) else [value]
            counts.update(_torch.storage_of(t) for t in values if isinstance(t, torch.Tensor))
    return counts


def close(since: Any, region: str, phase: str) -> None:
    """Annotate the nodes after ``since`` with their region and phase, and erase dead nodes.

    A node is dead if no other node uses it, no live tensor is its result, and it neither writes nor
    draws random numbers.
    """
    if (mode := _torch.proxy_mode()) is None:
        return
    read = {slot.proxy.node for slot in mode.tracer.tensor_tracker.values()}
    for node in _nodes_after(since, mode):
        if not (node.users or node in read or acts(node) or _gives_sizes(node, mode.tracer)):
            mode.tracer.graph.erase_node(node)
            node.meta.clear()  # it may live on, and hold memory that `noted_after` does not count
        elif node.op == "call_function":
            _note(node, functx_region=region, functx_phase=phase)


def acts(node: Any) -> bool:
    """Whether a node has an effect in addition to its result: it draws or writes."""
    return bool(node.is_impure()) or node.target in _torch.HIDDEN_WRITES


def _gives_sizes(node: Any, tracer: Any) -> bool:
    """Whether the graph may still need a number that the node returns, or a size of its result.

    A size that equals a size of an input is redirected to that input first.
    """
    for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, _proxy_tensor.py_sym_types):
            return True
        if not isinstance(value, torch.Tensor):
            continue
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        for n in numbers:
            if isinstance(n, torch.SymInt) and not _is_taken_from_an_input(n, tracer):
                return True
    return False


def _is_taken_from_an_input(size: torch.SymInt, tracer: Any) -> bool:
    """Redirect a size in the graph to an equal size of an input; returns whether there is one."""
    for node in tracer.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for n in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(n, torch.SymInt) and n.node.expr == size.node.expr:
                if (slot := tracer.symnode_tracker.get(n)) is None:
                    return False
                tracer.symnode_tracker[size] = slot
                return True
    return False


def note_kept(tensors: Iterable[torch.Tensor]) -> None:
    """Mark the nodes of ``tensors`` as saved by a region."""
    for node in map(_node_of, tensors):
        if node is not None:
            _note(node, functx_decision="save")


def note_name(t: torch.Tensor, name: str) -> None:
    """Add ``name`` to the names of the node of ``t``."""
    if (node := _node_of(t)) is not None:
        names = node.meta.get("custom", {}).pop("functx_names", ())
        _note(node, functx_names=(*names, name))


def _node_of(t: torch.Tensor) -> Any:
    mode = _torch.proxy_mode()
    slot = mode and _proxy_tensor.get_proxy_slot(t, mode.tracer, None)
    return slot and slot.proxy.node


def _note(node: Any, **marks: Any) -> None:
    """Mark a node. An earlier mark wins, since inner regions are complete before outer ones."""
    # Tracing a graph again keeps only the metadata under "custom".
    node.meta["custom"] = {**marks, **node.meta.get("custom", {})}
