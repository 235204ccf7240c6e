"""Private torch API in one place, each name with the reason why no public name serves.

``tests/repo/test_canary.py`` asserts that each name still does what functx uses it for, so a torch
release that changes one fails there, by name. The private API of ``torch.compile`` and
``torch.utils.checkpoint`` is in `compiler`, and that of traced graphs in `graphs`.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch._C import _functorch
from torch._functorch import eager_transforms as _eager_transforms
from torch._functorch import pyfunctorch as _pyfunctorch
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses import functional_tensor as _functional_tensor
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import GradientEdge
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.nn.utils import parametrize as _parametrize
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext as DeviceContext

_C: Any = torch._C
_F: Any = _functorch
_A: Any = torch._C._autograd

# -- modes: a region pushes and pops them itself and compares depths, so that it can restore the
# stack after an interrupt
push_function_mode = _C._push_on_torch_function_stack
pop_function_mode = _C._pop_torch_function_stack
function_depth = _C._len_torch_function_stack
function_mode_at = _C._get_function_stack_at
push_dispatch_mode = _C._push_on_torch_dispatch_stack
pop_dispatch_mode = _C._pop_torch_dispatch_stack
dispatch_depth = _C._len_torch_dispatch_stack
dispatch_mode_at = _C._get_dispatch_stack_at
infra_mode = _C._get_dispatch_mode
without_function_modes = _C.DisableTorchFunction
without_dispatch_modes = _python_dispatch._disable_current_modes
PROXY, FAKE = _C._TorchDispatchModeKey.PROXY, _C._TorchDispatchModeKey.FAKE
FUNCTIONAL = _C._TorchDispatchModeKey.FUNCTIONAL
TorchDispatchMode = _python_dispatch.TorchDispatchMode  # sees what runs below all transforms
# torch wraps dispatch modes to hide them from torch.compile, at a cost for each operation. A mode
# with this as `_should_skip_dynamo` is not wrapped.
never_skip_dynamo = classmethod(lambda cls: False)

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
grad_level = _eager_transforms.grad_increment_nesting  # as a context
# torch refuses `requires_grad_()` inside a transform unless the thread has set this flag. Entering
# a level does not change it. Every backward pass clears it, also for the code after the pass.
requires_grad_is_allowed = _F.get_inplace_requires_grad_allowed
allow_requires_grad = _F.set_inplace_requires_grad_allowed
current_interpreter = _pyfunctorch.retrieve_current_functorch_interpreter
cleared_interpreter_stack = _pyfunctorch.temporarily_clear_interpreter_stack
enter_jvp_nesting = _eager_transforms.enter_jvp_nesting
exit_jvp_nesting = _eager_transforms.exit_jvp_nesting
fwd_grad_mode = fwAD._set_fwd_grad_enabled
fwd_grad_enabled = _C._is_fwd_grad_enabled
set_fwd_grad_enabled = _C._set_fwd_grad_enabled

# -- wrappers of levels
level_of, inner_of, is_batched = _F.maybe_get_level, _F.get_unwrapped, _F.is_batchedtensor
is_wrapped, is_functional = _F.is_functorch_wrapped_tensor, _F.is_functionaltensor
is_legacy_batched = _F.is_legacy_batchedtensor
wrap_grad, unwrap_grad = _F._wrap_for_grad, _F._unwrap_for_grad
wrap_batch, unwrap_batch = _F._add_batch_dim, _F._unwrap_batched
sync = torch._sync  # applies the pending writes of a functional tensor
wrap_functional, unwrap_functional = _F._wrap_functional_tensor, _F._unwrap_functional_tensor
unwrap_if_dead = _F.unwrap_if_dead


class RequiresGradAllowed:
    """A context in which `requires_grad_()` may be called inside transforms."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: bool | None = requires_grad_is_allowed()
        allow_requires_grad(True)

    def __exit__(self, *raised: object) -> None:
        if self._before is not None:  # after an interrupt, this may be called a second time
            allow_requires_grad(self._before)
            self._before = None


class SingleLevelFunction(_SingleLevelFunction):
    """A Function that makes one node, at one level, without functorch's per-call class."""

    apply: Any  # implemented in C

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """The key of this kind of node in compiled autograd; only ``Function`` defines it."""
        return (ctx._autograd_function_id,)


