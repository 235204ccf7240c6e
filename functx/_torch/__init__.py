"""Private torch API, in one place; each name with the reason that no public one serves.

``tests/repo/test_canary.py`` asserts that each still means what it is used for, so that a torch
release which moves one fails there, by name. What is about ``torch.compile`` and
``torch.utils.checkpoint`` is in `compiler`; what is about traced graphs, in `graphs`.
"""

from __future__ import annotations

import functools
import operator
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

# -- modes: pushed and popped one by one, so that an interrupt between two is undone by depth
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
# Dispatch modes are wrapped, at a cost for each operation, to be invisible to torch.compile, unless
# this says that they need not be.
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
# torch refuses `requires_grad_()` inside a transform unless the thread has set this flag.
# Entering a level keeps it. Each backward pass clears it, also for the code after the pass.
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
        if self._before is not None:  # (after an interrupt it may be called again)
            allow_requires_grad(self._before)
            self._before = None


class SingleLevelFunction(_SingleLevelFunction):
    """A Function that makes one node, at one level, without functorch's per-call class."""

    apply: Any  # torch's, in C

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """What compiled autograd knows nodes of this kind by; only ``Function`` itself has it."""
        return (ctx._autograd_function_id,)


def wrap_node_hooks(function: Any, wrap: Callable[[Any, Any], Any]) -> None:
    """Let nodes of a Function register ``wrap(node, hook)`` for each hook and pre-hook."""
    nodes: Any = function._backward_cls

    def wrapped(name: str) -> Callable[[Any, Any], Any]:
        plain = getattr(nodes, name)
        return lambda node, hook: plain(node, wrap(node, hook))

    nodes.register_hook = wrapped("register_hook")
    nodes.register_prehook = wrapped("register_prehook")


