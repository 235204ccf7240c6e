"""What was found within reach of a function: `_within_reach`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from functx._remat._past_torch import LITTLE


class Reached:
    """What was found.

    Attributes:
        modules: of the user's and of torch.
        objects: others that have attributes.
        attributes: names of attributes that are in no dict: in slots of objects, and of classes.
        containers: lists, dicts and the like that are reached by these, or by a function.
        hooks: of modules: nothing else leads to what they close over.
        scopes: globals that functions rebind: the dict, and the names.
        named: globals that they name, likewise.
        packages: of generators (``random``, ``numpy``) that code is of or names.
        arrays: of NumPy's, that may be written to, while they are within `memory` bytes.
        large: others of these, which are too large.
        generators: such of the user's, by id.
        rare: what is put back in ways of its own: context variables, iterators. `_rare`.
        spaces: what classes and modules of the user's hold, by the id of each.
        namespaces: those of modules.
    """

    __slots__ = (
        *("attributes", "containers", "hooks", "modules", "named", "objects", "scopes"),
        *("arrays", "generators", "large", "memory", "namespaces", "packages", "rare", "spaces"),
    )

    def __init__(self) -> None:
        self.attributes: list[tuple[Any, tuple[str, ...]]] = []
        self.modules: list[nn.Module] = []
        self.objects: list[Any] = []
        self.containers: list[Any] = []
        self.hooks: list[Any] = []
        self.named: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.scopes: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.packages: frozenset[str] = frozenset()
        self.arrays: list[Any] = []
        self.memory = LITTLE
        self.large: list[Any] = []
        self.generators: dict[int, Any] = {}
        self.rare: list[Any] = []
        self.spaces: dict[int, Mapping[str, Any]] = {}
        self.namespaces: dict[int, dict[str, Any]] = {}

    def note_array(self, array: Any) -> None:
        """Note one of NumPy's."""
        if array.flags.writeable and (room := self.memory - array.nbytes) >= 0:
            self.memory = room
            self.arrays.append(array)
        elif array.flags.writeable and array.flags.forc:
            self.large.append(array)

    def names(self) -> set[str]:
        """What code of the region names: globals, attributes, variables."""
        return set[str]().union(*[names for _, names in self.named])
