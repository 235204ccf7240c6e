"""The graph that is being traced by ``make_fx`` or AOTAutograd, while regions run in it.

A graph is made of what runs below all transforms. So a region in it is what it runs: its operations
and, where it is differentiated, those of its replay. Without a trace under way these do nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor as _proxy_tensor

from functx import _torch
from functx._torch import FUNCTIONAL, infra_mode

# What torch says where values are read of a tensor that has none: ``numpy()``, say, or a format.
_READS = (
    *(".numpy() is not supported for", "tolist() shouldn't be called on", "FakeTensor.__format__"),
    "Cannot access data pointer of Tensor that doesn't have storage",
)


def reads_values(error: BaseException) -> bool:
    """Whether a trace has ended where Python, or a shape, needs the value of a tensor."""
    known = _torch.DataDependentOutputException, _torch.DynamicOutputShapeException
    if isinstance(error, known) or type(error).__name__ == "GuardOnDataDependentSymNode":
        return True
    return any(text in str(error) for text in _READS)


def make(f: Callable[..., Any], *args: torch.Tensor, dynamic: bool) -> torch.fx.GraphModule:
    """A graph of ``f``, traced on fake tensors; real ones that it reads are constants in it.

    Args:
        f: a function of tensors; what it returns is a list of tensors.
        args: they say shapes, strides, dtypes and devices.
        dynamic: sizes of ``args`` are symbols; see `holds_for`.
    """

    def on_fakes(*given: Any) -> Any:
        try:
            with _NothingIsReal():
                return f(*given)
        finally:  # a tensor that outlives the trace computes nothing with real ones, silently
            infra_mode(_torch.FAKE).allow_non_fake_inputs = False

    mode: Any = "symbolic" if dynamic else "fake"
    return _proxy_tensor.make_fx(on_fakes, tracing_mode=mode, _allow_non_fake_inputs=True)(*args)


def holds_for(fakes: list[Any]) -> Callable[[Any], bool]:
    """Whether a graph that was traced on these is that of other tensors, too.

    Asked for after it is compiled: compilers ask more of sizes.
    """
    sizes: Any = fakes[0].fake_mode.shape_env if fakes else None
    said = sizes and sizes.produce_guards_expression(fakes, ignore_static=False)
    return lambda args: not said or bool(sizes.evaluate_guards_expression(said, [*args]))


class _Thread(threading.local):
    """What stands for captured tensors in the trace of this thread."""

    standin: Callable[[torch.Tensor], torch.Tensor] | None = None
    # Errors of the trace under way, also those that the function catches:
    refusals: list[Exception] | None = None


_thread = _Thread()


def note_refusal(error: Exception) -> Exception:
    """Let the trace under way end in an error, though the function catches it."""
    found = _thread.refusals
    if found is not None:
        found.append(error)
    return error


@contextmanager
def refusing() -> Iterator[None]:
    """Around a function in a trace: raise the first error that was noted in it."""
    before = _thread.refusals
    found = _thread.refusals = []
    try:
        yield
        if found:
            raise found[0]
    finally:
        _thread.refusals = before


@contextmanager
def exchanging(standin: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While a function runs, ``standin`` gives what is computed with in place of a tensor."""
    before, _thread.standin = _thread.standin, standin
    try:
        yield
    finally:
        _thread.standin = before


def standin_of(t: torch.Tensor) -> torch.Tensor:
    """What is computed with in place of ``t``; mostly ``t`` itself."""
    return t if _thread.standin is None else _thread.standin(t)


_asked_at_draws: list[Callable[[], None]] = []


@contextmanager
def asked_at_draws(ask: Callable[[], None]) -> Iterator[None]:
    """Call ``ask`` before each operation of the graph under way that draws random numbers."""
    _asked_at_draws.append(ask)
    try:
        yield
    finally:
        _asked_at_draws.remove(ask)


