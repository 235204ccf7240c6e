"""What a region's code calls: the log that replays are compared with.

NOTE [operands]
Each tensor that a call is given is a *number*: -1 - k for input k of the region, n for the n-th
result, `INSIDE` for a tensor made inside by what no mode sees (``Function.apply``, an engine).
Compared are the functions, in their order, the numbers of their operands, what else they are given
that is a number or a container of numbers, and the shapes and dtypes of what they return. The last
call of a log is "return", which is given the results.
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
OUTSIDE = ("made outside",)  # a tape that is pulled back, what is on it, a leaf that is switched
RETURN, DATA, NAMED = "return", "a tensor of data", "checkpoint_name"
CAPTURE = "a capture of a region inside"
ATOMS = frozenset(
    {
        *(int, float, bool, str, bytes, complex, type(None), type(Ellipsis)),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    }
)
# Looks at a tensor, which need no stand-in: a pullback looks at the results of its own tape.
_GETTERS = """requires_grad grad_fn is_leaf shape dtype device ndim layout _base output_nr _version
is_cuda is_cpu is_meta is_mps is_xpu is_sparse is_quantized is_nested itemsize nbytes"""
_SET: list[Any] = [Tensor.grad, Tensor._backward_hooks]  # by torch itself, too
LOOKS = {
    *(getattr(Tensor, name).__get__ for name in _GETTERS.split()),
    *(access for x in _SET for access in (x.__get__, x.__set__, x.__delete__)),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_inference),  # (a node's too)
    *(Tensor.stride, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__hash__, Tensor.__len__),
    *(Tensor.element_size, Tensor.nelement, Tensor.storage_offset, torch.ops.prim.device.default),
    *(_torch.set_grad_enabled, torch.is_grad_enabled, torch.device),  # (torch's first seed: one)
    *(f for name, f in vars(torch).items() if name.startswith("sym_")),  # of sizes in a trace
}
# Hangs something on a tensor, where it requires grad, say; nothing is computed.
HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad}
# Switch requires_grad of a tensor on or off.
SWITCHES = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
# What makes a tensor of Python's or NumPy's data: kept, not made again (rule 3).
MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.frombuffer}
MAKERS |= {Tensor.new_tensor}
# What reads memory behind torch's back.
READERS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}
READERS |= {Tensor.untyped_storage, Tensor.__cuda_array_interface__.__get__}
SPLITS = {torch.tensor_split, Tensor.tensor_split}  # read where to split
# What reads the numbers in sequences that it is given.
_SPARSE = ("coo", "csr", "csc", "bsr", "bsc", "compressed")
SEQUENCE_READERS = {Tensor.__getitem__, Tensor.__setitem__, Tensor.new}
SEQUENCE_READERS |= {getattr(torch, f"sparse_{layout}_tensor") for layout in _SPARSE}
READ = READERS | SPLITS | SEQUENCE_READERS
_SMALL = 1 << 12  # bytes of an array whose values are kept; larger ones are compared by a hash


class Call:
    """One entry of the log."""

    __slots__ = (
        *("draws", "func", "further", "given", "grad", "inner", "is_flat", "is_plain", "kept"),
        *("results", "writes"),
    )

    def __init__(self, func: Any, given: list[Any]) -> None:
        self.func = func  # what was called; of a region or a transform, its title
        self.grad = torch.is_grad_enabled()
        # For each argument, those in containers too, the number of a tensor, or a tuple that says
        # what else it is:
        self.given = given
        # Of each tensor that it returned, its number, shape and dtype (see `Listener._jagged`):
        self.results: list[tuple[int, Any, torch.dtype]] = []
        # Of a region inside, its own log; and by its number for a further result, the number here:
        self.inner: list[Call] | None = None
        self.further: dict[int, int] = {}
        # Of a call that makes a tensor of data, the number of the input that it became:
        self.kept: int | None = None
        # It is given tensors and plain values, one an entry of `given`; and it makes one new tensor
        # of them, and does no more:
        self.is_flat = self.is_plain = False
        self.draws = False  # it draws random numbers
        self.writes = False  # it writes to memory that it has not made


def in_a_row(args: Any, kwargs: Any) -> list[Any]:
    """Arguments as `Call.given` lists them."""
    row = [*args]
    for item in kwargs.items():
        row += item
    return row


def read_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a function reads behind torch's back."""
    if func in READERS:
        return [args[0]]
    if func in SPLITS:
        return [t for t in (*args[1:], *kwargs.values()) if isinstance(t, Tensor)]
    sequences = [a for a in (*args, *kwargs.values()) if type(a) in (list, tuple)]
    return [t for t in tree.leaves(sequences) if isinstance(t, Tensor) and t.dim() == 0]


