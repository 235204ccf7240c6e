"""Every model type of transformers as a JAX function: value and gradients, against torch's.

``python -m bench.models.in_jax --jobs 2 --json FILE``. A type runs in a process of its own; a file
of results, a line a type, is gone on with. The model is in eval mode and float64; gradients of all
parameters of a sum over its outputs, by ``jax.jit(jax.value_and_grad(to_jax(loss)))``. A model that
computes something in float32 inside is right to float32's rounding.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import torch

import functx
from bench.models import apart
from bench.models.apart import line, parts, resumed
from functx._command import small_models

LIMIT = 300  # seconds for a type
EXACT, ROUNDED = 1e-9, 1e-4  # of the largest number of all gradients


def judge(name):
    """The outcome for a type, a detail, and seconds to lower and to compile."""
    import jax
    import numpy as np

    from functx.compat import to_jax

    jax.config.update("jax_enable_x64", True)
    cls, config, inputs = small_models.find(name)
    model = small_models.make(cls, config).eval()

    def loss(params, given):
        return small_models.loss(functx.functional_call(model, params, (), given))

    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    found = {"model": cls.__name__}
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    value = loss(leaves, inputs)
    gradients = torch.autograd.grad(value, [*leaves.values()], materialize_grads=True)
    expected, value = dict(zip(params, gradients)), value.detach()
    if not all(g.isfinite().all() for g in expected.values()):
        return found | {"outcome": "not judged", "detail": "torch's gradients are not finite"}
    args = jax.tree.map(lambda t: jax.numpy.asarray(t.numpy()), (params, inputs))
    start = time.perf_counter()
    try:
        lowered = jax.jit(jax.value_and_grad(to_jax(loss))).lower(*args)
        middle = time.perf_counter()
        run = lowered.compile()
        end = time.perf_counter()
        jax_value, gradients = run(*args)
    except Exception as error:
        detail = f"{type(error).__name__}: {line(error, 300)}"
        return found | {"outcome": "raises", "detail": detail}
    largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=1.0)
    off = max(
        (g - torch.tensor(np.asarray(gradients[n]))).abs().max().item() / largest
        for n, g in expected.items()
        if g.numel()
    )
    off = max(off, abs(value.item() - float(jax_value)) / max(1.0, abs(value.item())))
    outcome = "same" if off <= EXACT else "rounded" if off <= ROUNDED else "differs"
    seconds = {"lower": round(middle - start, 2), "compile": round(end - middle, 2)}
    return found | {"outcome": outcome, "detail": f"{off:.1e}"} | seconds


def _judged(name):
    yield judge(name)


def _record(name):
    """What came of a type, in a process of its own."""
    start, found = time.monotonic(), {}
    for part in parts(_judged, name, LIMIT, "spawn"):
        if isinstance(part, dict):
            found = part
        elif part is not None:
            outcome = "not built" if part[0] == "raised" else "not run"
            found = {"outcome": outcome, "detail": part[1]}
    return {"type": name} | found | {"seconds": round(time.monotonic() - start, 1)}


def sweep(names=None, jobs=1):
    """Yields what came of each type, of all types if none are named."""
    yield from apart.sweep(_record, names, jobs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--types", help="names with commas between them; all if not given")
    parser.add_argument("--jobs", type=int, default=1, help="types that run at a time")
    parser.add_argument("--json", type=Path, help="results, to go on with and to add to")
    options = parser.parse_args()
    records = resumed(sweep, options, lambda r: f"{r['outcome']}: {r.get('detail', '')}")
    print(dict(Counter(record["outcome"] for record in records)))


if __name__ == "__main__":
    main()