class _NothingIsReal(_torch.TorchDispatchMode):
    """What is done to real tensors is traced, not done: a buffer would advance in the trace.

    Nor are values read, which a trace would stand symbols for.
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
            func = torch.ops.aten.scalar_tensor.default  # vmap asks so, of a size
        if func is torch.ops.aten._efficientzerotensor.default:  # its kernels compute on "meta"
            func = torch.ops.aten.zeros.default
        if types != (_torch.FakeTensor,):
            args, kwargs = torch.utils._pytree.tree_map(self._fake, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _fake(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, _torch.FakeTensor):
            return x
        mode = infra_mode(_torch.FAKE)
        return same_value(x, lambda: mode.from_tensor(x.detach(), static_shapes=True))


def _is_by_numbers(func: Any, args: Any) -> bool:
    """Whether it takes elements out by numbers, not by a mask, whose values say how many."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return not any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def number(x: Any) -> Any:
    """``x``, or where it is a symbol the number that it stands for: the graph is for that one."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds.get(type(x), lambda x: x)(x)


def same_value(t: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``make()``, which has the memory of ``t``, and is the same value in the graph."""
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
    """A fake tensor like ``t``, made below all transforms, outside of the graph under way."""
    mode = infra_mode(_torch.FAKE)
    with _torch.without_dispatch_modes(), _torch.cleared_interpreter_stack():
        return mode.from_tensor(t.detach(), static_shapes=True)


def empty_like(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph without nodes that takes its arguments, and gives its results, as this one."""
    new = torch.fx.Graph()
    new.set_codegen(graph._codegen)
    return new


def last_node() -> Any:
    """The last node so far."""
    mode = _torch.proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def _nodes_after(since: Any, mode: Any) -> Iterable[Any]:
    """The nodes that were made after that one, the last one first."""
    for node in reversed(mode.tracer.graph.nodes):
        if node is since:
            return
        yield node


def noted_after(since: Any) -> Counter[int]:
    """For memory, how many values are noted in nodes after ``since`` that lie there."""
    noted: Counter[int] = Counter()
    if (mode := _torch.proxy_mode()) is not None:
        for node in _nodes_after(since, mode):
            value = node.meta.get("val")
            values = value if isinstance(value, (tuple, list)) else [value]
            noted.update(_torch.storage_of(t) for t in values if isinstance(t, torch.Tensor))
    return noted


def close(since: Any, region: str, phase: str) -> None:
    """A part of the graph is complete: say of its nodes what they belong to, but erase dead ones.

    Dead is what no node and no tensor that is alive reads, writes and draws aside.
    """
    if (mode := _torch.proxy_mode()) is None:
        return
    read = {slot.proxy.node for slot in mode.tracer.tensor_tracker.values()}
    for node in _nodes_after(since, mode):
        if not (node.users or node in read or acts(node) or _gives_sizes(node, mode.tracer)):
            mode.tracer.graph.erase_node(node)
        elif node.op == "call_function":
            _note(node, functx_region=region, functx_phase=phase)


def acts(node: Any) -> bool:
    """Whether a node is there for more than its result: it draws or writes."""
    return bool(node.is_impure()) or node.target in _torch.HIDDEN_WRITES


def _gives_sizes(node: Any, tracer: Any) -> bool:
    """Whether the graph may yet use a number that a node gives, or a size of its result.

    Sizes of inputs are taken from the inputs from now on.
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
    """Let a size that equals one of an input be that one in the graph; whether there is one."""
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
    """Say of the nodes that give these that a region keeps what they give."""
    for node in map(_node_of, tensors):
        if node is not None:
            _note(node, functx_decision="save")


def note_name(t: torch.Tensor, name: str) -> None:
    """Say of the node that gives a plain tensor that it has a name."""
    if (node := _node_of(t)) is not None:
        names = node.meta.get("custom", {}).pop("functx_names", ())
        _note(node, functx_names=(*names, name))


def _node_of(t: torch.Tensor) -> Any:
    mode = _torch.proxy_mode()
    slot = mode and _proxy_tensor.get_proxy_slot(t, mode.tracer, None)
    return slot and slot.proxy.node


def _note(node: Any, **said: Any) -> None:
    """What is said of a node first, holds: inner regions come first."""
    # "custom" is what survives when a graph is traced again.
    node.meta["custom"] = {**said, **node.meta.get("custom", {})}
