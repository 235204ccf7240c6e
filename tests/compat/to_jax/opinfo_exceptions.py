"""Entries of torch's operator database that do not match in JAX, each with its reason.

And what writes ``docs/opinfo_jax.md`` from the verdicts of a sweep.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[3] / "docs" / "opinfo_jax.md"

_SHAPE = "the shape of the result depends on values; refused by name"
_VALUE = "reads values as Python numbers; refused by name"
_SPARSE = "sparse layout; JAX arrays are dense. Refused"
_FACTOR = "LAPACK's packed factors have no counterpart in JAX; named as missing"

DATA_DEPENDENT = {
    "allclose": _VALUE,
    "argwhere": _SHAPE,
    "combinations": _SHAPE,
    "equal": _VALUE,
    "item": _VALUE,
    "linalg.lstsq": "the shape of the residuals depends on the rank; refused by name",
    "linalg.lstsq.grad_oriented": "the shape of the residuals depends on the rank; refused by name",
    "masked_select": _SHAPE,
    "narrow": "a start given as a tensor is read as a number; refused by name",
    "nonzero": _SHAPE,
    "repeat_interleave": _SHAPE,
    "tensor_split": "indices given as a tensor are read as numbers; refused by name",
    "unique": _SHAPE,
    "unique_consecutive": _SHAPE,
}
OTHER_LAYOUTS = {
    "chalf": "JAX has no complex32; refused",
    "resize_as_": "changes the memory of its argument; named as missing",
    "sparse.mm.reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "to_sparse": _SPARSE,
}
NOT_ON_CPU = {"as_strided.partial_views": "torch itself fails on the sample"}
NO_RULE = {
    "geqrf": _FACTOR,
    "hash_tensor": "no counterpart in JAX; named as missing",
    "histogramdd": "no rule yet; named as missing",
    "linalg.ldl_factor": _FACTOR,
    "linalg.ldl_factor_ex": _FACTOR,
    "linalg.ldl_solve": _FACTOR,
    "nn.functional.linear_cross_entropy.chunked": "no rule yet; named as missing",
    "nn.functional.linear_cross_entropy.chunked_none": "no rule yet; named as missing",
    "special.airy_ai": "no counterpart in JAX; named as missing",
}
EXCEPTIONS = DATA_DEPENDENT | OTHER_LAYOUTS | NOT_ON_CPU | NO_RULE

# The value matches, the gradient does not.
OTHER_GRADIENT = {
    "as_strided_scatter": "several elements of the sample share a place; torch's gradient counts"
    " all of them, JAX's the one that was written last",
    "linalg.eigh": "equal for perturbations that keep the argument Hermitian",
    "linalg.pinv.hermitian": "the sample is not Hermitian, which torch's formula takes it to be",
    "nextafter": "JAX has no derivative for it; an error",
}


def runnable(verdicts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The verdicts of entries that can run on a CPU."""
    return {v["name"]: v for v in verdicts if not v["name"].startswith("jiterator")}


def page(verdicts: list[dict[str, Any]], versions: str) -> str:
    """The documentation page."""
    found = runnable(verdicts)
    outcomes = Counter(v["outcome"] for v in found.values())
    gradients = Counter(v["gradient"] for v in found.values() if v["gradient"])
    lines = [
        "# torch's operator database in JAX",
        "",
        "Every entry that runs in float32 on a CPU, lowered by `to_jax` and compared with torch:"
        " values, by distribution where an entry draws random numbers, and gradients of the first"
        " sample that has one."
        f" {versions}. Written by `make sweep`, which runs it again and holds it to the exceptions"
        " named here.",
        "",
        "| | entries |",
        "|---|---:|",
        f"| runnable | {len(found)} |",
        f"| value matches | {outcomes['match']} |",
        f"| distribution matches | {outcomes['match in distribution']} |",
        f"| gradient matches | {gradients['match']} |",
        f"| gradient differs | {gradients.total() - gradients['match']} |",
        f"| refused or missing | {len(EXCEPTIONS)} |",
        "",
        "## Exceptions",
        "",
        "| entry | reason |",
        "|---|---|",
        *(f"| `{name}` | {reason} |" for name, reason in sorted(EXCEPTIONS.items())),
        *(f"| `{name}` (gradient) | {why} |" for name, why in sorted(OTHER_GRADIENT.items())),
        "",
        "## All entries",
        "",
        "| entry | value | gradient |",
        "|---|---|---|",
        *(
            f"| `{name}` | {v['outcome']} | {OTHER_GRADIENT.get(name, v['gradient'])} |"
            for name, v in sorted(found.items())
            if name not in EXCEPTIONS
        ),
        "",
    ]
    return "\n".join(lines)
