"""Private torch API that lowering to JAX uses, each name with its reason.

``import functx`` does not import this module, because torch's decompositions load slowly.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch

# The function under which function modes see ``torch.nn.functional.grouped_mm``.
from torch import _grouped_mm as grouped_mm

# For operators with their own autograd kernel: how the kernel calls the operator below autograd.
from torch._C import _after_autograd_keyset
from torch._C import _AutoDispatchBelowAutograd as below_autograd

# A wrapper of a functorch level has no data to export. The tensor inside it does.
from torch._C._functorch import get_unwrapped
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped

# The global table has decompositions beyond core ATen (from torch's reference implementations).
# An operation without a rule in functx is looked up there before it counts as unsupported.
from torch._decomp import core_aten_decompositions, decomposition_table

# Graphs call overloads. The class distinguishes them from ``operator.getitem`` and regions.
from torch._ops import HigherOrderOperator, OpOverload

# Tensors without data: a traced value can't become a constant of the graph by mistake.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# The tracer. ``torch.export`` can't be used, since it refuses functorch levels and custom pytrees.
from torch.fx.experimental.proxy_tensor import make_fx

# The Function whose node carries the backward hooks of modules.
from torch.nn.modules._functions import BackwardHookFunction

# A dispatch mode sees each ATen operation below autograd and functorch. No other place can read
# grad mode for each operation.
from torch.utils._python_dispatch import TorchDispatchMode

# No public function maps over the arguments of an operation (which may be lists of tensors), and
# Dynamo traces only torch's own pytree functions.
from torch.utils._pytree import SUPPORTED_NODES, tree_map, tree_map_only

from functx._torch import SingleLevelFunction, apply_at_level
from functx._torch.process_patches import plain_apply

F = TypeVar("F", bound=Callable[..., Any])

# Held while a function is traced, because the tracer's settings are global to the process. Both
# directions share one lock: a torch function may call a JAX function that calls a torch function.
TRACING = threading.RLock()


def _outward(frame: FrameType | None) -> Iterator[tuple[FrameType, str]]:
    """A frame and its callers, each with the name of its module."""
    while frame is not None:
        yield frame, str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back


def _is_handler(frame: FrameType) -> bool:
    """Whether a frame is the handler of a function mode."""
    return frame.f_code.co_name == "__torch_function__"


def called_by(*modules: str) -> bool:
    """Whether the innermost caller outside functx is in one of ``modules``.

    A name that ends with ``_``, such as ``"torch._"``, is a prefix.
    """
    # These frames may lie in between: functx's own, and torch's around the handler of a mode.
    between = ("functx.", "torch._compile", "torch._dynamo.")
    for frame, name in _outward(sys._getframe(1)):
        if not (name.startswith(between) or _is_handler(frame)):
            return any(name.startswith(m) if m.endswith("_") else name == m for m in modules)
    return False


def called_by_us(func: Any) -> bool:
    """Whether functx called a torch function itself.

    A function mode of functx that passes on a call of user code does not count.
    """
    passed_on = False
    for frame, name in _outward(sys._getframe(1)):
        if name.partition(".")[0] == "functx":
            passed_on = _is_handler(frame) and frame.f_locals.get("func") == func
        # Handlers of other modes, and tensor methods written in Python, may lie in between.
        elif not (_is_handler(frame) or name in ("torch._tensor", "torch.overrides")):
            return not passed_on
    return False


def asked_by(asking: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether one of certain functions of torch reads a value, with no user code in between.

    Args:
        asking: names of functions, by their module or, with a final period, by their package
            (``"torch.distributions."``).
    """
    for frame, name in _outward(sys._getframe(1)):
        for module, functions in asking.items():
            if name == module or (module.endswith(".") and name.startswith(module)):
                return frame.f_code.co_name in functions
        if name.partition(".")[0] not in ("torch", "functx"):
            return False
    return False


