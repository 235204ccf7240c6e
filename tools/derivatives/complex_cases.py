"""Cases with complex arguments, as functions of their real and imaginary parts.

So that derivatives are those of real functions, for which torch and JAX have one convention.
"""

import itertools

import torch
from torch.utils import _pytree as pytree

from tools.derivatives.database_cases import (
    LEFT_OUT,
    MOVES,
    REFUSED,
    _chosen,
    _is_dense,
    _of_sample,
    _options,
    moved,
)
from tools.derivatives.judge import Case
from tools.opinfo.database import entries, name_of

F64, C128 = torch.float64, torch.complex128

# Parts of a number: on the axes, near the origin, inside and outside of the unit circle.
_PARTS = torch.tensor([0, 1e-8, 0.5, -0.5, 1, -2, 30], dtype=F64)
_FEW_PARTS = torch.tensor([0, 0.5, -1, 3], dtype=F64)
_LABELS = ("as drawn", "zero", "one", "whole numbers", "tiny", "large", "identity")
_MOVES = {label: MOVES[label] for label in _LABELS}


def grid(parts, count):
    """All combinations of parts, as the entries of so many tensors."""
    return tuple(x.ravel().clone() for x in torch.meshgrid(*[parts] * count, indexing="ij"))


def in_parts(f, which):
    """``f`` of real tensors: two in place of each complex one; complex results as two, too."""

    def of_parts(*parts):
        rest = iter(parts)
        out = f(*[torch.complex(next(rest), next(rest)) if c else next(rest) for c in which])
        found = []
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_complex():
                x = x.resolve_conj().resolve_neg()
                found += [x.real, x.imag]
            else:
                found.append(x)
        return tuple(found)

    return of_parts


def parts_of(tensors):
    """Real tensors in place of complex ones."""
    found = []
    for x in tensors:
        found += [x.real.clone(), x.imag.clone()] if x.is_complex() else [x]
    return tuple(found)


def _elementwise(op):
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    if isinstance(op, UnaryUfuncInfo):
        return 1, grid(_PARTS, 2)
    return (2, grid(_FEW_PARTS, 4)) if isinstance(op, BinaryUfuncInfo) else None


def of_the_database(names=None):
    """The entries that take complex numbers, or some of them by name."""
    for op in sorted(entries(C128), key=name_of):
        name = name_of(op)
        if name in LEFT_OUT or name in REFUSED or (names is not None and name not in names):
            continue
        differentiable = op.supports_autograd
        if (found := _elementwise(op)) is not None:
            count, points = found
            options = _options(op) if count == 1 else {}
            f = in_parts(lambda *xs, op=op, options=options: op.op(*xs, **options), [True] * count)
            yield Case(f"complex {name}", f, {"": points}, True, differentiable)
            continue
        torch.manual_seed(0)
        drawn = op.sample_inputs("cpu", C128, requires_grad=False)
        samples = [s for s in itertools.islice(drawn, 24) if _is_dense(s)]
        for k, sample in enumerate(_chosen(samples)):
            call, tensors = _of_sample(op, sample)
            which = [x.is_complex() for x in tensors]
            if any(which):
                f, points = in_parts(call, which), moved(parts_of(tensors), _MOVES)
                label = f", sample {k + 1}" if k else ""
                yield Case(f"complex {name}{label}", f, points, differentiable=differentiable)


def of_hermitian_matrices():
    """Functions of ``z + z*``, or of ``z z* + 1``."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=F64, generator=generator)
    one = torch.eye(3, dtype=C128)
    points = {
        "drawn": (draw(3, 3), draw(3, 3)),
        "real": (draw(3, 3), torch.zeros(3, 3, dtype=F64)),
        "diagonal": (torch.diag(draw(3)), torch.zeros(3, 3, dtype=F64)),
    }
    hermitian = {
        "eigvalsh": torch.linalg.eigvalsh,
        "eigh": lambda a: (lambda w, v: (w, (v * w.exp()) @ v.mH))(*torch.linalg.eigh(a)),
        "hermitian pinv": lambda a: torch.linalg.pinv(a, hermitian=True),
    }
    definite = {
        "cholesky": torch.linalg.cholesky,
        "upper cholesky": lambda a: torch.linalg.cholesky(a, upper=True),
        "cholesky_solve": lambda a: torch.cholesky_solve(a, torch.linalg.cholesky(a)),
        "cholesky_inverse": lambda a: torch.cholesky_inverse(torch.linalg.cholesky(a)),
        "solve_triangular": lambda a: torch.linalg.solve_triangular(
            torch.linalg.cholesky(a), a.mH, upper=False
        ),
    }
    for name, f in hermitian.items():
        yield Case(f"complex {name}", in_parts(lambda z, f=f: f(z + z.mH), [True]), points)
    for name, f in definite.items():
        of = lambda z, f=f: f(z @ z.mH + one)
        yield Case(f"complex {name}", in_parts(of, [True]), points)


def cases():
    """All."""
    yield from of_hermitian_matrices()
    yield from of_the_database()
