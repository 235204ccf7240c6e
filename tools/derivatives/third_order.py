"""torch's derivatives of linear algebra to third order, in all orders of forward and reverse mode.

Derivatives are taken along three directions, one after the other, each in forward mode (F: ``jvp``)
or in reverse mode (R: the gradient, times the direction).  The reference is a mixed difference of
third order, extrapolated.  Written into ``docs/torch_bugs.md``.
"""

import itertools
import json
import math
import warnings
from pathlib import Path

import torch

from tools.opinfo.database import one_line

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "bench" / "results" / "derivatives" / "third_order.json"
PAGE = ROOT / "docs" / "torch_bugs.md"
BEGIN, END = "<!-- third derivatives -->\n", "<!-- end -->\n"
RTOL = 1e-4

N = 3
F64 = torch.float64


def _drawn(seed, *shape):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


POINT = _drawn(0, N, N) + 2 * torch.eye(N, dtype=F64)
DIRECTIONS = [_drawn(seed, N, N) for seed in (1, 2, 3)]
RIGHT, WEIGHTS = _drawn(4, N, 2), _drawn(5, N, N)


def _symmetric(a):
    return (a + a.mT) / 2


def _weighted(x):
    return (WEIGHTS[..., : x.shape[-1]] * x).sum((-2, -1))


def _of_u(a):
    """The diagonal of U, and the sign of the permutation."""
    p, _, u = torch.linalg.lu(a)
    return u.diagonal(dim1=-2, dim2=-1), torch.linalg.det(p).detach()


def _of_qr(a, b):
    q, r = torch.linalg.qr(a)
    return torch.linalg.solve_triangular(r, q.mT @ b, upper=True)


# The operators of torch.
OPERATORS = {
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a).logabsdet,
    "logdet": lambda a: torch.logdet(a @ a.mT),
    "solve": lambda a: _weighted(torch.linalg.solve(a, RIGHT)),
    "solve from the right": lambda a: _weighted(torch.linalg.solve(a, RIGHT.mT, left=False).mT),
    "inv": lambda a: _weighted(torch.linalg.inv(a)),
    "pinv": lambda a: _weighted(torch.linalg.pinv(a)),
    "lu_solve": lambda a: _weighted(torch.linalg.lu_solve(*torch.linalg.lu_factor(a), RIGHT)),
    "cholesky": lambda a: _weighted(torch.linalg.cholesky(a @ a.mT)),
    "cholesky_solve": lambda a: _weighted(
        torch.cholesky_solve(RIGHT, torch.linalg.cholesky(a @ a.mT))
    ),
    "cholesky_inverse": lambda a: _weighted(
        torch.cholesky_inverse(torch.linalg.cholesky(a @ a.mT))
    ),
    "solve_triangular": lambda a: _weighted(
        torch.linalg.solve_triangular(a.triu(), RIGHT, upper=True)
    ),
    "qr": lambda a: _weighted(torch.linalg.qr(a).R.abs()),
    "lu": lambda a: _weighted(torch.linalg.lu(a).U),
    "eigh, eigenvalues": lambda a: (torch.linalg.eigvalsh(_symmetric(a)) * WEIGHTS[0]).sum(-1),
    "eigh, eigenvectors": lambda a: _weighted(torch.linalg.eigh(_symmetric(a)).eigenvectors ** 2),
    "svd, singular values": lambda a: (torch.linalg.svdvals(a) * WEIGHTS[0]).sum(-1),
    "svd, singular vectors": lambda a: _weighted(torch.linalg.svd(a).U ** 2),
    "matrix_exp": lambda a: _weighted(torch.linalg.matrix_exp(a)),
}
# The same by other operators: what to write, and the function.
INSTEAD = {
    "det": {
        "`p, _, u = linalg.lu(a)`, `u.diagonal().prod() * linalg.det(p).detach()`": (
            lambda a: _of_u(a)[0].prod(-1) * _of_u(a)[1]
        ),
    },
    "slogdet": {
        "`linalg.lu(a).U.diagonal().abs().log().sum()`": lambda a: _of_u(a)[0].abs().log().sum(-1),
    },
    "logdet": {
        "as of `slogdet`": lambda a: _of_u(a @ a.mT)[0].abs().log().sum(-1),
        "of a positive definite matrix `2 * linalg.cholesky(a).diagonal().log().sum()`": (
            lambda a: 2 * torch.linalg.cholesky(a @ a.mT).diagonal(0, -2, -1).log().sum(-1)
        ),
    },
    "solve": {
        "`linalg.lu_solve(*linalg.lu_factor(a), b)`": OPERATORS["lu_solve"],
        "`linalg.inv(a) @ b`": lambda a: _weighted(torch.linalg.inv(a) @ RIGHT),
        "`q, r = linalg.qr(a)`, `linalg.solve_triangular(r, q.mT @ b, upper=True)`": (
            lambda a: _weighted(_of_qr(a, RIGHT))
        ),
    },
    "solve from the right": {
        "`linalg.inv(a.mT) @ b.mT`, transposed": (
            lambda a: _weighted(torch.linalg.inv(a.mT) @ RIGHT)
        ),
    },
    "cholesky_inverse": {
        "`linalg.inv`": lambda a: _weighted(torch.linalg.inv(a @ a.mT)),
    },
}