def base_of(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind the wrappers of functorch levels; its storage holds the data."""
    while is_functorch_wrapped(x):
        x = get_unwrapped(x)
    return x


def is_plain(x: torch.Tensor) -> bool:
    """Whether ``x`` is a tensor with data: neither a wrapper of a transform, nor fake, nor meta."""
    return not (is_functorch_wrapped(x) or isinstance(x, FakeTensor) or x.is_meta)


def is_zero_tensor(x: torch.Tensor) -> bool:
    """Whether ``x`` is an efficient zero tensor of forward mode, which has no memory."""
    return x._is_zerotensor()


_ONCE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__


def is_once_differentiable(function: Any) -> bool:
    """Whether the backward of a custom Function was wrapped by ``once_differentiable``.

    The wrapper can be recognised by its code object only.
    """
    return getattr(function.backward, "__code__", None) is _ONCE


def asking_no_mode(f: Any) -> FunctionType:
    """A Python function of torch, without its check for ``__torch_function__`` overrides.

    A function mode is disabled while its handler runs. So with the check, an active mode would see
    the function itself but nothing that the function calls.
    """
    questions = ("has_torch_function", "has_torch_function_unary")
    unasked = dict.fromkeys(questions, lambda *_: False)
    return FunctionType(f.__code__, {**f.__globals__, **unasked}, f.__name__, f.__defaults__)


def saved_tensors_hooks() -> Any:
    """The innermost pair of saved-tensor hooks, or ``None``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def unhooked() -> AbstractContextManager[Any]:
    """A context in which autograd saves tensors unchanged, also if saved-tensor hooks are active.

    No public function says whether hooks are active. Hooks are pushed only if so, because pushing
    them raises an error where they are disabled.
    """
    if saved_tensors_hooks() is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def is_mutable(target: Any) -> bool:
    """Whether the schema of an operation says that it writes to one of its arguments."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def pytree_node(cls: type) -> Any:
    """The functions by which torch flattens and unflattens a class; ``None`` for leaves.

    No public function reads the registry.
    """
    return SUPPORTED_NODES.get(cls)


def name_of(op: OpOverload) -> str:
    """``"aten::sum.dim_IntList"``; the first overload of a packet is called ``default``."""
    return f"{op._schema.name}.{op._overloadname}"


def typed_arguments(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each argument of a call with its type in the schema: ``("Optional[number]", 3)``."""
    types = {argument.name: str(argument.real_type) for argument in op._schema.arguments}
    return [*zip(types.values(), args), *((types[name], x) for name, x in kwargs.items())]


def below_vmap() -> Any:
    """A context for a custom batching rule: operators in it run at the levels below vmap's."""
    return torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
    )


def old_vmap_level() -> int:
    """How many calls of ``torch.autograd.grad(is_grads_batched=True)`` are running.

    They use the vmap from before functorch, with its own kind of batched tensor.
    """
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1


def old_batch_in_front(x: torch.Tensor, level: int) -> torch.Tensor:
    """Unwrap a tensor of the old vmap, batch dimension first; of size 1 if it is not batched."""
    return torch._remove_batch_dim(x, level, 1, 0)


def with_old_batch_in_front(x: torch.Tensor, level: int) -> torch.Tensor:
    """Wrap a tensor whose first dimension is the batch for the old vmap."""
    return torch._add_batch_dim(x, 0, level)


def nonstrict_trace(f: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``f`` so that Dynamo puts it into its graph unopened; AOTAutograd traces through it."""
    import torch._dynamo  # imported late: it takes as long to import as all of torch

    return torch._dynamo.nonstrict_trace(f)


def runs_while_tracing(f: F) -> F:
    """Mark a function that Dynamo calls while it traces; the result is a constant of the graph.

    ``torch._dynamo.assume_constant_result`` does the same, but importing it is slow.
    """
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


def redispatch(op: OpOverload, keyset: Any, *args: Any) -> Any:
    """Call an operator from its own kernel of the autograd key, with the keys below that."""
    return op.redispatch(keyset & _after_autograd_keyset, *args)


def apply_function(function: Any, *args: Any) -> Any:
    """Make a node of a single-level Function without the interception of ``Function.apply``.

    Regions see the operator that makes the node.
    """
    return apply_at_level(plain_apply(function), *args)


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module itself, or a parameter of its own, has hooks that see gradients."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    parameters = [p for p in module._parameters.values() if p is not None]
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def original_of(f: Any) -> Any:
    """The function or module that ``torch.compile`` wrapped; anything else unchanged."""
    name = "_orig_mod" if isinstance(f, torch.nn.Module) else "_torchdynamo_orig_callable"
    return getattr(f, name, f)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor in the arguments or results of an operation."""
    return tree_map_only(torch.Tensor, fn, tree)


# The operator that ``item()``, ``float()`` and ``bool()`` call to read a tensor as a number.
LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