def wrap_node_hooks(function: Any, wrap: Callable[[Any, Any], Any]) -> None:
    """Let nodes of a Function register ``wrap(node, hook)`` for each hook, also of its results."""
    nodes: Any = function._backward_cls

    class Wrapping(OrderedDict[int, Any]):
        """The hooks of a result, to which `Tensor.register_hook` adds."""

        def __init__(self, node: Any) -> None:
            super().__init__()
            self.node = weakref.ref(node)  # which holds these hooks

        def __setitem__(self, number: int, hook: Any) -> None:
            node = self.node()
            super().__setitem__(number, hook if node is None else wrap(node, hook))

    plain_hooks = nodes._register_hook_dict

    def register_hook_dict(node: Any, t: torch.Tensor) -> None:
        t._backward_hooks = Wrapping(node)
        plain_hooks(node, t)

    def wrapped(name: str) -> Callable[[Any, Any], Any]:
        plain = getattr(nodes, name)
        return lambda node, hook: plain(node, wrap(node, hook))

    nodes.register_hook = wrapped("register_hook")
    nodes.register_prehook = wrapped("register_prehook")
    nodes._register_hook_dict = register_hook_dict


def hang_on(t: torch.Tensor, register: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``register(t, hook)``, for a hook that user code registered on a stand-in for ``t``.

    A hook of ``register_multi_grad_hook`` waits for a list of nodes. The node of the stand-in in
    that list is replaced by the node of ``t``.
    """
    hook: Any = args[0] if args else kwargs.get("hook")
    code = getattr(hook, "__code__", None)
    if code is not None and code.co_qualname == _MULTI_GRAD_HOOK:
        cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in hook.__closure__)))
        cells["grad_fns"][cells["idx"]] = torch.autograd.graph._get_grad_fn_or_grad_acc(t)
    return register(t, *args, **kwargs)


_MULTI_GRAD_HOOK = "register_multi_grad_hook.<locals>.get_inner_hook.<locals>.inner_hook"


def apply_at_level(apply: Any, *args: Any) -> Any:
    """Make a node of a single-level Function, by its ``apply``."""
    if peek_interpreter() is None:
        return apply(*args)
    # The same as torch's context `enable_single_level_autograd_function`, but faster.
    before = _F.get_single_level_autograd_function_allowed()
    _F.set_single_level_autograd_function_allowed(True)
    try:
        return apply(*args)
    finally:
        _F.set_single_level_autograd_function_allowed(before)


_classes = torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER


def function_classes() -> str:
    """A string that changes whenever a custom Function is applied inside a transform.

    torch makes a class for each such call and counts them. The string is the ``repr`` of that
    counter, ``count(7)``, since ``next`` would advance it.
    """
    return repr(_classes)


MADE_FOR_ONE_CALL = "torch._functorch.autograd_function"  # the module of these classes

# -- autograd: the engine itself (the public `torch.autograd.grad` is shown to function modes), ...
run_backward = torch.autograd.Variable._execution_engine.run_backward
next_sequence_number = torch.autograd._get_sequence_nr  # nodes are numbered as they are made
sequence_number = operator.methodcaller("_sequence_nr")
current_node = _C._current_autograd_node  # that the engine is running on this thread
current_backward = _C._current_graph_task_id  # the backward under way; -1 outside
will_run = _C._will_engine_execute_node  # whether the current backward pass will run a node
set_grad_enabled = _C._set_grad_enabled
# ... and saved-tensor hooks of user code: regions apply them to the tensors that they save
top_saved_tensor_hooks = _A._top_saved_tensors_default_hooks
push_saved_tensor_hooks = _A._push_saved_tensors_default_hooks
pop_saved_tensor_hooks = _A._pop_saved_tensors_default_hooks

# -- dispatch keys: whether Python is called from inside of an operator
key_excluded = _C._dispatch_tls_is_dispatch_key_excluded
key_included = _C._dispatch_tls_is_dispatch_key_included
AUTOGRAD = _C.DispatchKey.AutogradOther
FUNCTORCH_FRONT = _C.DispatchKey.FuncTorchDynamicLayerFrontMode

# -- memory: how many references a storage has, and its address, unique as long as it lives
storage_use_count = _C._storage_Use_Count
storage_address = _C._storage_address
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass  # a tensor without storage
is_zero_without_memory = torch.Tensor._is_zerotensor  # zero tangents of forward mode
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass

# A view with the neg bit, as the imaginary part of a conjugate is.
negated_view = torch._neg_view

# -- operators and modules whose base classes are private
OpOverload, OpOverloadPacket = torch._ops.OpOverload, torch._ops.OpOverloadPacket
# Operators whose schema does not name all that they write: in training, the running statistics.
HIDDEN_WRITES = {
    getattr(torch.ops.aten, f"{name}batch_norm").default
    for name in ("native_", "cudnn_", "miopen_")
}
# ``Module.to()`` and the like call this before they set a converted parameter. With fake tensors it
# is the only call that shows that a module is being converted.
ASKED_BY_CONVERSIONS = torch._has_compatible_shallow_copy_type
BatchNorm = torch.nn.modules.batchnorm._BatchNorm  # lazy, synchronised and of any rank

# -- fake tensors, on which a function with a budget runs, and their errors where a value is needed
FakeTensor, FakeTensorMode = _fake_tensor.FakeTensor, _fake_tensor.FakeTensorMode
FunctionalTensor = _functional_tensor.FunctionalTensor  # in traces that remove writes
# A FunctionalTensor dispatches an operator even for a query of its size or device. These are the
# operators.
LOOKS = {*FunctionalTensor.metadata_fns, torch.ops.prim.device.default}
# In a trace with symbolic sizes, some kernels ask a wrapper for its size by this operator. functx
# answers with numbers, since the tracer would record the wrapper as a constant.
ANSWERS: Any = {torch.ops.aten.size.default: lambda t: [int(n) for n in t.shape]}
DataDependentOutputException = _fake_tensor.DataDependentOutputException
DynamicOutputShapeException = _fake_tensor.DynamicOutputShapeException


@functools.cache
def attributes_of_fakes() -> frozenset[str]:
    """The names of the attributes that torch itself sets on a fake tensor."""
    fake = FakeTensorMode().from_tensor(torch.empty(0))
    return frozenset({*vars(fake), "_is_param", "_is_buffer"})


# -- autocast: the public context counts its depth, and an interrupt would leave the count wrong
any_autocast = _C._is_any_autocast_enabled
without_autocast = _C._DisableAutocast  # for all devices; the public context is for one

# -- tracing: graphs inside graphs, and tensors that represent the result of a node
unset_mode = _C._unset_dispatch_mode
without_proxies = _proxy_tensor.disable_proxy_modes_tracing


def proxy_mode() -> Any:
    """The mode that is tracing a graph now, if any."""
    return infra_mode(PROXY) if dispatch_depth() else None


def trace_subgraph(f: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    """A separate graph of ``f``, traced with the settings of the current trace."""
    tracer: Any = _proxy_tensor._CURRENT_MAKE_FX_TRACER
    return tracer.trace_subgraph(f, *args)


def track_proxies(values: Any, proxy: Any, tracer: Any) -> Any:
    """Record in the graph that ``values`` are the results of ``proxy``; returns ``values``."""
    return _proxy_tensor.track_tensor_tree(values, proxy, constant=None, tracer=tracer)


def tracing() -> bool:
    """Whether operations are traced or run on fake tensors, so that tensors have no memory."""
    if not dispatch_depth():
        return False
    return any(infra_mode(key) is not None for key in (PROXY, FAKE, FUNCTIONAL))


def transforming() -> bool:
    """Whether any transform is active, or operations are traced."""
    return peek_interpreter() is not None or tracing()


def alive(t: Any) -> Any:
    """Remove the wrappers whose levels have ended from a tensor; returns other values unchanged."""
    while isinstance(t, torch.Tensor) and (value := unwrap_if_dead(t)) is not t:
        t = value
    return t


def require_grad(t: torch.Tensor) -> torch.Tensor:
    """``t.requires_grad_()``, also for a wrapper inside a transform."""
    if requires_grad_is_allowed():
        return t.requires_grad_()
    with RequiresGradAllowed():
        return t.requires_grad_()


def sparse_coo_parts(t: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a COO tensor; the public methods require it to be coalesced."""
    return [t._indices(), t._values()]


def parametrizations_are_cached() -> bool:
    """Whether ``torch.nn.utils.parametrize.cached()`` is active; no public function says."""
    return _parametrize._cache_enabled > 0


def storage_of(t: torch.Tensor) -> int:
    """The address of a tensor's storage object; -1 if it has no storage, like a sparse tensor."""
    try:
        return storage_address(t.elem if type(t) is FunctionalTensor else t)
    except (RuntimeError, NotImplementedError):
        return -1


def memory_of(t: torch.Tensor) -> torch.UntypedStorage:
    """The storage whose address `storage_of` returns."""
    return (t.elem if type(t) is FunctionalTensor else t).untyped_storage()


def is_dense(t: Any) -> bool:
    """Whether ``t`` is a strided tensor, of ``torch.Tensor`` itself or a class that traces use."""
    return type(t) in (torch.Tensor, FakeTensor, FunctionalTensor) and t.layout is torch.strided


# Whether the C++ node of a custom Function may be freed while its Python object is in use.
OUTLIVED = torch.__version__ < "2.13"


def gradient_edge(t: torch.Tensor) -> Any:
    """The gradient edge of ``t``, or ``t`` itself if it is a leaf."""
    if t.grad_fn is None or (OUTLIVED and t.layout is not torch.strided):
        return t
    owner = None
    if OUTLIVED and isinstance(t.grad_fn, torch.autograd.function.BackwardCFunction):
        with without_function_modes(), without_dispatch_modes(), torch.enable_grad():
            owner = t.view_as(t).grad_fn  # this node keeps the other one alive
    # `tuple.__new__` is what the constructor of the class calls; this is faster.
    return tuple.__new__(GradientEdge, (t.grad_fn, t.output_nr, owner))


def detached_below_autograd(t: torch.Tensor) -> torch.Tensor:
    """In a dispatch mode, detach ``t`` so that both share a version counter."""
    with _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False):
        return t.detach()


