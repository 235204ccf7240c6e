"""What operators are, and how a dispatch mode may call them: `_torch`, for ATen.

Schemas and flags of tensors that torch has no public names for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from functx import _torch


def neg_view(t: torch.Tensor) -> torch.Tensor:
    """The negative of ``t``, as a view with a flag."""
    return torch._neg_view(t)


# Whether a tensor is forward mode's zero, which has no memory.
is_zero_tensor = torch.Tensor._is_zerotensor


# What autograd and vmap write for a reshape of what they have just made.
unsafe_view = torch.ops.aten._unsafe_view.default

# The derivative of a softmax, in a backward pass.
softmax_backward = torch.ops.aten._softmax_backward_data.default

# What forward mode asks before it gives a tensor a tangent: no value is read.
same_storage_numel = torch.ops.aten._has_same_storage_numel

# Namespaces of torch's own operators.
NAMESPACES = frozenset({"aten", "prims"})

_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def is_foreign(func: Any) -> bool:
    """Whether ``func`` is an operator of a library that is not torch's own."""
    return isinstance(func, _OPERATORS) and str(func).partition(".")[0] not in NAMESPACES


def composite(func: Any, args: Any, kwargs: Any) -> Any:
    """The overload of an operator that is meant, if it is made of others; ``None`` if not."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        name = torch._C._jit_resolve_packet(func._qualified_op_name, *args, **kwargs)
        func = getattr(func, name or "default")
    return func if func.has_kernel_for_dispatch_key(_COMPOSITE) else None


_KERNELS = ("_init_fn", "_setup_context_fn")


def kernels_of(x: Any) -> list[Any]:
    """The functions of Python that an operator runs: of ``torch.library.custom_op``."""
    if isinstance(x, torch._ops.OpOverloadPacket):
        x = torch._library.custom_ops.OPDEFS.get(x._qualified_op_name)
    elif isinstance(x, torch._ops.OpOverload):
        x = torch._library.custom_ops.OPDEFS.get(x._schema.name)
    if not isinstance(x, torch._library.custom_ops.CustomOpDef):
        return []
    found = [getattr(x, name, None) for name in _KERNELS]
    return [f for f in (*found, *x._backend_fns.values()) if f is not None]


def kernels_named(names: Iterable[str]) -> list[Any]:
    """Those of the operators that code names by ``torch.ops.namespace.name``."""
    named = {*names}
    found = []
    for key, definition in [*torch._library.custom_ops.OPDEFS.items()]:
        namespace, _, name = key.partition("::")
        if namespace in named and name in named:
            found += kernels_of(definition)
    return found


def run_inside(func: Any, args: Any, kwargs: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Run an overload so that function modes that are active see what it calls, and not itself.

    The public call shows it to them, and suspends them meanwhile.

    Args:
        func: the overload.
        args: its arguments.
        kwargs: likewise.
        tensors: those among the arguments, by whose keys the dispatcher goes.
    """
    keys = torch._C._dispatch_tls_local_include_set()
    for t in tensors:
        keys = keys | torch._C._dispatch_keys(t)
    keys = keys - torch._C._dispatch_tls_local_exclude_set()
    return func.redispatch(keys, *args, **kwargs)


def is_mutable(func: Any) -> bool:
    """Whether an operator writes to an argument, by its schema; ``False`` where it has none."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.is_mutable


@functools.cache
def is_view(func: Any) -> bool:
    """Whether all that an operator gives are views of its arguments, by its schema."""
    infos = [result.alias_info for result in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


_aten = torch.ops.aten
# Whose derivatives have other bits where a mode is active, for some of what they are given. These
# are all in torch 2.13. Others that ask (`dispatch_mode_enabled`) do the same out of place.
# `tests/test_canary_formulas.py` holds them to it.
OTHERWISE_UNDER_MODES = {
    *(_aten.prod.default, _aten.prod.dim_int, _aten.cumprod.default, _aten._linalg_det.default),
    *(_aten.max.default, _aten.min.default, _aten.median.default, _aten.nanmedian.default),
    *(_aten.masked_fill.Tensor, _aten.masked_fill_.Tensor, _aten.cumprod_.default),
}
# That take no memory beside that of what they give, as those that compute entry by entry do not.
_IN_NO_OTHER_MEMORY = {
    *(_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.dot, _aten.sum, _aten.mean),
    *(_aten.cat, _aten.stack, _aten.clone, _aten.copy_, _aten._softmax, _aten._log_softmax),
    *(_aten._softmax_backward_data, _aten._log_softmax_backward_data),
    *(_aten.native_layer_norm, _aten.native_layer_norm_backward),
    *(_aten.empty, _aten.empty_like, _aten.new_empty, _aten.zeros, _aten.zeros_like, _aten.full),
    *(_aten.ones_like, _aten.new_zeros, _aten.zero_, _aten.fill_, _aten.select_backward),
    *(_aten.slice_backward, _aten._to_copy, _aten.amax, _aten.amin),
}
_WRITES_STATISTICS = {
    *(_aten.native_batch_norm, _aten.cudnn_batch_norm, _aten.miopen_batch_norm),
    *(_aten.batch_norm_update_stats, _aten.batch_norm_gather_stats),
    *(_aten.batch_norm_gather_stats_with_counts, _aten._batch_norm_impl_index),
}


def may_take_memory(func: Any) -> bool:
    """Whether an operator may take memory, while it runs, beside that of what it gives."""
    return (
        not is_view(func)
        and torch.Tag.pointwise not in func.tags
        and func.overloadpacket not in _IN_NO_OTHER_MEMORY
    )


def writes_statistics(func: Any) -> bool:
    """Whether an operator writes to running statistics, though its schema does not say so."""
    return func.overloadpacket in _WRITES_STATISTICS


@functools.cache
def _written(func: Any) -> tuple[list[int], list[str]]:
    silently = ("running_mean", "running_var") if writes_statistics(func) else ()
    mutable = [
        (i, a)
        for i, a in enumerate(func._schema.arguments)
        if (a.alias_info and a.is_write) or a.name in silently
    ]
    return [i for i, _ in mutable], [a.name for _, a in mutable]


@functools.cache
def packet_writes(packet: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Which arguments any operator of a name (``torch.ops.aten.sort``) writes to, but ``out``.

    Returns:
        Their positions and their names.
    """
    places, names = set(), set()
    for func in (getattr(packet, name) for name in packet.overloads()):
        arguments = func._schema.arguments
        for i in _written(func)[0]:
            kind = str(arguments[i].type)
            # In ATen, lists are those of TorchScript (`sort`, `append`), no tensors.
            if (
                arguments[i].is_out
                or "Tensor" not in kind
                or (func.namespace == "aten" and "List" in kind)
            ):
                continue
            names.add(arguments[i].name)
            if not arguments[i].kwarg_only:
                places.add(i)
    return frozenset(places), frozenset(names)


