"""Pytrees: optree where it is installed, torch's own otherwise; one meaning for both.

``None`` is a leaf (it is static structure to every caller here), and containers that libraries
register with torch (a model's output classes, caches) are containers here too.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as _torch_pytree

try:
    import optree as _optree

    # Importing it copies what was and will be registered with torch into optree's "torch"
    # namespace.
    import torch.utils._cxx_pytree
except ImportError:  # the fallback serves machines without optree
    _optree = None  # type: ignore[assignment]

TreeSpec = Any

if _optree is not None:
    _known = 0  # how many classes torch had when it was last looked
    _BUILT_IN = (list, dict, collections.OrderedDict, collections.defaultdict, collections.deque)

    def _unflatten(node: Any, context: Any, leaves: Any) -> Any:
        return node.unflatten_fn(list(leaves), context)

    def _learn() -> None:
        """Classes that torch knows, and has not told optree of (``register_dataclass``)."""
        global _known
        _known = len(_torch_pytree.SUPPORTED_NODES)
        for cls, node in list(_torch_pytree.SUPPORTED_NODES.items()):
            if not isinstance(cls, type) or cls in _BUILT_IN or issubclass(cls, tuple):
                continue
            with contextlib.suppress(ValueError):  # there already
                _optree.register_pytree_node(
                    cls,
                    node.flatten_fn,
                    functools.partial(_unflatten, node),
                    namespace="torch",
                )

    def flatten(tree: Any, is_leaf: Any = None) -> tuple[list[Any], TreeSpec]:
        """The leaves of ``tree`` in order, and what is needed to put them back."""
        if len(_torch_pytree.SUPPORTED_NODES) != _known:
            _learn()
        return _optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace="torch")

    def is_node(one: Any) -> bool:
        """Whether ``one`` is taken apart, in some way."""
        return not _optree.tree_is_leaf(one, none_is_leaf=True, namespace="torch")

    def unflatten(spec: TreeSpec, leaves: Any) -> Any:
        """The tree that ``flatten`` took apart, with other leaves."""
        return _optree.tree_unflatten(spec, leaves)

    def paths(tree: Any) -> list[str]:
        """Where each leaf is, as code: ``"['weights'][0]"``."""
        found = _optree.tree_accessors(tree, none_is_leaf=True, namespace="torch")
        return [accessor.codify("") for accessor in found]

else:

    def flatten(tree: Any, is_leaf: Any = None) -> tuple[list[Any], TreeSpec]:
        """The leaves of ``tree`` in order, and what is needed to put them back."""
        return _torch_pytree.tree_flatten(tree, is_leaf)

    def is_node(one: Any) -> bool:
        """Whether ``one`` is taken apart, in some way."""
        return not _torch_pytree.tree_is_leaf(one)

    def unflatten(spec: TreeSpec, leaves: Any) -> Any:
        """The tree that ``flatten`` took apart, with other leaves."""
        return _torch_pytree.tree_unflatten(leaves, spec)

    def paths(tree: Any) -> list[str]:
        """Where each leaf is, as code: ``"['weights'][0]"``."""
        found, _ = _torch_pytree.tree_flatten_with_path(tree)
        return [_torch_pytree.keystr(path) for path, _ in found]


def leaves_to_torch(tree: Any) -> list[Any]:
    """The leaves as functions of torch's own see them, which know no class of optree's alone."""
    return list(_torch_pytree.tree_leaves(tree))


def shown(spec: TreeSpec) -> str:
    """A structure in one line, for messages."""
    return " ".join(str(spec).split())


def parted(tree: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors among the leaves, and how `joined` puts the tree together again."""
    if isinstance(tree, torch.Tensor):
        return [tree], None
    found, spec = flatten(tree)
    others = [None if isinstance(x, torch.Tensor) else (x,) for x in found]
    return [x for x in found if isinstance(x, torch.Tensor)], (spec, others)


def joined(tensors: Sequence[torch.Tensor], how: Any) -> Any:
    """The tree, with these tensors in it."""
    if how is None:
        return tensors[0]
    (spec, others), it = how, iter(tensors)
    return unflatten(spec, [next(it) if o is None else o[0] for o in others])


def leaves(tree: Any) -> list[Any]:
    """The leaves of ``tree`` in order."""
    return flatten(tree)[0]


def map_(fn: Any, tree: Any) -> Any:
    """``tree`` with ``fn`` applied to every leaf."""
    flat, spec = flatten(tree)
    return unflatten(spec, [fn(leaf) for leaf in flat])


def _is_leaf(one: Any) -> bool:
    parts = leaves(one)
    return len(parts) == 1 and parts[0] is one


def leaves_as(spec: TreeSpec, tree: Any) -> list[Any]:
    """The leaves of a tree of some structure, in its order: dicts may have theirs in another.

    Raises:
        ValueError: ``tree`` has another structure.
    """
    try:
        found = spec.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(str(error)) from None
    if not all(_is_leaf(one) for one in found):
        raise ValueError(f"{shown(spec)} and {shown(flatten(tree)[1])}")
    return found


def has_dict(tree: Any) -> bool:
    """Whether a dict is somewhere in nested tuples, lists and dicts."""
    return isinstance(tree, dict) or (
        isinstance(tree, (tuple, list)) and any(has_dict(part) for part in tree)
    )


def spread(prefix: Any, tree: Any) -> list[Any]:
    """The leaves of a pytree prefix, each as often as the part of ``tree`` under it has leaves.

    Returns:
        One for each leaf of ``tree``, in its order; dicts of the prefix may have another.

    Raises:
        ValueError: ``prefix`` is no prefix of ``tree``.
    """
    heads, spec = flatten(prefix)
    try:
        parts = spec.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(f"not a pytree prefix: {error}") from None
    whole = unflatten(spec, [map_(lambda _, own=own: own, part) for own, part in zip(heads, parts)])
    return leaves_as(flatten(tree)[1], whole)
