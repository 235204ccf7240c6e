"""What is known of the functions that torch-function modes see; found out once for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._remat._cond import COND, branch
from functx._remat._gradients import ABOUT_GRADIENTS
from functx._remat._hung_on_given import HANGING
from functx._remat._tapes import tensors_of
from functx._remat._writes import only_reads
from functx._torch_modules import frame_above

# Attribute reads that give a tensor; every other attribute read is no operation.
TENSOR_GETTERS = frozenset({"T", "H", "mT", "mH", "real", "imag", "data", "grad", "_base"})

# Functions that neither compute nor return tensors, or act on modes: passed through unrecorded.
PASSIVE = frozenset(
    {
        *("_set_grad_enabled", "size", "dim", "stride", "numel", "nelement", "ndimension"),
        *("element_size", "is_floating_point", "is_complex", "is_contiguous", "is_signed"),
        *("storage_offset", "get_device", "has_names", "__len__", "__hash__", "__repr__"),
        *("__format__", "untyped_storage", "data_ptr", "is_set_to", "is_shared", "is_pinned"),
    }
)

# Those that tell how a tensor lies in memory, and where.
_LOOKS = frozenset(
    {
        *("stride", "is_contiguous", "storage_offset", "untyped_storage", "data_ptr"),
        *("is_set_to", "is_shared", "is_pinned"),
    }
)

# Attributes of which what stands for a tensor has others.
_OWN = frozenset({"is_leaf", "_version"})

# Those that hand values to what is no operation, or memory: who has it may read and write it.
_EXPORTS = frozenset(
    {
        *("numpy", "__array__", "tolist", "__dlpack__", "__reduce_ex__", "__deepcopy__"),
        *("untyped_storage", "storage", "_typed_storage", "data_ptr", "const_data_ptr"),
        "tensor_split",  # whose C++ reads indices past everything
        *("__cuda_array_interface__", "__repr__", "__format__", "share_memory_"),
        *("apply_", "map_", "map2_"),  # which run Python on it, and write to it, unseen
    }
)

# Those that make a tensor of numbers, whose C++ reads tensors among these past everything.
_OF_NUMBERS = frozenset(
    {
        *("tensor", "as_tensor", "asarray", "new_tensor", "new", "sparse_coo_tensor"),
        *("sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor"),
        "sparse_compressed_tensor",
    }
)

# Those that give a number; C++ that asks for it, as that of `torch.DoubleTensor`, hides the rest.
_NUMBERS = frozenset({"__float__", "__int__", "__index__", "__complex__", "__bool__"})

# Those that draw random numbers, or may.
_DRAWS = frozenset(
    {
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
        *("normal", "normal_", "uniform_", "bernoulli", "bernoulli_", "multinomial", "poisson"),
        *("exponential_", "cauchy_", "geometric_", "log_normal_", "random_", "binomial"),
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"),
        *("feature_dropout", "feature_alpha_dropout", "rrelu", "rrelu_", "gumbel_softmax"),
        *("fractional_max_pool2d", "fractional_max_pool3d", "multi_head_attention_forward"),
        *("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"),
        *("_standard_gamma", "_sample_dirichlet"),
    }
)

# Those of C++ that compute singular vectors, too, where a mode is active, which changes last bits.
# (`dispatch_mode_enabled` tells: see `OTHERWISE_UNDER_MODES`.)
_OTHERWISE_UNDER_MODES = frozenset(
    {
        *("linalg_svdvals", "linalg_eigvals", "linalg_eigvalsh", "linalg_cond", "linalg_norm"),
        *("linalg_matrix_norm", "linalg_matrix_rank"),
    }
)

IN_C = frozenset(
    {BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType}
)
"""Types of functions written in C, whose names say what they write to."""

_MANY = 8192


class Known:
    """What is known of a function.

    Attributes:
        custom: whether it may be a custom Function's, an operator of the user's, or hangs a hook.
        passive: whether it is no operation: passed through, unrecorded.
        python: whether it puts Python code on a tape, or may.
        writes: whether it may write to what it is given, as far as can be told without keywords,
            or make it require grad.
        label: whether it names in a profile what runs next.
        looks: whether it tells how a tensor lies in memory, where, or whether it is the very one.
        draws: whether it may draw random numbers.
        exports: what tells which of its arguments it hands, or their memory, to what is no
            operation; ``None`` for nearly all.
        differentiates: whether it is `torch.autograd.grad`.
        given_code: whether it is written in Python, and may be given what it calls.
        gradients: whether `_gradients` is about it.
        instead: what runs in its place, seen by the region; ``None`` for nearly all.
        otherwise: whether it computes otherwise where a dispatch mode is active.
        ordinary: whether it is none of these: it only computes, unless it is given ``out``.
        nothing: whether it is no operation, and none of these either.
    """

    __slots__ = (
        *(
            "custom",
            "differentiates",
            "draws",
            "exports",
            "given_code",
            "gradients",
            "instead",
            "label",
            "looks",
            "nothing",
            "ordinary",
            "otherwise",
            "passive",
        ),
        *("python", "writes"),
    )

    def __init__(self, func: Any) -> None:
        name = getattr(func, "__name__", "")
        attribute = func.__self__.__name__ if name in ("__get__", "__set__") else None
        self.instead = branch if func is COND else None
        self.python = name == "register_hook" or (
            isinstance(func, _torch.HigherOrderOperator) and self.instead is None
        )
        if name == "__get__":
            self.passive = attribute not in TENSOR_GETTERS
            self.python = attribute == "grad_fn"  # to hang a hook on, perhaps
        elif name == "__set__":
            # Set by torch itself, which may hold a lock meanwhile: when a tensor gets a new
            # ``grad_fn``, its hooks are taken off through Python, under a lock that asking for its
            # ``grad_fn`` would wait for, for ever.
            self.passive = attribute == "_backward_hooks"
        else:
            # What asks torch for a device may make one the first time, and know it later.
            self.passive = name in PASSIVE or func in (torch.device, COND)
        self.looks = self.passive and (name in _LOOKS or attribute in _OWN)
        self.exports = _exporter(attribute or name)
        self.custom = isinstance(func, _torch.HigherOrderOperator) or (
            isinstance(func, _torch.OpOverload) and func.namespace not in ("aten", "prims")
        )
        self.custom = self.custom or func in HANGING
        self.writes = name == "requires_grad_" or not (
            type(func) in IN_C and only_reads(func, name)
        )
        self.label = name == "_record_function_enter_new"
        self.differentiates = func is torch.autograd.grad
        self.given_code = type(func) is FunctionType and func not in HANGING
        self.gradients = func in ABOUT_GRADIENTS
        self.draws = name in _DRAWS
        self.otherwise = name in _OTHERWISE_UNDER_MODES
        special = any(
            (self.draws, self.gradients, self.python, self.exports, self.looks, self.label)
        )
        self.nothing = self.passive and not special and self.instead is None
        special = special or self.otherwise
        special = special or self.passive or self.custom
        self.ordinary = not special and (not self.writes or _only_computes(func))


def _only_computes(func: Any) -> bool:
    """Whether that is what a function of ``torch.nn.functional`` does, whatever it is given."""
    if type(func) is not FunctionType or func.__module__ != "torch.nn.functional":
        return False
    taken = inspect.signature(func).parameters
    others = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in taken.values())
    return not others and _NOT_ALONE.isdisjoint(taken)


# What makes a function write, or draw, or take statistics, or run code of the user's, perhaps.
_NOT_ALONE = frozenset(
    {
        *("out", "inplace", "training", "max_norm", "running_mean", "use_input_stats"),
        "distance_function",
    }
)


def _exporter(name: str) -> Callable[[Any, Any], Sequence[Tensor]] | None:
    if name in _EXPORTS:
        return tensors_of
    if name in _OF_NUMBERS:
        return _among_numbers
    return _read_in_c if name in _NUMBERS else None


def _among_numbers(args: Any, kwargs: Any) -> Sequence[Tensor]:
    return tensors_of(*(a for a in (*args, *kwargs.values()) if not isinstance(a, Tensor)))


def _read_in_c(args: Any, kwargs: Any) -> Sequence[Tensor]:
    """All of them, where dispatch modes are not shown that a value is read."""
    return tensors_of(args, kwargs) if _torch.inside_dispatcher() else ()


def asked(func: Any) -> bool:
    """Whether a body asks for a value in C++, as by ``torch.DoubleTensor([t, t])``.

    Not what an operation runs: that is reached through the tracker.
    """
    if known_of(func).exports is not _read_in_c:
        return False
    frame: Any = frame_above(2)
    while frame is not None and frame.f_code.co_filename not in _RUN:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _RUN[0]


# What runs bodies, and what runs their operations.
_RUN = tuple(__file__.replace("_functions", name) for name in ("_region", "_tracker"))


known: dict[Any, Known] = {}


def known_of(func: Any) -> Known:
    """What is known of a function."""
    try:
        found = known.get(func)
    except TypeError:  # not hashable
        return Known(func)
    if found is None:
        if len(known) >= _MANY:  # made anew at every step, perhaps
            known.clear()
        found = known[func] = Known(func)
    return found
