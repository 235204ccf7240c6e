"""The only file of functx that touches private torch API: each name, with its reason.

``tests/test_canary.py`` asserts that every name still exists and does what it is used for, so that
a torch release which moves one fails there, by name, and not somewhere inside the engine.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch import eager_transforms as _eager_transforms
from torch._functorch import predispatch as _predispatch
from torch._functorch import pyfunctorch as _pyfunctorch
from torch.autograd import forward_ad as _forward_ad
from torch.autograd import graph as _graph
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils import _python_dispatch

# --- the stack of transforms -------------------------------------------------------------------

# What transform an interpreter stands for, and the innermost one.
TransformType = _functorch.TransformType
peek_interpreter_stack = _functorch.peek_interpreter_stack
# Peeling levels off the stack, with the grad mode that the level below had, and putting them back.
current_interpreter = _pyfunctorch.retrieve_current_functorch_interpreter
# An interpreter of the stack, with what there is to know of its transform.
coerced = _pyfunctorch.coerce_cinterpreter
_cleared_interpreter_stack = _pyfunctorch.temporarily_clear_interpreter_stack
restored_interpreter_stack = _pyfunctorch.temporarily_restore_interpreter_stack
# Levels entered and left.
enter_grad_level = _functorch._grad_increment_nesting
exit_grad_level = _functorch._grad_decrement_nesting
enter_vmap_level = _functorch._vmap_increment_nesting
exit_vmap_level = _functorch._vmap_decrement_nesting
enter_functionalize_level = _functorch._func_increment_nesting
exit_functionalize_level = _functorch._func_decrement_nesting
grad_level = _eager_transforms.grad_increment_nesting
# Batching rules written in Python are loaded by the first vmap; ours may be the first.
load_batching_rules = _predispatch.lazy_load_decompositions

# --- tensors of a level ------------------------------------------------------------------------

wrap_for_grad = _functorch._wrap_for_grad
unwrap_for_grad = _functorch._unwrap_for_grad
add_batch_dim = _functorch._add_batch_dim
unwrap_batched = _functorch._unwrap_batched
wrap_functional_tensor = _functorch._wrap_functional_tensor
unwrap_functional_tensor = _functorch._unwrap_functional_tensor
propagate_functional_input_mutation = _functorch._propagate_functional_input_mutation
# Whether a tensor belongs to a transform at all, to which, and what is inside.
is_wrapped = _functorch.is_functorch_wrapped_tensor
is_batched = _functorch.is_batchedtensor
is_functional = _functorch.is_functionaltensor
unwrap_once_if_dead = _functorch.unwrap_if_dead
is_grad_wrapper = _functorch.is_gradtrackingtensor
wrapper_level = _functorch.maybe_get_level
get_unwrapped = _functorch.get_unwrapped
# A tensor without memory of its own; the public way makes one with memory.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
# Whether a tensor is made of others, whose storages are the real ones.
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass

# --- autograd ----------------------------------------------------------------------------------

# A Function that makes one node, at one level, without functorch's per-call class; it has to be
# allowed explicitly.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
get_single_level_function_allowed = _functorch.get_single_level_autograd_function_allowed
set_single_level_function_allowed = _functorch.set_single_level_autograd_function_allowed
# Nodes are numbered as they are made: tells nodes of a region from older ones.
next_sequence_number = torch.autograd._get_sequence_nr
# Which run of the engine is executing on this thread: tells whether code runs inside a backward
# that was started within a region.
current_graph_task_id = torch._C._current_graph_task_id
# When a node of the tape was made, in the count of its thread.
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
# The node that the engine is running on this thread; ``None`` outside of a backward.
current_node = torch._C._current_autograd_node
# torch.autograd.grad without its torch-function check: a backward that the engine starts must not
# hide the operations of its hooks from the region's own mode.
_run_backward = _graph._engine_run_backward
# The engine itself. Inside a backward pass the rest has been done, and must not be undone.
_engine = torch.autograd.Variable._execution_engine
# Operators that take functions; a custom Function is called by one under transforms.
HigherOrderOperator = torch._ops.HigherOrderOperator
set_forward_grad_enabled = _forward_ad._set_fwd_grad_enabled

# --- modes -------------------------------------------------------------------------------------

# Sees every operation below autograd and functorch.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
# Dispatch modes are wrapped, at a cost for each operation, to be invisible to torch.compile unless
# this says they need not be.
never_skip_dynamo = classmethod(lambda cls: False)
# The stacks of modes, to know whether ours is on top, and whether this is the inside of one.
function_mode_depth = torch._C._len_torch_function_stack
get_function_mode_at = torch._C._get_function_stack_at
dispatch_mode_depth = torch._C._len_torch_dispatch_stack
get_dispatch_mode_at = torch._C._get_dispatch_stack_at

# --- profiles ----------------------------------------------------------------------------------

# What the enclosed code is called in a profile. Unlike the public record_function it runs no
# operation, which modes would see, and costs a fifth of a microsecond when nothing is profiled.
record_function = torch._C._profiler._RecordFunctionFast


# Function modes alone, for looks of the engine's own at how tensors lie in memory.
without_function_modes = torch._C.DisableTorchFunction


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _python_dispatch._disable_current_modes():
        yield


def without_modes() -> AbstractContextManager[None]:
    """Neither function modes nor dispatch modes see what runs here; no public way disables both."""
    if torch._C._len_torch_dispatch_stack():
        return _without_modes()
    return torch._C.DisableTorchFunction()


# Dispatch modes alone: counters and the records of regions.
without_dispatch_modes = _python_dispatch._disable_current_modes

# --- operators ---------------------------------------------------------------------------------

# What a list of operators may consist of.
OpOverload = torch._ops.OpOverload
OpOverloadPacket: Any = torch._ops.OpOverloadPacket

# --- memory ------------------------------------------------------------------------------------

# How many tensors (and Python objects) hold a piece of memory, by its key.
storage_use_count = torch._C._storage_Use_Count
# How many hold a tensor, Python (which counts once) and C++ together.
use_count = torch.Tensor._use_count  # type: ignore[attr-defined]


def cleared_interpreter_stack() -> AbstractContextManager[list[Any]]:
    """A context without active transforms; it gives those that were."""
    return nullcontext([]) if peek_interpreter_stack() is None else _cleared_interpreter_stack()


def unwrap_if_dead(t: torch.Tensor) -> torch.Tensor:
    """The value inside wrappers whose levels have ended, one within another perhaps."""
    value = unwrap_once_if_dead(t)
    while value is not t:
        t, value = value, unwrap_once_if_dead(value)
    return value


def unwrap_dead(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`unwrap_if_dead` of each."""
    values = [*map(unwrap_once_if_dead, given := [*tensors])]
    return given if all(map(operator.is_, values, given)) else [*map(unwrap_if_dead, values)]


