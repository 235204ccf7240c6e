"""Pytrees, by optree, including the classes that are registered with torch.

``None`` is a leaf, so that `partition` puts it with the other values that are not tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch

from functx._torch import pytrees

TreeSpec = Any
ENDLESS = (
    "functx: an argument or a result is a list, tuple or dict that contains itself (or is nested "
    "hundreds deep), so it is not a pytree. Let the function close over it, or pass only the "
    "tensors that the function reads from it."
)


def flatten(tree: Any, is_leaf: Any = None) -> tuple[list[Any], TreeSpec]:
    """The leaves of ``tree`` in order, and what is needed to put them back."""
    pytrees.register_new_classes()
    try:
        return optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=pytrees.NAMESPACE)
    except RecursionError as error:
        raise RecursionError(ENDLESS) from error


def unflatten(spec: TreeSpec, leaves: Iterable[Any]) -> Any:
    """The tree that `flatten` took apart, with other leaves."""
    return spec.unflatten(leaves)


def leaves(tree: Any) -> list[Any]:
    """The leaves of ``tree`` in order."""
    return flatten(tree)[0]


def map_(fn: Any, tree: Any) -> Any:
    """``tree`` with ``fn`` applied to every leaf."""
    flat, spec = flatten(tree)
    return unflatten(spec, [fn(leaf) for leaf in flat])


def paths(tree: Any) -> list[str]:
    """The path of each leaf, as code: ``"['weights'][0]"``."""
    return [accessor.codify("") for accessor in flatten(tree)[1].accessors()]


def is_node(one: Any) -> bool:
    """Whether ``one`` is a container, not a leaf."""
    parts = leaves(one)
    return len(parts) != 1 or parts[0] is not one


def shown(spec: TreeSpec) -> str:
    """A structure in one line, for messages."""
    return " ".join(str(spec).split())


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a tensor."""
    # isinstance would accept another library's object that claims to be a Tensor by `__class__`,
    # and torch's C++ can't use such an object.
    return issubclass(type(leaf), torch.Tensor)


def partition(
    tree: Any, belongs: Callable[[Any], bool] = is_tensor, is_leaf: Any = None
) -> tuple[list[Any], Any]:
    """The tensors among the leaves, and how `combine` puts the tree together again."""
    if belongs(tree):
        return [tree], None
    found, spec = flatten(tree, is_leaf)
    others = [None if belongs(leaf) else (leaf,) for leaf in found]
    return [leaf for leaf, other in zip(found, others) if other is None], (spec, others)


def combine(tensors: Sequence[torch.Tensor], how: Any) -> Any:
    """The tree, with these tensors in it."""
    if how is None:
        return tensors[0]
    (spec, others), it = how, iter(tensors)
    return unflatten(spec, [next(it) if o is None else o[0] for o in others])


def is_tensor_dict(one: Any) -> bool:
    """Whether ``one`` is a TensorDict or a tensorclass; ``vmap`` maps their batch size too."""
    if isinstance(one, torch.Tensor):
        return False
    found = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return found is not None and bool(found(type(one)))


def leaves_as(spec: TreeSpec, tree: Any) -> list[Any]:
    """The leaves of ``tree`` in the order of ``spec``.

    Raises a ``ValueError`` if ``tree`` has another structure.
    """
    found = _flatten_up_to(spec, tree)
    if any(map(is_node, found)):
        raise ValueError(f"{shown(spec)} and {shown(flatten(tree)[1])}")
    return found


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Any = None) -> list[Any]:
    """For each leaf of ``tree``, in its order, the leaf of a pytree prefix above it.

    Dicts of the prefix may have another order. Raises a ``ValueError`` if it is not a prefix.
    """
    heads = leaves(prefix)
    return [heads[number] for number in broadcast_prefix_numbers(prefix, tree, is_leaf)]


def broadcast_prefix_numbers(prefix: Any, tree: Any, is_leaf: Any = None) -> list[int]:
    """Like `broadcast_prefix`, with the number of each leaf of the prefix in place of the leaf.

    Neither tree is rebuilt: a registered class may accept nothing but tensors as its leaves.
    """
    spec = flatten(prefix)[1]
    parts = [flatten(part, is_leaf)[0] for part in _flatten_up_to(spec, tree)]
    in_order = [number for number, part in enumerate(parts) for _ in part]
    heads = {path: number for number, path in enumerate(_entries(prefix, None))}
    if len(heads) <= 1:
        return in_order
    found = []
    for path in _entries(tree, is_leaf):
        length = next(n for n in range(len(path), -1, -1) if path[:n] in heads)
        found.append(heads[path[:length]])
    return found


def _entries(tree: Any, is_leaf: Any) -> list[tuple[Any, ...]]:
    """The path of each leaf: keys of dicts, numbers of other children."""
    paths: list[tuple[Any, ...]] = flatten(tree, is_leaf)[1].paths()
    return paths


def _flatten_up_to(spec: TreeSpec, tree: Any) -> list[Any]:
    try:
        return list(spec.flatten_up_to(tree))
    except (ValueError, TypeError) as error:
        raise ValueError(f"not a pytree prefix: {error}") from None
