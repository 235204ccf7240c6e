"""Cases of torch's own operator database: its samples, moved to special points."""

import itertools

import torch
from torch.utils import _pytree as pytree

from tools.derivatives.judge import Case
from tools.opinfo.database import entries, name_of
from tools.opinfo.to_jax import EXCEPTIONS as REFUSED
from tools.opinfo.to_jax import because

MOST_ELEMENTS = 400

_BY_HAND = "see the functions of linear algebra, on matrices of the kind that they are for"
_STATISTICS = "torch's derivatives of the statistics that they also return are zero"
LEFT_OUT = {
    **because(_BY_HAND, "cholesky cholesky_inverse cholesky_solve linalg.cholesky"),
    **because(_BY_HAND, "linalg.cholesky_ex linalg.eigh linalg.eigvalsh linalg.pinv.hermitian"),
    **because(_BY_HAND, "triangular_solve"),
    **because(_STATISTICS, "native_batch_norm native_layer_norm _native_batch_norm_legit"),
    **because(_STATISTICS, "_batch_norm_with_update"),
    **because("their values are undefined", "empty empty_like empty_permuted empty_strided"),
    **because("their values are undefined", "new_empty new_empty_strided"),
    **because("of numbers that do not fit, values are undefined", "byte char int long short"),
    "nextafter": "JAX has no derivative of it",
}

# For functions of each entry, of one argument and of two.
OF_ONE = torch.tensor(
    [0.0, -0.0, 1e-300, -1e-300, 1e-30, 1e-8, -1e-8, 0.1, -0.1, 0.5, -0.5, 1, -1, 1.5, -1.5, 2, -2,
     3, -3, 6, -6, 20, -20, 21, 40, -40, 100, -100, 1e4, -1e4, 1e10, -1e10, 1e100],
    dtype=torch.float64,
)  # fmt: skip
_SOME = torch.tensor([0.0, 1e-8, 0.5, -0.5, 1, -1, 2, -2, 3, 50, -50, 1e6], dtype=torch.float64)


def pairs(xs=_SOME, ys=None):
    """All pairs of entries of two tensors, as two tensors; equal ones among them."""
    grid = torch.meshgrid(xs, xs if ys is None else ys, indexing="ij")
    return tuple(x.ravel().clone() for x in grid)


def _identity(x):
    if x.ndim < 2:
        return torch.ones_like(x)
    return torch.eye(*x.shape[-2:], dtype=x.dtype).expand(x.shape).clone()


def _repeated(x):
    """A matrix all of whose singular values are 2."""
    if x.ndim < 2 or not x.numel():
        return x
    u, _, v = torch.linalg.svd(torch.randn(x.shape, dtype=x.dtype), full_matrices=False)
    return 2 * u @ v


MOVES = {
    "as drawn": lambda x: x,
    "zero": torch.zeros_like,
    "one": torch.ones_like,
    "whole numbers": torch.round,  # many are equal
    "halves": lambda x: (2 * x.clamp(-2, 2)).round() / 2,
    "tiny": lambda x: 1e-10 * x,
    "large": lambda x: 1e3 * x,
    "identity": _identity,
    "repeated singular values": _repeated,
}


def moved(xs, moves=MOVES):
    """Tensors of one signature, at special points."""
    torch.manual_seed(0)
    change = lambda move: tuple(move(x) if x.is_floating_point() else x for x in xs)
    points = {label: change(move) for label, move in moves.items()}
    first = next((x for x in xs if x.is_floating_point()), None)
    if first is not None and len(xs) > 1:
        points["equal"] = change(lambda x: first if x.shape == first.shape else x)
    return points


def _elementwise(op):
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    if isinstance(op, UnaryUfuncInfo):
        return {"": (OF_ONE,)}
    return {"": pairs()} if isinstance(op, BinaryUfuncInfo) else None


def _options(op):
    """Options that a function of one argument needs."""
    make = getattr(op, "sample_kwargs", None)
    return make("cpu", torch.float64, OF_ONE)[0] if make else {}


def _of_sample(op, sample):
    """A function of the tensors that a sample has, and these; other arguments are as they are."""
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def call(*tensors):
        full = list(flat)
        for i, x in zip(where, tensors):
            full[i] = x
        first, args, kwargs = pytree.tree_unflatten(full, spec)
        out = sample.output_process_fn_grad(op.op(first, *args, **kwargs))
        return tuple(out) if isinstance(out, tuple | list) else out

    return call, tuple(flat[i].detach().clone() for i in where)


def _tensors(sample):
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _is_dense(sample):
    return all(x.layout is torch.strided for x in _tensors(sample))


def _chosen(samples):
    """The first and the last that are small, and one that is empty."""
    sizes = [[x.numel() for x in _tensors(s)] for s in samples]
    small = [i for i, n in enumerate(sizes) if n and min(n) > 0 and sum(n) <= MOST_ELEMENTS]
    empty = [i for i, n in enumerate(sizes) if 0 in n]
    picked = {small[0], small[-1]} if small else set()
    return [samples[i] for i in sorted(picked | set(empty[:1]))]


def cases(names=None):
    """Those of all entries that run in float64, or of some names."""
    for op in sorted(entries(torch.float64), key=name_of):
        name = name_of(op)
        if name in LEFT_OUT or name in REFUSED or (names is not None and name not in names):
            continue
        points = _elementwise(op)
        if points is not None:
            options = _options(op)
            call = lambda *xs, op=op, options=options: op.op(*xs, **options)
            yield Case(name, call, points, by_entry=True, differentiable=op.supports_autograd)
            continue
        torch.manual_seed(0)
        drawn = op.sample_inputs("cpu", torch.float64, requires_grad=False)
        samples = [s for s in itertools.islice(drawn, 24) if _is_dense(s)]
        for k, sample in enumerate(_chosen(samples)):
            call, tensors = _of_sample(op, sample)
            floating = any(x.dtype == torch.float64 for x in tensors)
            if tensors and all(not x.is_complex() for x in tensors):
                differentiable = op.supports_autograd and floating
                label = f"{name}, sample {k + 1}" if k else name
                yield Case(label, call, moved(tensors), differentiable=differentiable)