def batch_dim(t: torch.Tensor) -> int:
    """Which dimension of the tensor inside a batched tensor its level maps over."""
    dim = unwrap_batched(t, wrapper_level(t))[1]
    assert dim is not None
    return dim


def storage_key(t: torch.Tensor) -> int:
    """The address of the memory behind a plain tensor, which is no other's while it lives."""
    return t.untyped_storage()._cdata


def view_base(t: torch.Tensor) -> torch.Tensor | None:
    """What ``t`` is a view of, if autograd knows it as one."""
    return t._base


def enter_jvp_level() -> int:
    """Enter a jvp level, counted as ``torch.func.jvp`` counts, so that nested ones know it."""
    return int(_eager_transforms.enter_jvp_nesting())


def exit_jvp_level() -> None:
    """Leave the jvp level entered last."""
    _eager_transforms.exit_jvp_nesting()


def forward_ad_level() -> int:
    """The active ``torch.autograd.forward_ad`` level, -1 outside any."""
    return int(_forward_ad._current_level)


def run_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """``torch.autograd.grad`` with the engine's own arguments."""
    if current_graph_task_id() == -1 or _graph.log.isEnabledFor(logging.DEBUG):
        return _run_backward(*args, **kwargs)
    return _engine.run_backward(*args, **kwargs)


def default_generators() -> list[tuple[Any, torch.Generator]]:
    """What an operation may draw from without being given a generator: ``"cpu"``, and by device."""
    of_cpu: list[tuple[Any, torch.Generator]] = [("cpu", torch.default_generator)]
    if not torch.cuda.is_initialized():
        return of_cpu
    on_gpu = enumerate(torch.cuda.default_generators)
    return of_cpu + [(torch.device("cuda", n), generator) for n, generator in on_gpu]


def kind_of_nodes(function: Any) -> Any:
    """The class of the nodes of a Function."""
    return function._backward_cls


def will_be_reached(node: Any) -> bool:
    """Whether the backward pass under way comes by a node, or hands out what comes there.

    ``ctx.needs_input_grad`` tells what required grad in the forward, whatever is asked for now.
    """
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is asked for, of which torch does not say it
        return True


def require_grad(t: torch.Tensor, required: bool = True) -> torch.Tensor:
    """``t.requires_grad_()``, also for a wrapper inside a transform."""
    allowed = _functorch.get_inplace_requires_grad_allowed()
    _functorch.set_inplace_requires_grad_allowed(True)
    try:
        return t.requires_grad_(required)
    finally:
        _functorch.set_inplace_requires_grad_allowed(allowed)


def interpreter_depth() -> int:
    """How many transforms are active."""
    stack = _functorch.get_interpreter_stack()
    return 0 if stack is None else len(stack)