def dual_level() -> int:
    """The level of plain forward mode that is open; -1 if none is."""
    return fwAD._current_level


def jvp_nesting() -> int:
    """How many jvp levels are open, as torch counts them for naming dual levels."""
    return _eager_transforms.JVP_NESTING


def stacks() -> tuple[int, int, int, bool, bool, int, int]:
    """The depths of torch's stacks, and its modes.

    In order: the number of function modes, of dispatch modes and of functorch levels; whether grad
    mode and forward mode are enabled; the dual level, and the number of jvp levels.
    """
    return (
        *(function_depth(), dispatch_depth(), functorch_depth()),
        *(torch.is_grad_enabled(), fwd_grad_enabled()),
        *(fwAD._current_level, _eager_transforms.JVP_NESTING),
    )


def close_jvp_levels(duals: int, nesting: int) -> None:
    """Close the dual levels above ``duals``, and set the count of jvp levels back."""
    while fwAD._current_level > duals:
        fwAD.exit_dual_level()
    _eager_transforms.JVP_NESTING = nesting


# -- settings of the process that change results; their public getters warn, raise or are slow
def _deterministic() -> tuple[bool, bool]:
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


def _precision() -> Any:
    try:
        return _C._get_float32_matmul_precision()
    except RuntimeError:  # it was set for each backend, by the newer API
        return {b: _C._get_fp32_precision_getter(b, "matmul") for b in ("cuda", "mkldnn")}


