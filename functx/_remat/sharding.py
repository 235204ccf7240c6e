"""Modules whose parameters or activations are spread over processes, and the errors for them.

NOTE [sharded modules]
FSDP's hooks put parameters of FSDP's own into the module before each forward, and free them after
it. Therefore:

- A region goes inside such a module, never around it (rule 4).
- Parameters that ``functional_call`` has put there are overwritten. Derivatives with respect to
  them are silently zero, so a transform refuses them.
- The hooks can't run on the fake tensors of a trace. They would stay in the module, so a trace
  refuses the module before its hooks run.
- A backward pass frees the parameters that the derivative of this backward pass reads; reading them
  can end the process. So gradients that were pulled back through FSDP raise when user code pulls
  back through them. Forward mode over reverse mode (`functx.jvp`, `functx.hessian`) is right.
- FSDP1 sets the data of flat parameters, which ends the process at a functorch level. No transform
  runs such a module.

User code calls these modules anywhere, so a `Watch` around it looks at each module that is called,
by torch's global hooks. A process in which no module can be sharded has no watches.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from functx import _torch
from functx._core import RematError
from functx._core import tree as _tree
from functx._torch import sharding

# The prefixes of torch.distributed's labels in profiles. A region sees a label when work begins.
_LABELS = {
    "FSDP::": "fully_shard (FSDP2)",
    "FullyShardedDataParallel.": "FullyShardedDataParallel",
    "DistributedDataParallel.": "DistributedDataParallel",
}


def check(label: str, title: str) -> None:
    """Refuse a region around the forward of such a module, which begins with ``label``."""
    for prefix, kind in _LABELS.items():
        if label.startswith(prefix):
            raise RematError(
                f"remat: {title} is around a module of {kind}, which would communicate again in a "
                f"replay. Swap the order: make regions inside of the module, and leave {kind} "
                "outside. functx.apply_remat(module, ...) does this, before or after the module is "
                "wrapped."
            )


def guarded(f: Any) -> Any:
    """The function for replays; it raises an error if hooks of the module swapped parameters."""
    module: Any = f.__self__ if type(f) is MethodType else None
    is_module = isinstance(module, nn.Module)
    if not is_module or not (module._forward_hooks or module._forward_pre_hooks):
        return f
    # (Hooks that offload parameters set their ``data``, which changes no version.)
    found = [(p, _torch.storage_of(p)) for p in module.parameters() if _torch.level_of(p) <= 0]

    def again(*args: Any, **kwargs: Any) -> Any:
        if any(_torch.storage_of(p) != storage for p, storage in found):
            raise RematError(
                f"remat: hooks of {type(module).__name__} swap the data of its parameters between "
                "forward and backward (offloading, sharding). Put regions inside, not around it."
            )
        return f(*args, **kwargs)

    return again


_BACKWARD = "Call the module itself and .backward(), which adds up and shards the gradients"


def refuse_sharded(module: nn.Module, api: str, names: Sequence[str] | None = None) -> None:
    """Raise if FSDP manages parameters of a module that ``api`` would put others in the place of.

    Args:
        module: The module to be called with other parameters.
        api: The name of the caller in the error, ``"functx.functional_call"``.
        names: The names of the parameters and buffers that would be replaced, as in
            ``module.named_parameters()``; by default all of them.

    Raises:
        RuntimeError: FSDP2 or FSDP1 manages one of them.
    """
    if not (classes := sharding.fsdp_classes()):
        return
    if not any(isinstance(part, classes) for part in module.modules()):
        return
    fsdp1 = classes[1]
    managed = {(id(owner), name) for owner, name in sharding.managed_parameters(module)}
    flat = [name for name, part in module.named_modules() if isinstance(part, fsdp1)]
    places = dict(module.named_modules(remove_duplicate=False))
    if names is None:
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for name in names:
        owner, _, attribute = name.rpartition(".")
        is_managed = owner in places and (id(places[owner]), attribute) in managed
        if is_managed or any(not part or name.startswith(f"{part}.") for part in flat):
            raise _swapped(api, name, "fully_shard (FSDP2)" if is_managed else fsdp1.__name__)


def _swapped(api: str, name: str, kind: str) -> RuntimeError:
    return RuntimeError(
        f"{api}: a module of {kind} is called with a tensor in the place of its parameter "
        f"{name!r}, but the module's hooks put the module's own parameters there before its "
        "forward runs: the result would not depend on the tensor, and all gradients with respect "
        f"to it would be zero. {_BACKWARD}; or keep the whole module in every process."
    )


def refuse_to_trace(module: nn.Module, api: str, error: Any) -> None:
    """Raise ``error`` if ``module`` is sharded itself; a `Watch` sees the modules that it calls."""
    if classes := sharding.fsdp_classes():
        Watch(api, classes, error).check(module)


class Watch:
    """A context for user code that functx runs. It refuses sharded modules that would be wrong.

    See NOTE [sharded modules]. It sees the modules that its thread calls, and no others.

    Attributes:
        met: Whether a module of FSDP2 was called.
        pulled_back: Whether code other than functx's transforms has pulled back through such a
            module, for a derivative that the level of the watch records.
    """

    def __init__(self, api: str, classes: tuple[type, ...], forbids: Any = None) -> None:
        self.api, self.forbids = api, forbids
        self.fsdp2, self.fsdp1 = classes
        self.level = 0  # the level of the transform, if the transform is of reverse mode
        self.met = self.pulled_back = False
        self._thread = threading.get_ident()
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        self._handles.append(register_module_forward_pre_hook(self._before))
        self._handles.append(register_module_forward_hook(self._after))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _is_sharded(self, module: nn.Module) -> bool:
        is_sharded = isinstance(module, (self.fsdp2, self.fsdp1))
        return is_sharded and threading.get_ident() == self._thread

    def _before(self, module: nn.Module, args: Any) -> None:
        """Check a module before any other hook of it runs."""
        self.check(module)

    def check(self, module: nn.Module) -> None:
        """Raise an error if a module is sharded and would be wrong here."""
        if not self._is_sharded(module):
            return
        is_fsdp1 = isinstance(module, self.fsdp1)
        kind = "FullyShardedDataParallel" if is_fsdp1 else "fully_shard (FSDP2)"
        if self.forbids is not None:
            raise self.forbids(
                f"{self.api}: it runs {type(module).__name__}, a module of {kind}. Its hooks "
                "communicate and swap parameters, which a trace or a plan can't follow. Do this "
                "before the module is sharded, or with a function that runs inside of the module, "
                "for example the forward of one of its blocks."
            )
        if is_fsdp1:
            raise RuntimeError(
                f"{self.api}: it runs a module of FullyShardedDataParallel (FSDP1), which sets the "
                "data of its parameters; in a transform that ends the process. Call the module "
                "outside of transforms, with .backward(). Or use fully_shard (FSDP2), which "
                "supports gradients with respect to inputs."
            )
        for owner, name in sharding.managed_parameters(module):
            if _torch.level_of(getattr(owner, name)) > 0:
                places = {id(part): place for place, part in module.named_modules()}
                place = f"{places[id(owner)]}.{name}".lstrip(".") if id(owner) in places else name
                raise _swapped(self.api, place, kind)
        self.met = True

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Register a hook on results that the level of the watch differentiates."""
        if not self.level or not self._is_sharded(module):
            return
        for t in _tree.leaves(output):
            if isinstance(t, torch.Tensor) and t.requires_grad and self._is_differentiated(t):
                t.register_hook(self._note)

    def _is_differentiated(self, t: torch.Tensor) -> bool:
        """Whether the level of the watch differentiates a tensor, perhaps of a level inside."""
        while _torch.level_of(t) > self.level:
            t = _torch.inner_of(t)
        return _torch.level_of(t) == self.level and t.requires_grad

    def _note(self, cotangent: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not _own_pullbacks:
            self.pulled_back = True

    def check_pulled_back(self) -> None:
        """Raise an error if the pullback of this level would pull back through a backward pass."""
        if self.pulled_back:
            raise RuntimeError(f"{self.api}: {_TWICE}")


_NOTHING = nullcontext()


def watching(api: str, forbids: Any = None) -> AbstractContextManager[Watch | None]:
    """A `Watch`, if there can be sharded modules in this process.

    Args:
        api: The name of the caller in errors.
        forbids: The class of the error that any sharded module raises. By default only modules
            raise an error that would be wrong in a transform.
    """
    classes = sharding.fsdp_classes()
    return Watch(api, classes, forbids) if classes else _NOTHING


# -- derivatives of derivatives

_TWICE = (
    "a gradient that was pulled back through a module of fully_shard (FSDP2) is differentiated in "
    "reverse mode. FSDP has freed the parameters that this reads, and torch would end the process. "
    "Use forward mode over reverse mode, functx.jvp(functx.grad(f), ...) or functx.hessian(f), and "
    "functx.jvp(f, ...) in place of functx.linearize; or keep the whole module in every process. "
    "If the gradient is to be a constant, take it under torch.no_grad() or detach it."
)
_own_pullbacks: list[None] = []  # one item for each pullback of functx that is running


@contextmanager
def own_pullback() -> Iterator[None]:
    """A context for a backward pass of functx through FSDP, whose results are `pulled_once`."""
    _own_pullbacks.append(None)
    try:
        yield
    finally:
        _own_pullbacks.pop()


def pulled_once(gradients: Sequence[torch.Tensor], reason: str = _TWICE) -> list[torch.Tensor]:
    """Gradients that raise an error with ``reason`` if they are differentiated in turn."""
    return [
        _PulledOnce.apply(reason, t) if t.requires_grad or _torch.level_of(t) > 0 else t
        for t in gradients
    ]


class _PulledOnce(torch.autograd.Function):
    """The identity, in forward mode too, with a backward that raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(reason: str, t: torch.Tensor, *tracked: torch.Tensor) -> torch.Tensor:
        return t.view_as(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.reason = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.reason)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: torch.Tensor, *__: Any) -> torch.Tensor:
        # The derivative of the tangent reads what that of the gradient reads.
        return _PulledOnce.apply(ctx.reason, tangent)


_NO_SECOND = (
    "a gradient that was pulled back through DTensor.from_local is differentiated, and torch has "
    "dropped a part of its derivative: the backward of from_local redistributes the gradient "
    "without recording that (of the inputs of column-wise and row-wise parallelize_module, for "
    "example). The result would be silently wrong. Take second derivatives with the whole module "
    "in every process, or with a module whose inputs are DTensors (distribute_tensor)."
)


def refuse_lost_derivatives(edges: Sequence[Any], first: int) -> None:
    """Let gradients raise when they are pulled back in turn, where torch drops a derivative.

    Args:
        edges: Where a pullback that is recorded begins: edges of nodes, or leaves.
        first: The number of the oldest node of the recorded function.
    """
    if not sharding.in_process_group() or not sharding.has_dtensors():
        return
    todo, seen = [getattr(edge, "node", None) for edge in edges], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen or _torch.sequence_number(node) < first:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        if node.name() == sharding.FROM_LOCAL:
            node.register_hook(_keep_derivative)


def _keep_derivative(given: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """After the backward of ``DTensor.from_local``: see whether its result has lost the tape."""
    gradient, cotangent = given[0], cotangents[0]
    if gradient is None or cotangent is None or not torch.is_grad_enabled():
        return None
    if gradient.requires_grad or not cotangent.requires_grad:
        return None
    return _PulledOnce.apply(_NO_SECOND, gradient, cotangent), *given[1:]


# -- DTensors under transforms

NO_TRANSFORM = (
    "This is an autograd.Function of torch's DTensor (from_local, to_local, redistribute), which "
    "parallelize_module, distribute_module and sequence parallelism call around a layer: torch has "
    "no rule for it in a transform. Call the module and .backward(), for first derivatives, with "
    "regions inside; functx.per_sample.norms and clipped_sum take a pair (module, criterion) with "
    "chunk_size=1."
)


def is_of_dtensors(error: BaseException) -> bool:
    """Whether an error about a custom Function is about one of torch's DTensors."""
    if not sharding.has_dtensors() or "override the setup_context" not in str(error):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    names = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    return any(name.startswith("torch.distributed.tensor") for name in names)


def check_forward_mode(tree: Any, api: str) -> None:
    """Raise if a leaf is a DTensor, for which torch has no forward mode."""
    if not sharding.has_dtensors():
        return
    if any(isinstance(leaf, sharding.dtensor_class()) for leaf in _tree.leaves(tree)):
        raise NotImplementedError(
            f"{api}: an argument is a DTensor, for which torch has no forward mode. Use reverse "
            "mode: functx.grad or functx.vjp. A Jacobian-vector product is the vjp of a vjp, with "
            "respect to its cotangent."
        )
