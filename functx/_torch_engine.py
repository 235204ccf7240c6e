"""Private torch API of the recompute engine; each name with the reason that no public one serves."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch._C import _functorch
from torch._functorch import eager_transforms as _eager_transforms
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import GradientEdge
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

_C: Any = torch._C
_F: Any = _functorch
_A: Any = torch._C._autograd

# -- modes: pushed and popped one by one, so that an interrupt between two of these is undone by depth
push_function_mode = _C._push_on_torch_function_stack
pop_function_mode = _C._pop_torch_function_stack
function_depth = _C._len_torch_function_stack
function_mode_at = _C._get_function_stack_at
push_dispatch_mode = _C._push_on_torch_dispatch_stack
pop_dispatch_mode = _C._pop_torch_dispatch_stack
dispatch_depth = _C._len_torch_dispatch_stack
dispatch_mode_at = _C._get_dispatch_stack_at
infra_mode = _C._get_dispatch_mode
without_dispatch_modes = _python_dispatch._disable_current_modes
PROXY, FAKE = _C._TorchDispatchModeKey.PROXY, _C._TorchDispatchModeKey.FAKE

# -- the functorch stack: no public way to see it, or to enter a level without running a function
TransformType = _F.TransformType
interpreter_stack = _F.get_interpreter_stack
peek_interpreter = _F.peek_interpreter_stack
functorch_depth = _F.get_dynamic_layer_stack_depth
pop_layer = _F.pop_dynamic_layer_stack
push_layer = _F.push_dynamic_layer_stack
vmap_interpreter = _F.CVmapInterpreterPtr
functionalize_interpreter = _F.CFunctionalizeInterpreterPtr
RandomnessType = _F.RandomnessType
enter_grad, leave_grad = _F._grad_increment_nesting, _F._grad_decrement_nesting
enter_vmap, leave_vmap = _F._vmap_increment_nesting, _F._vmap_decrement_nesting
enter_functionalize, leave_functionalize = _F._func_increment_nesting, _F._func_decrement_nesting
leave_jvp = _F._jvp_decrement_nesting
enter_jvp_nesting = _eager_transforms.enter_jvp_nesting
exit_jvp_nesting = _eager_transforms.exit_jvp_nesting
forward_mode, jvp_levels = fwAD, _eager_transforms  # what they count is looked at in each entry
fwd_grad_mode = fwAD._set_fwd_grad_enabled
fwd_grad_enabled = _C._is_fwd_grad_enabled
set_fwd_grad_enabled = _C._set_fwd_grad_enabled

# -- wrappers of levels
level_of, inner_of, is_batched = _F.maybe_get_level, _F.get_unwrapped, _F.is_batchedtensor
is_grad_wrapper = _F.is_gradtrackingtensor
is_functional = _F.is_functionaltensor
wrap_grad, unwrap_grad = _F._wrap_for_grad, _F._unwrap_for_grad
wrap_batch, unwrap_batch = _F._add_batch_dim, _F._unwrap_batched
sync = torch._sync  # applies the pending writes of a functional tensor
wrap_functional, unwrap_functional = _F._wrap_functional_tensor, _F._unwrap_functional_tensor
unwrap_if_dead = _F.unwrap_if_dead
inplace_requires_grad_allowed = _F.get_inplace_requires_grad_allowed
allow_inplace_requires_grad = _F.set_inplace_requires_grad_allowed
single_level_allowed = _F.get_single_level_autograd_function_allowed
allow_single_level = _F.set_single_level_autograd_function_allowed
SingleLevelFunction: Any = _SingleLevelFunction


_classes = torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER


def function_classes() -> str:
    """Changes with each custom Function applied at a level: torch makes a class, and counts it.

    It is the text of the counter, ``count(7)``: ``next`` would change it.
    """
    return repr(_classes)


MADE_FOR_ONE_CALL = "torch._functorch.autograd_function"  # the module of these classes


# -- autograd: the engine itself (the public `torch.autograd.grad` is shown to function modes), ...
run_backward = torch.autograd.Variable._execution_engine.run_backward
current_backward = _C._current_graph_task_id
will_run = _C._will_engine_execute_node
next_sequence_number = torch.autograd._get_sequence_nr
set_grad_enabled = _C._set_grad_enabled
Edge: Any = GradientEdge
# ... hooks of whoever runs around a region: they are for what is kept, which the node saves
top_saved_tensor_hooks = _A._top_saved_tensors_default_hooks
push_saved_tensor_hooks = _A._push_saved_tensors_default_hooks
pop_saved_tensor_hooks = _A._pop_saved_tensors_default_hooks

# -- dispatch keys: whether Python is called from inside of an operator
key_excluded = _C._dispatch_tls_is_dispatch_key_excluded
key_included = _C._dispatch_tls_is_dispatch_key_included
AUTOGRAD, FUNCTORCH_FRONT = _C.DispatchKey.AutogradOther, _C.DispatchKey.FuncTorchDynamicLayerFrontMode

# -- memory: who holds a storage, exactly
storage_use_count = _C._storage_Use_Count
storage_address = _C._storage_address

# -- autocast, of which the public context keeps a depth that an interrupt would leave behind
any_autocast = _C._is_any_autocast_enabled

# -- tracing: graphs inside of graphs, and values that stand for what a node gives
unset_mode = _C._unset_dispatch_mode


def trace_subgraph(f: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    """A graph of ``f`` of its own, made with the settings of the trace under way."""
    tracer: Any = _proxy_tensor._CURRENT_MAKE_FX_TRACER
    return tracer.trace_subgraph(f, *args)


def track_proxies(values: Any, proxy: Any, tracer: Any) -> None:
    """Let ``values`` be what ``proxy`` stands for in the graph."""
    _proxy_tensor.track_tensor_tree(values, proxy, constant=None, tracer=tracer)


def detached_below_autograd(t: torch.Tensor) -> torch.Tensor:
    """In a dispatch mode, a tensor of the same memory that counts its writes with ``t``."""
    key = _C.DispatchKey.ADInplaceOrView
    excluded = key_excluded(key)
    _C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return t.detach()
    finally:
        _C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def dual_level() -> int:
    """The level of plain forward mode that is open; -1 if none is."""
    return fwAD._current_level


def jvp_nesting() -> int:
    """How many jvp levels are open, as torch counts them for naming dual levels."""
    return _eager_transforms.JVP_NESTING


def close_jvp_levels(duals: int, nesting: int) -> None:
    """Close the dual levels above ``duals``, and set the count of jvp levels back."""
    while fwAD._current_level > duals:
        fwAD.exit_dual_level()
    _eager_transforms.JVP_NESTING = nesting


def default_device() -> torch.device | None:
    """The innermost device of a ``with torch.device(...)``, or of ``set_default_device``."""
    for i in reversed(range(function_depth())):
        mode = function_mode_at(i)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def device_mode(device: torch.device) -> Any:
    """The mode that makes a device the default one."""
    return DeviceContext(device)


def leave_legacy_vmap() -> int:
    """Leave the levels of the vmap that ``is_grads_batched`` uses; returns how many there were."""
    depth = _C._vmapmode_increment_nesting() - 1
    for _ in range(depth + 1):
        _C._vmapmode_decrement_nesting()
    return depth


def enter_legacy_vmap(depth: int) -> None:
    """Undo `leave_legacy_vmap`."""
    for _ in range(depth):
        _C._vmapmode_increment_nesting()
