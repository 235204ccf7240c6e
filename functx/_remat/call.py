"""One call: flatten its arguments, freeze its cells, run it as a region, build the result."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functx import _tree
from functx._remat import cells, departures, forward
from functx._remat.region import Options


def call(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """``f(*args, **kwargs)``, as a region."""
    frozen = cells.frozen(f)
    result: list[Any] = []  # how the forward's result is put together
    if not kwargs and all(type(a) is Tensor for a in args) and len({*map(id, args)}) == len(args):
        tensors = [*args]

        def body(*ts: Tensor) -> list[Tensor]:
            return _flat(f(*ts), result)

        def again(*ts: Tensor) -> list[Tensor]:
            return _flat(frozen(*ts), None)

    else:
        tensors, build = _flattened(args, kwargs)

        def body(*ts: Tensor) -> list[Tensor]:
            args, kwargs = build(ts)
            return _flat(f(*args, **kwargs), result)

        def again(*ts: Tensor) -> list[Tensor]:
            args, kwargs = build(ts)
            return _flat(frozen(*args, **kwargs), None)

    title = f"the region {options.name} ({departures.line_now()})"
    results = forward.run(body, again, tensors, options, title)
    return _built(results, result[0])


def _flattened(args: Any, kwargs: Any) -> tuple[list[Tensor], Any]:
    """The tensors in the arguments, each once, and what builds the arguments from stand-ins."""
    leaves, spec = _tree.flatten((args, kwargs))
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    places: list[tuple[int, int]] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            number = numbers.setdefault(id(leaf), len(tensors))
            if number == len(tensors):
                tensors.append(leaf)
            places.append((place, number))
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def build(ts: Any) -> Any:
        filled = list(others)
        for place, number in places:
            filled[place] = ts[number]
        return _tree.unflatten(spec, filled)

    return tensors, build


def _flat(out: Any, result: list[Any] | None) -> list[Tensor]:
    """The tensors of a result; how the rest is, is noted in ``result``."""
    if isinstance(out, Tensor):
        if result is not None:
            result.append(None)
        return [out]
    leaves, spec = _tree.flatten(out)
    if result is not None:
        result.append((spec, [None if isinstance(x, Tensor) else (x,) for x in leaves]))
    return [x for x in leaves if isinstance(x, Tensor)]


def _built(results: list[Tensor], how: Any) -> Any:
    if how is None:
        return results[0]
    spec, others = how
    it = iter(results)
    return _tree.unflatten(spec, [next(it) if o is None else o[0] for o in others])

