"""Python's and numpy's generators: the global ones, and those that a program made.

Reading their state at every call would cost more than most regions; so it is done where code that
the function reaches (`_within_reach`) names ``random`` or ``numpy``, where it reaches a generator
itself (``np.random.default_rng()``), or where the caller asks for it.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

from functx._remat._whose import package_of

Generator = tuple[Any, Callable[[], Any], Callable[[Any], Any]]

PACKAGES = frozenset({"random", "numpy"})
_BUILT_IN = frozenset({bool, int, float, str, tuple, list, dict, set, frozenset})
_IN_C = types.BuiltinFunctionType, types.MethodType


def reachable(
    named: Collection[str], instances: Collection[Any], preserve: bool | str
) -> list[Generator]:
    """The generators whose state a region must keep: what each is, how to read it, how to set it.

    Args:
        named: packages of global generators that code within reach names.
        instances: generators within reach.
        preserve: what the caller asked for: ``"all"`` for the global ones in any case.
    """
    if preserve == "all":
        named = PACKAGES
    found: list[Generator] = []
    if "random" in named:
        found.append(("random", random.getstate, random.setstate))
    if "numpy" in named and "numpy" in sys.modules:
        np = sys.modules["numpy"]
        found.append(("numpy", np.random.get_state, np.random.set_state))
    found += [(g, *ways_of_generator(g)) for g in instances]
    return found


def is_array(x: Any) -> bool:
    """Whether it is an array of NumPy's whose memory holds no objects."""
    np = sys.modules.get("numpy")
    return np is not None and type(x) is np.ndarray and not x.dtype.hasobject


def is_generator(x: Any) -> bool:
    """Whether it is a generator of Python's or numpy's whose state can be read and set."""
    if issubclass(type(x), random.Random):
        return not issubclass(type(x), random.SystemRandom)
    return _of_numpy(x, "Generator") or _of_numpy(x, "RandomState")


def _of_numpy(x: Any, name: str) -> bool:
    np = sys.modules.get("numpy.random")
    return np is not None and issubclass(type(x), getattr(np, name))


def ways_of_generator(g: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to read the state of one, and how to set it."""
    if isinstance(g, random.Random):
        return g.getstate, g.setstate
    if _of_numpy(g, "RandomState"):
        return g.get_state, g.set_state
    bits = g.bit_generator

    def write(state: Any) -> None:
        bits.state = state

    return lambda: bits.state, write


def behind(function: Any) -> Any:
    """The generator whose method this is; ``None`` if it is something else."""
    owner = getattr(function, "__self__", None) if type(function) in _IN_C else None
    return owner if owner is not None and is_generator(owner) else None


def named_by(names: Sequence[str], values: Sequence[Any]) -> frozenset[str]:
    """The packages of generators that some globals are of; ``None`` is one that is not there."""
    named: set[str] = set()
    for name, value in zip(names, values):
        if value is None:  # an attribute, mostly
            if name in PACKAGES:
                named.add(name)
        elif type(value) not in _BUILT_IN and not is_generator(value):
            named.add(package_of(value))
    return PACKAGES & named