_WRITE_NOTHING = ("record_stream", "requires_grad_", "retain_grad")  # schemas say they do


def packet_of(func: Any) -> Any:
    """The operators that a function in C is about, by its name, if there are any."""
    if isinstance(func, _torch.OpOverloadPacket):
        return func
    name = getattr(func, "__name__", "")
    if name.startswith("__") or name in _WRITE_NOTHING:
        return None
    found = getattr(_aten, name, None)
    return found if isinstance(found, _torch.OpOverloadPacket) else None


def arguments_written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to, by its schema; or that it writes to silently."""
    places, names = _written(func)
    written = [args[i] for i in places if i < len(args)]
    return written + [kwargs[name] for name in names if name in kwargs]


def reads_statistics(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator that writes to running statistics only reads them, or has none."""
    if not writes_statistics(func) or _written(func)[1] != ["running_mean", "running_var"]:
        return False
    training = _places(func).get("training", len(args))
    is_off = (args[training] if training < len(args) else kwargs.get("training")) is False
    return is_off or all(t is None for t in arguments_written(func, args, kwargs))


@functools.cache
def _places(func: Any) -> dict[str, int]:
    return {a.name: i for i, a in enumerate(func._schema.arguments) if not a.kwarg_only}


@functools.cache
def argument_names(func: Any) -> frozenset[str]:
    """The names of an operator's arguments, by its schema."""
    return frozenset(argument.name for argument in func._schema.arguments)


def out_of_place(func: Any) -> Any:
    """The operator that gives what one gives which works in place (``t`` of ``t_``)."""
    name = func.overloadpacket.__name__.removesuffix("_")
    return getattr(getattr(_aten, name), func._overloadname)


def returns_one_list(func: Any) -> bool:
    """Whether an operator's only result is a list of tensors."""
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].type.kind() == "ListType"


def returns_one(func: Any) -> bool:
    """Whether an operator has one result."""
    return len(func._schema.returns) == 1


def takes_tensor_first(func: Any) -> bool:
    """Whether the first argument of an operator is a tensor."""
    return bool(func._schema.arguments[0].type.kind() == "TensorType")


def callable_of(func: Any) -> Any:
    """What an operator does when it is called, without the call of a Python function."""
    return func._op if type(func) is _torch.OpOverload else func


def takes_number(func: Any) -> bool:
    """Whether an operator is one of a tensor and a number that gives a new tensor."""
    return getattr(func, "_overloadname", None) == "Scalar" and not is_mutable(func)


_NUMBERS = (int, float, bool, complex)


def callable_arguments(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments that a dispatch mode was given, as it can call the operator with them.

    With one of forward mode's zeros without memory, operators of a tensor and a number crash the
    process, also where a tape that holds some is pulled back after forward mode has ended. A number
    that stands for a tensor comes as a number, which aten refuses in first place.
    """
    first = args[0] if args else None
    if type(first) is torch.Tensor:
        if not first._is_zerotensor() and _torch.forward_ad_level() < 0:
            return args, kwargs
    elif type(first) in _NUMBERS and func.namespace == "aten" and takes_tensor_first(func):
        args = (torch.tensor(first), *args[1:])
    if not takes_number(func):
        return args, kwargs
    return _real_zeros(args), _real_zeros(kwargs)


def _real_zeros(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        if not tree._is_zerotensor():
            return tree
        return torch.zeros(tree.shape, dtype=tree.dtype, device=tree.device)
    if isinstance(tree, dict):
        return {key: _real_zeros(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_real_zeros(x) for x in tree)
    return tree


def hooks_modules() -> bool:
    """Whether a debugging mode of torch is active that adds hooks to modules while they run."""
    depth = _torch.dispatch_mode_depth()
    return depth > 0 and any(
        type(_torch.get_dispatch_mode_at(i)).__name__ == "CommDebugMode" for i in range(depth)
    )