def hang_on(t: torch.Tensor, register: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``register(t, hook)``, for a hook that was meant for a tensor that stands in for ``t``.

    A hook of ``register_multi_grad_hook`` waits for the nodes of its tensors, which it has noted.
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
    # (What torch's context `enable_single_level_autograd_function` does, which takes longer.)
    before = _F.get_single_level_autograd_function_allowed()
    _F.set_single_level_autograd_function_allowed(True)
    try:
        return apply(*args)
    finally:
        _F.set_single_level_autograd_function_allowed(before)


_classes = torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER


def function_classes() -> str:
    """Changes with each custom Function applied at a level: torch makes a class, and counts it.

    It is the text of the counter, ``count(7)``: ``next`` would change it.
    """
    return repr(_classes)


MADE_FOR_ONE_CALL = "torch._functorch.autograd_function"  # the module of these classes

# -- autograd: the engine itself (the public `torch.autograd.grad` is shown to function modes), ...
run_backward = torch.autograd.Variable._execution_engine.run_backward
next_sequence_number = torch.autograd._get_sequence_nr  # nodes are numbered as they are made
sequence_number = operator.methodcaller("_sequence_nr")
current_node = _C._current_autograd_node  # that the engine is running on this thread
current_backward = _C._current_graph_task_id  # the backward under way; -1 outside
will_run = _C._will_engine_execute_node  # whether the backward under way comes by a node
set_grad_enabled = _C._set_grad_enabled
# ... hooks of whoever runs around a region: they are for what is kept, which the node saves
top_saved_tensor_hooks = _A._top_saved_tensors_default_hooks
push_saved_tensor_hooks = _A._push_saved_tensors_default_hooks
pop_saved_tensor_hooks = _A._pop_saved_tensors_default_hooks

# -- dispatch keys: whether Python is called from inside of an operator
key_excluded = _C._dispatch_tls_is_dispatch_key_excluded
key_included = _C._dispatch_tls_is_dispatch_key_included
AUTOGRAD = _C.DispatchKey.AutogradOther
FUNCTORCH_FRONT = _C.DispatchKey.FuncTorchDynamicLayerFrontMode

# -- memory: who holds a storage, exactly, and its address, which is no other's while it lives
storage_use_count = _C._storage_Use_Count
storage_address = _C._storage_address
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass  # a tensor without memory of its own
is_zero_without_memory = torch.Tensor._is_zerotensor  # of forward mode
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass

# -- operators and modules: what lists of them may hold, and what has only private base classes
OpOverload, OpOverloadPacket = torch._ops.OpOverload, torch._ops.OpOverloadPacket
# Schemas that do not say what they write: running means and variances, in training.
HIDDEN_WRITES = {
    getattr(torch.ops.aten, f"{name}batch_norm").default
    for name in ("native_", "cudnn_", "miopen_")
}
# What ``Module.to()`` and the like ask before they set a parameter that they have converted: all
# that is shown of a conversion on fake tensors.
ASKED_BY_CONVERSIONS = torch._has_compatible_shallow_copy_type
BatchNorm = torch.nn.modules.batchnorm._BatchNorm  # lazy, synchronised and of any rank

# -- fake tensors, on which a budgeted function is run; and how they say that values are needed
FakeTensor, FakeTensorMode = _fake_tensor.FakeTensor, _fake_tensor.FakeTensorMode
FunctionalTensor = _functional_tensor.FunctionalTensor  # in a trace without writes
# What such tensors dispatch where others only look: sizes, devices.
LOOKS = {*FunctionalTensor.metadata_fns, torch.ops.prim.device.default}
# Asked of wrappers in a trace with symbols, by kernels that know none: a tracer would keep what it
# is asked of as a constant.
ANSWERS: Any = {torch.ops.aten.size.default: lambda t: [int(n) for n in t.shape]}
DataDependentOutputException = _fake_tensor.DataDependentOutputException
DynamicOutputShapeException = _fake_tensor.DynamicOutputShapeException


@functools.cache
def attributes_of_fakes() -> frozenset[str]:
    """The attributes that torch itself gives to a fake tensor."""
    fake = FakeTensorMode().from_tensor(torch.empty(0))
    return frozenset({*vars(fake), "_is_param", "_is_buffer"})


# -- autocast, of which the public context keeps a depth that an interrupt would leave behind
any_autocast = _C._is_any_autocast_enabled
without_autocast = _C._DisableAutocast  # of all devices; the public context is for one

# -- tracing: graphs inside of graphs, and values that stand for what a node gives
unset_mode = _C._unset_dispatch_mode
without_proxies = _proxy_tensor.disable_proxy_modes_tracing


def proxy_mode() -> Any:
    """The mode that is tracing a graph now, if any."""
    return infra_mode(PROXY) if dispatch_depth() else None


def trace_subgraph(f: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    """A graph of ``f`` of its own, made with the settings of the trace under way."""
    tracer: Any = _proxy_tensor._CURRENT_MAKE_FX_TRACER
    return tracer.trace_subgraph(f, *args)


def track_proxies(values: Any, proxy: Any, tracer: Any) -> Any:
    """``values``, which are now what ``proxy`` stands for in the graph."""
    return _proxy_tensor.track_tensor_tree(values, proxy, constant=None, tracer=tracer)


def tracing() -> bool:
    """Whether operations are traced or run on fake tensors: nothing has memory then."""
    if not dispatch_depth():
        return False
    return any(infra_mode(key) is not None for key in (PROXY, FAKE, FUNCTIONAL))


def transforming() -> bool:
    """Whether any transform is active, or operations are traced."""
    return peek_interpreter() is not None or tracing()


def alive(t: Any) -> Any:
    """The value inside of wrappers whose levels have ended, of a tensor; all else as it is."""
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
    """Indices and values of a COO tensor, coalesced or not; the public ones refuse the latter."""
    return [t._indices(), t._values()]


def parametrizations_are_cached() -> bool:
    """Whether ``torch.nn.utils.parametrize.cached()`` is active; the public API can't be asked."""
    return _parametrize._cache_enabled > 0


def storage_of(t: torch.Tensor) -> int:
    """What a tensor's memory is known by while it lives; -1 for what has none, a sparse one say."""
    try:
        return storage_address(t.elem if type(t) is FunctionalTensor else t)
    except (RuntimeError, NotImplementedError):
        return -1


def memory_of(t: torch.Tensor) -> torch.UntypedStorage:
    """The storage that `storage_of` knows."""
    return (t.elem if type(t) is FunctionalTensor else t).untyped_storage()


def is_dense(t: Any) -> bool:
    """Whether it is a strided tensor of no subclass but those that traces use."""
    return type(t) in (torch.Tensor, FakeTensor, FunctionalTensor) and t.layout is torch.strided


OUTLIVED = torch.__version__ < "2.13"  # whether a custom Function's node dies before its object


def gradient_edge(t: torch.Tensor) -> Any:
    """Where the tape of ``t`` begins; ``t`` itself where it is a leaf."""
    if t.grad_fn is None or (OUTLIVED and t.layout is not torch.strided):
        return t
    owner = None
    if OUTLIVED and isinstance(t.grad_fn, torch.autograd.function.BackwardCFunction):
        with without_function_modes(), without_dispatch_modes(), torch.enable_grad():
            owner = t.view_as(t).grad_fn  # a node below which the other one lives
    # (`tuple.__new__` is what the class would call.)
    return tuple.__new__(GradientEdge, (t.grad_fn, t.output_nr, owner))


def detached_below_autograd(t: torch.Tensor) -> torch.Tensor:
    """In a dispatch mode, a tensor of the same memory that counts its writes with ``t``."""
    with _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False):
        return t.detach()


def dual_level() -> int:
    """The level of plain forward mode that is open; -1 if none is."""
    return fwAD._current_level


def jvp_nesting() -> int:
    """How many jvp levels are open, as torch counts them for naming dual levels."""
    return _eager_transforms.JVP_NESTING


def stacks() -> tuple[int, int, int, bool, bool, int, int]:
    """How deep torch's stacks are, and its modes.

    These are the modes of functions and of operators, functorch's levels, grad mode, forward mode,
    and the levels of duals and of jvp.
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


# -- what torch computes with: flags of the process whose public getters warn, raise or are slow
def _deterministic() -> tuple[bool, bool]:
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


def _precision() -> Any:
    try:
        return _C._get_float32_matmul_precision()
    except RuntimeError:  # torch's newer API has set it by backend
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


# What else kernels are chosen by: a graph is for what these say.
BACKENDS: list[Callable[[], Any]] = [
    *(_C._get_mkldnn_enabled, _C._get_cudnn_enabled, _C._get_cudnn_benchmark),
    *(_C._get_cudnn_deterministic, _C._get_nnpack_enabled, torch.is_anomaly_enabled),
]
# For a quick look at whether any of `FLAGS` has changed.
QUICK: list[Callable[[], Any]] = [
    *(torch.get_default_dtype, _C._get_flash_sdp_enabled, _C._get_mem_efficient_sdp_enabled),
    *(_C._get_math_sdp_enabled, _C._get_cudnn_sdp_enabled, _C._get_sdp_priority_order),
    *(_C._get_deterministic_algorithms, _C._get_deterministic_algorithms_warn_only, _precision),
]


def flags_now() -> tuple[Any, ...]:
    """What each of `FLAGS` is now."""
    # (Written out: regions read this at each call and each replay.)
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