def along(f, mode, v):
    """The derivative of a function of one number, along a direction."""
    if mode == "F":
        return lambda x: torch.func.jvp(f, (x,), (v,))[1]
    return lambda x: (torch.func.grad(f)(x) * v).sum()


def orders(order):
    """The orders of modes, the innermost first."""
    return ["".join(modes) for modes in itertools.product("FR", repeat=order)]


def derivative(f, modes, batched=False):
    """The derivative along as many directions as there are modes; or the error of torch."""
    for mode, v in zip(modes, DIRECTIONS):
        f = along(f, mode, v)
    try:
        if batched:
            return torch.func.vmap(f)(torch.stack([POINT, POINT.mT]))[0].item()
        return f(POINT).item()
    except (RuntimeError, NotImplementedError) as error:
        return one_line(error, 60)


def by_differences(f, order):
    """The mixed derivative by central differences, of two steps and extrapolated."""

    def at(h):
        total = 0.0
        for signs in itertools.product((1, -1), repeat=order):
            moved = POINT + h * sum(s * v for s, v in zip(signs, DIRECTIONS))
            total += math.prod(signs) * f(moved).item()
        return total / (2 * h) ** order

    return (4 * at(2e-3) - at(4e-3)) / 3


def wrong(f, order):
    """The orders of modes, in each of which torch is wrong, and what it gives."""
    right = by_differences(f, order)
    found = {}
    for modes in orders(order):
        results = [derivative(f, modes, batched) for batched in (False, True)]
        bound = RTOL * (1 + abs(right))
        off = [x for x in results if isinstance(x, str) or not abs(x - right) <= bound]
        if off:
            found[modes] = off[0] if isinstance(off[0], str) else round(off[0], 6)
    return found


def sweep():
    """The table: of each operator and definition the orders that are wrong, at each order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = {name: {k: wrong(f, k) for k in (1, 2, 3)} for name, f in OPERATORS.items()}
        instead = {
            name: {by: {k: wrong(f, k) for k in (1, 2, 3)} for by, f in definitions.items()}
            for name, definitions in INSTEAD.items()
        }
    return {"torch": torch.__version__.split("+")[0], "operators": table, "instead": instead}


def section(of):
    """The section of the page, from the table as it is read from its file."""
    table = of["operators"]
    right = [name for name, by_order in table.items() if not any(by_order.values())]
    lines = [
        "Written by `make sweep`, which takes derivatives along three directions, one after the",
        "other, each in forward mode (F, `jvp`) or in reverse mode (R, `grad`). The innermost",
        "comes first: `jvp(grad(f))` is RF. All are compared with differences of values, with and",
        f"without `vmap` around; what is not named is right. torch {of['torch']}.",
        "",
        "| operator | first derivatives that are wrong | second | third | right in all orders |",
        "|---|---|---|---|---|",
    ]
    for name, by_order in table.items():
        if any(by_order.values()):
            columns = [_named(by_order[k]) for k in ("1", "2", "3")]
            ways = [
                by for by, orders in of["instead"].get(name, {}).items() if not any(orders.values())
            ]
            instead = "; ".join(ways) or "the orders that are not named"
            lines.append(f"| `{name}` | {' | '.join(columns)} | {instead} |")
    lines += ["", "Right in all orders: " + ", ".join(f"`{name}`" for name in right) + ".", ""]
    return "\n".join(lines)


def _named(found):
    def how(x):
        if isinstance(x, str):
            return "an error"
        return "NaN" if math.isnan(x) else "zero" if x == 0 else "wrong"

    groups = {}
    for modes, x in found.items():
        groups.setdefault(how(x), []).append(modes)
    return "; ".join(f"{', '.join(modes)}: {kind}" for kind, modes in groups.items()) or "none"


def write(of):
    """The table, and its section of the page."""
    TABLE.write_text(json.dumps(of, indent=1) + "\n")
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    PAGE.write_text(before + BEGIN + section(json.loads(TABLE.read_text())) + END + after)