def current_node_number() -> int:
    """When the node that the engine is running was made; -1 outside of a backward."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def transforming() -> bool:
    """Whether any transform is active, or operations are traced."""
    return peek_interpreter_stack() is not None or tracing()


def interpreters() -> list[Any]:
    """The active transforms, outermost first."""
    stack = _functorch.get_interpreter_stack()
    return [] if stack is None else list(stack)


def inside_dispatcher() -> bool:
    """Whether this is Python that an operator runs below functorch: a decomposition, say.

    There tensors are bare values of some level, which only that operator can make sense of.
    """
    if _key_is_excluded(_AUTOGRAD):
        # Inference mode leaves autograd out as well, and what runs in it is the user's.
        return not torch.is_inference_mode_enabled()
    return peek_interpreter_stack() is not None and not (
        torch._C._dispatch_tls_is_dispatch_key_included(_TRANSFORMS)
    )


_key_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradOther
_TRANSFORMS = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode


def sparse_coo_parts(t: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a COO tensor, coalesced or not; the public ones refuse the latter."""
    return [t._indices(), t._values()]


def proxy_mode() -> Any:
    """The mode that is tracing a graph now, if any."""
    return _proxy_tensor.get_proxy_mode()


def name_in_graph(t: torch.Tensor, name: str) -> None:
    """While a graph is traced, note at the node that gives ``t`` that it has a name."""
    mode = _proxy_tensor.get_proxy_mode()
    if mode is None:
        return
    slot = _proxy_tensor.get_proxy_slot(t, mode.tracer, None)
    if slot is not None:
        # "custom" is what survives when a graph is traced again.
        custom = slot.proxy.node.meta.setdefault("custom", {})
        custom["functx_names"] = (*custom.get("functx_names", ()), name)


def traces_autograd() -> bool:
    """Whether a graph is traced above autograd, as ``torch.export`` does: it records no tape."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)


_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def without_proxies() -> Any:
    """A context in which nothing is traced."""
    return _proxy_tensor.disable_proxy_modes_tracing()


def trace_subgraph(fn: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    """A graph of ``fn`` of its own, made with the settings of the trace under way."""
    return _proxy_tensor._CURRENT_MAKE_FX_TRACER.trace_subgraph(fn, *args)  # type: ignore[union-attr]


def detached(t: torch.Tensor) -> torch.Tensor:
    """``t.detach()``; in a graph that is being traced it is ``t``.

    There, a ``detach`` of the engine's own would cut off whoever differentiates the graph.
    """
    mode = _proxy_tensor.get_proxy_mode() if dispatch_mode_depth() else None
    if mode is None or (slot := _slot_of(t, mode.tracer)) is None:
        return t.detach()
    with without_proxies():
        t = t.detach()
    _proxy_tensor.set_proxy_slot(t, mode.tracer, slot)
    return t


def detach_in_place(t: torch.Tensor) -> None:
    """``t.detach_()``, which is in no graph. See `detached`."""
    if not dispatch_mode_depth() or _proxy_tensor.get_proxy_mode() is None:
        t.detach_()
        return
    with without_proxies():
        t.detach_()


def _slot_of(t: torch.Tensor, tracer: Any) -> Any:
    slot = _proxy_tensor.get_proxy_slot(t, tracer, None)
    if slot is None and type(t) in (torch.Tensor, torch.nn.Parameter) and t.requires_grad:
        # What a function closes over is an attribute of its graph, with its gradient.
        name = tracer.get_fresh_qualname("_param_constant")
        setattr(tracer.root, name, t)
        proxy = tracer.proxy(tracer.create_node("get_attr", name, (), {}))
        _proxy_tensor.track_tensor_tree(t, proxy, constant=None, tracer=tracer)
        slot = _proxy_tensor.get_proxy_slot(t, tracer, None)
    return slot


def track_proxies(values: Any, proxy: Any, tracer: Any) -> Any:
    """``values`` as what ``proxy`` stands for in the graph."""
    return _proxy_tensor.track_tensor_tree(values, proxy, constant=None, tracer=tracer)


def tracing() -> bool:
    """Whether operations are traced or run on fake tensors: nothing has memory then."""
    if not dispatch_mode_depth():
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(
        torch._C._get_dispatch_mode(key) is not None
        for key in (keys.PROXY, keys.FAKE, keys.FUNCTIONAL)
    )


def version(t: torch.Tensor) -> int:
    """How often ``t`` was written to; 0 where torch does not count (inference tensors)."""
    return 0 if t.is_inference() else t._version


def sync(t: torch.Tensor) -> None:
    """Apply the pending writes of a functional tensor."""
    torch._sync(t)


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The view of ``base`` that ``view`` is of its own base."""
    return view._view_func_unsafe(base)


def detachable(t: torch.Tensor) -> bool:
    """Whether ``t.detach_()`` can take a tensor off its tape."""
    return not t._is_view()