def is_simple(a: Any) -> bool:
    """Whether an argument is one entry of `Call.given`, that is compared."""
    return isinstance(a, Tensor) or type(a) in ATOMS or is_plain(a)


def is_plain(a: Any) -> bool:
    """Whether it is a list or tuple of plain values."""
    return type(a) in (list, tuple) and all(type(x) in ATOMS for x in a)


def listed(a: Any, given: list[Any], place: Callable[..., Any]) -> Any:
    """Append to ``given`` what an argument is; returns it, with other tensors where need be.

    ``place`` is asked for the number of each tensor, and for what to put there.
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
    """The items of ``new`` in place of a list or tuple of class ``kind``.

    The constructor of a derived class is not called: it may take other arguments than the items.
    """
    if issubclass(kind, list):
        return new
    if kind is tuple or not hasattr(kind, "_fields"):
        return kind(new) if hasattr(kind, "n_sequence_fields") else tuple(new)  # torch.return_types
    return tuple.__new__(kind, new)  # a named tuple


# How a plain value is taken out of an instance of a derived class, without calling that class.
_PLAIN_VALUE: dict[type, Callable[..., Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
}


def _value(a: Any) -> Any:
    """An argument that is no tensor, container or plain value, as far as it is compared.

    Enum members, ranges, and subclasses of numbers and strings are compared by value, a custom
    Function by the code of its forward. Of any other function, a generator or any other object
    only the class is.
    """
    kind = type(a)
    if issubclass(kind, FunctionMeta):  # (the class itself may be made anew at each call)
        return a.__qualname__, getattr(a.forward, "__code__", None)
    if issubclass(kind, (range, enum.Enum)):
        return kind, a
    for base, plain in _PLAIN_VALUE.items():
        if issubclass(kind, base):
            return kind, plain(a)
    return (kind,)


def _array(a: Any) -> Any:
    """An array or number of NumPy's, as far as it is compared.

    A small array is kept as a list, so that a message can show it. A large one is compared by a
    hash of its bytes. Of an array of Python objects only shape and dtype are compared.
    """
    if not hasattr(a, "tobytes"):
        return (type(a),)
    if a.dtype.hasobject:
        return a.shape, str(a.dtype)
    if a.nbytes > _SMALL:
        return a.shape, str(a.dtype), f"values of hash {hash(a.tobytes())}"
    return a.shape, str(a.dtype), a.tolist()


def same_function(one: Any, other: Any) -> bool:
    """Whether two calls are of one function; of functions made anew each time, of one code."""
    if one is other or one == other:
        return True
    code = getattr(one, "__code__", None)
    return code is not None and code is getattr(other, "__code__", None)


def same_call(one: Call, other: Call, strict: bool) -> bool:
    """Whether two calls are of one function and given the same tensors; if strict, all the same."""
    if one.grad is not other.grad or not same_function(one.func, other.func):
        return False
    if one.given == other.given:
        return True
    if strict and (torch.SymInt,) not in one.given + other.given:  # (which is a number by now)
        return repr(one.given) == repr(other.given)  # nan is not nan
    operands, others = ([n for n in c.given if type(n) is int] for c in (one, other))
    return operands == others
