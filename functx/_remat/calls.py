"""The log of the calls that a region's code makes. Replays are compared with it.

NOTE [operands]
The log has a *number* for each tensor that a call is given: -1 - k for input k of the region, n for
the n-th result, and `INSIDE` for a tensor that was made inside by code that no mode sees
(``Function.apply``, the autograd engine). A replay must make the same calls in the same order. For
each call, functx compares the function, the numbers of its operands, its other arguments if they
are plain values or containers of them, and the shapes and dtypes of its results. The last call of a
log is "return". Its operands are the results of the region.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta

from functx import _torch
from functx._core import contents, tree

INSIDE = 1 << 40
# In place of the operands of a call that differentiates a tape made outside, or that switches
# requires_grad of a captured leaf:
OUTSIDE = ("made outside",)
RETURN, DATA, NAMED = "return", "a tensor of data", "checkpoint_name"
CAPTURE = "a capture of a region inside"
ATOMS = frozenset(
    {
        *(int, float, bool, str, bytes, complex, type(None), type(Ellipsis)),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    }
)
# These only look at a tensor, so they are not logged and need no stand-ins. (A pullback looks at
# the results of its own tape.)
_GETTERS = """requires_grad grad_fn is_leaf shape dtype device ndim layout _base output_nr _version
is_cuda is_cpu is_meta is_mps is_xpu is_sparse is_quantized is_nested itemsize nbytes"""
_SET: list[Any] = [Tensor.grad, Tensor._backward_hooks]  # torch itself sets these, too
LOOKS = {
    *(getattr(Tensor, name).__get__ for name in _GETTERS.split()),
    *(access for x in _SET for access in (x.__get__, x.__set__, x.__delete__)),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_inference),  # (a node's too)
    *(Tensor.stride, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__hash__, Tensor.__len__),
    *(Tensor.element_size, Tensor.nelement, Tensor.storage_offset, torch.ops.prim.device.default),
    # (torch calls `torch.device` when it seeds for the first time.)
    *(_torch.set_grad_enabled, torch.is_grad_enabled, torch.device),
    *(f for name, f in vars(torch).items() if name.startswith("sym_")),  # sizes in a trace
}
# These attach a hook to a tensor, or make it retain its gradient; they compute nothing.
HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad}
# Switch requires_grad of a tensor on or off.
SWITCHES = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
# These make a tensor of Python's or NumPy's data. It is saved, and a replay gets it (rule 3).
MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.frombuffer}
MAKERS |= {Tensor.new_tensor}
# These read memory in a way that no dispatch mode sees.
READERS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}
READERS |= {Tensor.untyped_storage, Tensor.__cuda_array_interface__.__get__}
SPLITS = {torch.tensor_split, Tensor.tensor_split}  # these read a tensor of positions
# These read the values of 0-dimensional tensors in lists and tuples.
_SPARSE = ("coo", "csr", "csc", "bsr", "bsc", "compressed")
SEQUENCE_READERS = {Tensor.__getitem__, Tensor.__setitem__, Tensor.new}
SEQUENCE_READERS |= {getattr(torch, f"sparse_{layout}_tensor") for layout in _SPARSE}
READ = READERS | SPLITS | SEQUENCE_READERS
_SMALL = 1 << 12  # bytes: values of arrays up to this size are logged, of larger ones a hash


class Call:
    """One entry of the log."""

    __slots__ = (
        *("draws", "func", "further", "given", "grad", "inner", "is_flat", "is_plain", "kept"),
        *("results", "writes"),
    )

    def __init__(self, func: Any, given: list[Any]) -> None:
        self.func = func  # the function, or the title of a region or a transform
        self.grad = torch.is_grad_enabled()
        # For each argument, and for each item in a container, the number of a tensor, or a tuple
        # that describes any other object:
        self.given = given
        # The number, shape and dtype of each tensor that it returned (see `Listener._jagged`):
        self.results: list[tuple[int, Any, torch.dtype]] = []
        # For a region inside: its own log, and the numbers here of its further results, by their
        # numbers there.
        self.inner: list[Call] | None = None
        self.further: dict[int, int] = {}
        # For a call that makes a tensor of data: the number of the input that it became.
        self.kept: int | None = None
        # A call is flat if each of its arguments is one entry of `given`: a tensor or a plain
        # value. It is plain if it also makes one new tensor and has no other effect.
        self.is_flat = self.is_plain = False
        self.draws = False  # whether it draws random numbers
        self.writes = False  # whether it writes to memory that it did not make


def in_a_row(args: Any, kwargs: Any) -> list[Any]:
    """Arguments in the order in which `Call.given` lists them."""
    row = [*args]
    for item in kwargs.items():
        row += item
    return row


def read_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a function of `READ` reads in a way that no dispatch mode sees."""
    if func in READERS:
        return [args[0]]
    if func in SPLITS:
        return [t for t in (*args[1:], *kwargs.values()) if isinstance(t, Tensor)]
    sequences = [a for a in (*args, *kwargs.values()) if type(a) in (list, tuple)]
    return [t for t in tree.leaves(sequences) if isinstance(t, Tensor) and t.dim() == 0]