def _set_precision(wanted: Any) -> None:
    if isinstance(wanted, str):
        torch.set_float32_matmul_precision(wanted)
        return
    for backend, precision in wanted.items():
        _C._set_fp32_precision_setter(backend, "matmul", precision)


FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (_deterministic, lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1])),
    (_precision, _set_precision),
]


# Further settings by which torch chooses kernels. A graph is valid for one combination of them.
BACKENDS: list[Callable[[], Any]] = [
    *(_C._get_mkldnn_enabled, _C._get_cudnn_enabled, _C._get_cudnn_benchmark),
    *(_C._get_cudnn_deterministic, _C._get_nnpack_enabled, torch.is_anomaly_enabled),
]
# The getters of `FLAGS`, one value each: a fast check of whether any flag has changed.
QUICK: list[Callable[[], Any]] = [
    *(torch.get_default_dtype, _C._get_flash_sdp_enabled, _C._get_mem_efficient_sdp_enabled),
    *(_C._get_math_sdp_enabled, _C._get_cudnn_sdp_enabled, _C._get_sdp_priority_order),
    *(_C._get_deterministic_algorithms, _C._get_deterministic_algorithms_warn_only, _precision),
]


def flags_now() -> tuple[Any, ...]:
    """The current value of each of `FLAGS`."""
    # Written out because regions read the flags at each call and each replay.
    try:
        precision = _C._get_float32_matmul_precision()
    except RuntimeError:
        precision = _precision()
    return (
        torch.get_default_dtype(),
        _C._get_flash_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
        _C._get_sdp_priority_order(),
        (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        precision,
    )


def default_device() -> torch.device | None:
    """The innermost device of a ``with torch.device(...)``, or of ``set_default_device``."""
    modes = map(function_mode_at, reversed(range(function_depth())))
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


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
