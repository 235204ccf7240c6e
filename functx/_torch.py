"""The only file of functx that touches private torch API: each name, with its reason.

``tests/test_canary.py`` asserts that every name still exists, so that a torch release which
moves one fails there, by name, and not somewhere inside the engine.
"""

# ruff: noqa: F401 - the names are for the other modules

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    # Which run of the autograd engine is executing on this thread: tells whether code runs
    # inside a backward that was started within a region.
    _current_graph_task_id as current_graph_task_id,
)
from torch._C import (
    # The base of every autograd.Function; its `apply` is the C++ entry point that makes a node.
    _FunctionBase as FunctionBase,
)
from torch._C import (
    # The stack of torch-function modes, to know whether ours is on top.
    _get_function_stack_at as get_function_mode_at,
)
from torch._C import (
    _len_torch_dispatch_stack as dispatch_mode_depth,
)
from torch._C import (
    # How many tensors (and Python objects) hold a piece of memory.
    _storage_Use_Count as storage_use_count,
)
from torch._C import (
    _len_torch_function_stack as function_mode_depth,
)
from torch._C._functorch import (
    # What transform an interpreter stands for.
    TransformType as TransformType,
)
from torch._C._functorch import (
    # Batch dimensions: given, taken away; levels of vmap entered and left.
    _add_batch_dim as add_batch_dim,
)
from torch._C._functorch import (
    # functionalize: levels entered and left, tensors wrapped and unwrapped.
    _func_decrement_nesting as exit_functionalize_level,
)
from torch._C._functorch import (
    _func_increment_nesting as enter_functionalize_level,
)
from torch._C._functorch import (
    # grad: levels entered and left, tensors wrapped and unwrapped.
    _grad_decrement_nesting as exit_grad_level,
)
from torch._C._functorch import (
    _grad_increment_nesting as enter_grad_level,
)
from torch._C._functorch import (
    # Written-through inputs of a functionalized function.
    _propagate_functional_input_mutation as propagate_functional_input_mutation,
)
from torch._C._functorch import (
    _unwrap_batched as unwrap_batched,
)
from torch._C._functorch import (
    _unwrap_for_grad as unwrap_for_grad,
)
from torch._C._functorch import (
    _unwrap_functional_tensor as unwrap_functional_tensor,
)
from torch._C._functorch import (
    _vmap_decrement_nesting as exit_vmap_level,
)
from torch._C._functorch import (
    _vmap_increment_nesting as enter_vmap_level,
)
from torch._C._functorch import (
    _wrap_for_grad as wrap_for_grad,
)
from torch._C._functorch import (
    _wrap_functional_tensor as wrap_functional_tensor,
)
from torch._C._functorch import (
    # Making a wrapper require grad inside a transform is forbidden to users; the engine must.
    get_inplace_requires_grad_allowed as get_inplace_requires_grad_allowed,
)
from torch._C._functorch import (
    # An autograd.Function node on wrappers of one level must be allowed explicitly.
    get_single_level_autograd_function_allowed as get_single_level_function_allowed,
)
from torch._C._functorch import (
    get_unwrapped as get_unwrapped,
)
from torch._C._functorch import (
    is_batchedtensor as is_batched,
)
from torch._C._functorch import (
    is_functionaltensor as is_functional,
)
from torch._C._functorch import (
    maybe_get_level as wrapper_level,
)
from torch._C._functorch import (
    # Whether a tensor belongs to a living transform at all, and to which.
    is_functorch_wrapped_tensor as is_wrapped,
)
from torch._C._functorch import (
    peek_interpreter_stack as peek_interpreter_stack,
)
from torch._C._functorch import (
    set_inplace_requires_grad_allowed as set_inplace_requires_grad_allowed,
)
from torch._C._functorch import (
    set_single_level_autograd_function_allowed as set_single_level_function_allowed,
)
from torch._C._functorch import (
    # Wrappers whose level has ended stand for the value inside.
    unwrap_if_dead as unwrap_if_dead,
)
from torch._functorch import eager_transforms as _eager_transforms
from torch._functorch.eager_transforms import (
    # torch.autograd.grad with zeros for inputs that the outputs do not depend on, and with
    # compiled autograd off.
    _autograd_grad as autograd_grad,
)
from torch._functorch.eager_transforms import (
    # A grad level as a context, counted as torch.func counts.
    grad_increment_nesting as grad_level,
)
from torch._functorch.predispatch import (
    # Batching rules written in Python are loaded by the first vmap; ours may be the first.
    lazy_load_decompositions as load_batching_rules,
)
from torch._functorch.pyfunctorch import (
    # Peeling a level off the stack, with the grad mode that the level below had.
    retrieve_current_functorch_interpreter as current_interpreter,
)
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack as cleared_interpreter_stack,
)
from torch._functorch.pyfunctorch import (
    temporarily_restore_interpreter_stack as restored_interpreter_stack,
)
from torch.autograd import (
    # Autograd nodes are numbered as they are made: tells nodes of a region from older ones.
    _get_sequence_nr as next_sequence_number,
)
from torch.autograd import forward_ad as _forward_ad
from torch.multiprocessing.reductions import (
    # A weak reference to the memory behind tensors, whichever tensors they are.
    StorageWeakRef as StorageWeakRef,
)
from torch.autograd.forward_ad import _set_fwd_grad_enabled as set_forward_grad_enabled
from torch.autograd.function import (
    # A Function that makes one node, at one level, without functorch's per-call class.
    _SingleLevelFunction as SingleLevelFunction,
)
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import (
    # torch.autograd.grad without its torch-function check: a backward the engine starts must
    # not hide the operations of its hooks from the region's own mode.
    _engine_run_backward as run_backward,
)
from torch.utils._python_dispatch import (
    # Sees every operation below autograd and functorch: what functx.memory counts with.
    TorchDispatchMode as TorchDispatchMode,
)
from torch.utils._python_dispatch import (
    # Whether a tensor is made of others, whose storages are the real ones.
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

__all__ = [name for name in globals() if not name.startswith("_")]


def enter_jvp_level() -> int:
    """Enter a jvp level, counted as ``torch.func.jvp`` counts, so that nested ones know it."""
    return int(_eager_transforms.enter_jvp_nesting())


def exit_jvp_level() -> None:
    """Leave the jvp level entered last."""
    _eager_transforms.exit_jvp_nesting()


def forward_ad_level() -> int:
    """The active ``torch.autograd.forward_ad`` level, -1 outside any."""
    return int(_forward_ad._current_level)


def gradient_edge(t: torch.Tensor) -> Any:
    """Where the tape of ``t`` begins; ``t`` itself where it is a leaf."""
    return t if t.grad_fn is None else GradientEdge(t.grad_fn, t.output_nr)


def require_grad(t: torch.Tensor) -> torch.Tensor:
    """``t.requires_grad_()``, also for a wrapper inside a transform."""
    allowed = get_inplace_requires_grad_allowed()
    set_inplace_requires_grad_allowed(True)
    try:
        return t.requires_grad_()
    finally:
        set_inplace_requires_grad_allowed(allowed)


def interpreter_depth() -> int:
    """How many transforms are active."""
    stack = torch._C._functorch.get_interpreter_stack()
    return 0 if stack is None else len(stack)


def sequence_number(node: Any) -> int:
    """When a node of the tape was made, in the count of its thread."""
    return int(node._sequence_nr())


def interpreters() -> list[Any]:
    """The active transforms, outermost first."""
    stack = torch._C._functorch.get_interpreter_stack()
    return [] if stack is None else list(stack)


def inside_dispatcher() -> bool:
    """Whether this is Python that an operator runs below functorch: a decomposition, say.

    There tensors are bare values of some level, which only that operator can make sense of.
    """
    keys = torch._C.DispatchKey
    if torch._C._dispatch_tls_is_dispatch_key_excluded(keys.AutogradOther):
        return True
    return peek_interpreter_stack() is not None and not (
        torch._C._dispatch_tls_is_dispatch_key_included(keys.FuncTorchDynamicLayerFrontMode)
    )


def sparse_coo_parts(t: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a COO tensor, coalesced or not; the public ones refuse the latter."""
    return [t._indices(), t._values()]


def proxy_mode() -> Any:
    """The mode that is tracing a graph now, if any."""
    return _proxy_tensor.get_proxy_mode()


def without_proxies() -> Any:
    """A context in which nothing is traced."""
    return _proxy_tensor.disable_proxy_modes_tracing()


def trace_subgraph(fn: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    """A graph of ``fn`` of its own, made with the settings of the trace under way."""
    return _proxy_tensor._CURRENT_MAKE_FX_TRACER.trace_subgraph(fn, *args)  # type: ignore[union-attr]


def track_proxies(values: Any, proxy: Any, tracer: Any) -> Any:
    """``values`` as what ``proxy`` stands for in the graph."""
    return _proxy_tensor.track_tensor_tree(values, proxy, constant=None, tracer=tracer)


_wrapping = threading.Lock()
_observing = 0


def observe_wrapping(resolve: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Until `stop_observing_wrapping`, ask ``resolve`` what torch.func is to wrap for a level."""
    global _observing
    with _wrapping:
        _observing += 1
        if _observing == 1:
            _eager_transforms._wrap_for_grad = lambda t, level: wrap_for_grad(resolve(t), level)


def stop_observing_wrapping() -> None:
    """End one `observe_wrapping`."""
    global _observing
    with _wrapping:
        _observing -= 1
        if _observing == 0:
            _eager_transforms._wrap_for_grad = wrap_for_grad


def tracing() -> bool:
    """Whether operations are traced or run on fake tensors: nothing has memory then."""
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


def user_modes() -> list[Any]:
    """The active function and dispatch modes that may change what operations do."""
    return [
        mode
        for depth, mode_at in (
            (function_mode_depth(), get_function_mode_at),
            (dispatch_mode_depth(), torch._C._get_dispatch_stack_at),
        )
        for mode in map(mode_at, range(depth))
        if not getattr(mode, "only_observes", False)
    ]


def missing_modes(modes: list[Any]) -> list[Any]:
    """Which of some modes are not active now, nor another of their kind."""
    active = {type(mode) for mode in user_modes()} if modes else set()
    return [mode for mode in modes if type(mode) not in active]


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The view of ``base`` that ``view`` is of its own base."""
    return view._view_func_unsafe(base)


def detachable(t: torch.Tensor) -> bool:
    """Whether ``t.detach_()`` can take a tensor off its tape."""
    return not t._is_view()