def is_simple(a: Any) -> bool:
    """Whether an argument is one entry of `Call.given` and is compared."""
    return isinstance(a, Tensor) or type(a) in ATOMS or is_plain(a)


def is_plain(a: Any) -> bool:
    """Whether it is a list or tuple of plain values."""
    return type(a) in (list, tuple) and all(type(x) in ATOMS for x in a)


def listed(a: Any, given: list[Any], place: Callable[..., Any]) -> Any:
    """Append the description of an argument to ``given``; returns the argument to call with.

    For each tensor, ``place`` returns its number and the tensor to use for it.
    """
    kind = type(a)
    if kind in ATOMS:
        given.append((a,))
        return a
    if isinstance(a, Tensor):
        number, a = place(a, given)
        given.append(number)
        return a
    if is_plain(a):
        given.append((tuple(a),))
        return a
    if issubclass(kind, (list, tuple)):
        inside = contents(a) or ()
        given.append((kind.__name__, len(inside)))
        new = [listed(x, given, place) for x in inside]
        return a if all(x is y for x, y in zip(new, inside)) else sequence_like(kind, new)
    if kind is dict:
        given.append(("dict", len(a)))
        new_dict = {k: listed(x, given, place) for k, x in a.items()}
        return a if all(new_dict[k] is a[k] for k in a) else new_dict
    if kind is slice:
        given.append(("slice",))
        parts = [listed(x, given, place) for x in (a.start, a.stop, a.step)]
        return slice(*parts) if any(isinstance(p, Tensor) for p in parts) else a
    given.append(_array(a) if kind.__module__ == "numpy" else _value(a))
    return a


def sequence_like(kind: Any, new: list[Any]) -> Any:
    """A list or tuple with the items of ``new``, to use for one of class ``kind``.

    The constructor of a derived class is not called, because it may take other arguments.
    """
    if issubclass(kind, list):
        return new
    if kind is tuple or not hasattr(kind, "_fields"):
        return kind(new) if hasattr(kind, "n_sequence_fields") else tuple(new)  # torch.return_types
    return tuple.__new__(kind, new)  # a named tuple


# How to get the plain value of an instance of a derived class, without calling that class.
_PLAIN_VALUE: dict[type, Callable[..., Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
}


def _value(a: Any) -> Any:
    """The part of an argument that is compared, if it isn't a tensor, container or plain value.

    Enum members, ranges, and subclasses of numbers and strings are compared by value. A custom
    Function is compared by the code of its forward. For any other object, such as a function or a
    generator, only the class is compared.
    """
    kind = type(a)
    if issubclass(kind, FunctionMeta):  # (user code may define the class again at each call)
        return a.__qualname__, getattr(a.forward, "__code__", None)
    if issubclass(kind, (range, enum.Enum)):
        return kind, a
    for base, plain in _PLAIN_VALUE.items():
        if issubclass(kind, base):
            return kind, plain(a)
    return (kind,)


def _array(a: Any) -> Any:
    """The part of a NumPy array or number that is compared.

    A small array is logged as a list, so that a message can show it. A large one is compared by a
    hash of its bytes. For an array of Python objects only shape and dtype are compared.
    """
    if not hasattr(a, "tobytes"):
        return (type(a),)
    if a.dtype.hasobject:
        return a.shape, str(a.dtype)
    if a.nbytes > _SMALL:
        return a.shape, str(a.dtype), f"values of hash {hash(a.tobytes())}"
    return a.shape, str(a.dtype), a.tolist()


def same_function(one: Any, other: Any) -> bool:
    """Whether two functions are the same, or have the same code.

    User code may define a function again in each run.
    """
    if one is other or one == other:
        return True
    code = getattr(one, "__code__", None)
    return code is not None and code is getattr(other, "__code__", None)


def same_call(one: Call, other: Call, strict: bool) -> bool:
    """Whether two calls are of one function and get the same tensors.

    If ``strict``, their other arguments must be the same, too.
    """
    if one.grad is not other.grad or not same_function(one.func, other.func):
        return False
    if one.given == other.given:
        return True
    # (A symbolic size of a trace may be a plain number in the other run.)
    if strict and (torch.SymInt,) not in one.given + other.given:
        return repr(one.given) == repr(other.given)  # nan is not nan
    operands, others = ([n for n in c.given if type(n) is int] for c in (one, other))
    return operands == others
