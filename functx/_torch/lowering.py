"""Private torch API that lowering to JAX uses, each name with its reason.

``import functx`` does not import this module: torch's decompositions take a while to load.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch

# What function modes see of ``torch.nn.functional.grouped_mm``.
from torch import _grouped_mm as grouped_mm

# Kernels of an operator: going on below autograd with the keys that are left, and one node at one
# level without the class that functorch would make at each call.
from torch._C import _after_autograd_keyset
from torch._C import _AutoDispatchBelowAutograd as below_autograd

# A tensor that a functorch level wraps has no data of its own to export; what it wraps has.
from torch._C._functorch import get_unwrapped
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped

# The global table has decompositions beyond core ATen (through torch's reference implementations);
# an operation without a rule of ours is tried there before it counts as missing.
from torch._decomp import core_aten_decompositions, decomposition_table

# Overloads are what a graph calls; the class tells them from ``operator.getitem`` and regions.
from torch._ops import HigherOrderOperator, OpOverload

# Shapes and dtypes without data: a traced value that leaks can't be baked in as a number.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# The tracer.  ``torch.export`` would do too, but refuses functorch levels and custom pytrees.
from torch.fx.experimental.proxy_tensor import make_fx

# The node that the backward hooks of modules hang on.
from torch.nn.modules._functions import BackwardHookFunction

# Sees each ATen operation below autograd and functorch; the only place where grad mode can be read
# per operation.
from torch.utils._python_dispatch import TorchDispatchMode

# The pytrees of operations' arguments (lists of tensors) have no public mapping, and Dynamo traces
# torch's own only.
from torch.utils._pytree import SUPPORTED_NODES, tree_map, tree_map_only

from functx._torch import SingleLevelFunction, apply_at_level
from functx._torch.process_patches import plain_apply

F = TypeVar("F", bound=Callable[..., Any])

# Held while a function is traced: the tracer's settings are global to the process.  One lock for
# both directions, as a torch function may call one of JAX, and that again one of torch.
TRACING = threading.RLock()


def _outward(frame: FrameType | None) -> Iterator[tuple[FrameType, str]]:
    """A frame and those around it, each with the name of its module."""
    while frame is not None:
        yield frame, str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back


def _is_handler(frame: FrameType) -> bool:
    """Whether a frame is that of a function mode."""
    return frame.f_code.co_name == "__torch_function__"


def called_by(*modules: str) -> bool:
    """Whether code of some modules calls a torch function; ``"torch._"`` is a prefix."""
    # What is between is ours, or what torch puts around the handler of a mode.
    between = ("functx.", "torch._compile", "torch._dynamo.")
    for frame, name in _outward(sys._getframe(1)):
        if not (name.startswith(between) or _is_handler(frame)):
            return any(name.startswith(m) if m.endswith("_") else name == m for m in modules)
    return False


def called_by_us(func: Any) -> bool:
    """Whether the code that calls a torch function is ours, a mode that hands it on aside."""
    handed_on = False
    for frame, name in _outward(sys._getframe(1)):
        if name.partition(".")[0] == "functx":
            handed_on = _is_handler(frame) and frame.f_locals.get("func") == func
        # Other modes, and methods of tensors that are written in Python, come between.
        elif not (_is_handler(frame) or name in ("torch._tensor", "torch.overrides")):
            return not handed_on
    return False


def asked_by(asking: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether one of some functions asks for a value: no other code, but torch's and ours.

    Functions go by their module, or by the package they are in (``"torch.distributions."``).
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
    """Whether ``x`` has data: it belongs to no transform, and is not fake."""
    return not (is_functorch_wrapped(x) or isinstance(x, FakeTensor) or x.is_meta)


def is_zero_tensor(x: torch.Tensor) -> bool:
    """Whether ``x`` is a zero of forward mode that has no memory."""
    return x._is_zerotensor()


_ONCE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__


def is_once_differentiable(function: Any) -> bool:
    """Whether the backward of a custom Function was wrapped by ``once_differentiable``.

    The wrapper leaves no mark but its code.
    """
    return getattr(function.backward, "__code__", None) is _ONCE


def asking_no_mode(f: Any) -> FunctionType:
    """A function of torch in Python, without the question whether somebody overrides it.

    A mode that has been asked is put aside for as long as the answer takes, and would see nothing
    of what the function calls.
    """
    questions = ("has_torch_function", "has_torch_function_unary")
    unasked = dict.fromkeys(questions, lambda *_: False)
    return FunctionType(f.__code__, {**f.__globals__, **unasked}, f.__name__, f.__defaults__)


def saved_tensors_hooks() -> Any:
    """The innermost pair of hooks that see what a tape saves, if any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def unhooked() -> AbstractContextManager[Any]:
    """Saves tensors as they are, whatever hooks of ``saved_tensors_hooks`` are active.

    Which are, no public function tells; pushing ours where none is would fail where hooks are
    disabled.
    """
    if saved_tensors_hooks() is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def is_mutable(target: Any) -> bool:
    """Whether an operation writes to one of its arguments, by its schema."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def pytree_node(cls: type) -> Any:
    """How torch takes a container apart and puts it together; None for what it takes for a leaf.

    The registry has no public reader.
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
    """A context for an operator's own batching rule: what it calls is of the levels below."""
    return torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
    )


def old_vmap_level() -> int:
    """How many batched backward passes are under way: ``torch.autograd.grad(is_grads_batched=)``.

    They use the vmap from before functorch, and its tensors.
    """
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1


def old_batch_in_front(x: torch.Tensor, level: int) -> torch.Tensor:
    """A tensor of such a level with its batch dimension as the first; of size 1 if it has none."""
    return torch._remove_batch_dim(x, level, 1, 0)


def with_old_batch_in_front(x: torch.Tensor, level: int) -> torch.Tensor:
    """A tensor of such a level from one whose first dimension is the batch."""
    return torch._add_batch_dim(x, 0, level)


def nonstrict_trace(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo puts into its graph without looking inside; what follows it does."""
    import torch._dynamo  # not at the top: it takes as long to import as all of torch

    return torch._dynamo.nonstrict_trace(f)


def runs_while_tracing(f: F) -> F:
    """Mark a function that Dynamo runs where it meets it, for a constant result.

    What ``torch._dynamo.assume_constant_result`` does, without importing that.
    """
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


def redispatch(op: OpOverload, keyset: Any, *args: Any) -> Any:
    """Call an operator from its own kernel of the autograd key, with the keys below that."""
    return op.redispatch(keyset & _after_autograd_keyset, *args)


def apply_function(function: Any, *args: Any) -> Any:
    """Make a node of a single-level Function, past the ``apply`` that regions observe.

    They see the operator that makes the node.
    """
    return apply_at_level(plain_apply(function), *args)


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module itself, or a parameter of its own, has hooks that see gradients."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    parameters = [p for p in module._parameters.values() if p is not None]
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def original_of(f: Any) -> Any:
    """What ``torch.compile`` compiled; anything else as it is."""
    name = "_orig_mod" if isinstance(f, torch.nn.Module) else "_torchdynamo_orig_callable"
    return getattr(f, name, f)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor in the arguments or results of an operation."""
    return tree_map_only(torch.Tensor, fn, tree)


# Reads a tensor as a Python number; what ``item()``, ``float()`` and ``bool()`` call.
LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
