"""Who applies custom Functions on this thread, and whether the engine runs.

``Function.apply`` passes through no mode. What observes it (``NOTE [custom functions]`` in
`_tracker`) asks here first; the JAX lowering answers while it traces a function, and `per_sample`
while it checks a compiled loss.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from functx import _torch, _torch_globals, _torch_nodes
from functx._remat._bound import kept, kept_by_a_function
from functx._remat._contents_by_place import A_PAGE
from functx._remat._past_torch import held_by
from functx._remat._tapes import nodes_of, tensors_of

Apply = Callable[..., Any]
Hook = Callable[[type, Apply, Sequence[Any]], Any]
"""Takes the Function, its own ``apply`` and the arguments; returns what ``apply`` returns."""


class Running(threading.local):
    """What runs on this thread.

    Attributes:
        engine: the engine's own operations: a ``detach`` is none that a user wrote.
        keeping: how many traces are under way that leave each region in their graph as a node.
    """

    engine = False
    keeping = 0


running = Running()


class _Hooks(threading.local):
    current: Hook | None = None


_hooks = _Hooks()


@contextmanager
def intercepting(hook: Hook) -> Iterator[None]:
    """Let ``hook`` apply the custom Functions of this thread."""
    outer, _hooks.current = _hooks.current, hook
    try:
        yield
    finally:
        _hooks.current = outer


def applied(cls: type, apply: Apply, args: Sequence[Any]) -> Any:
    """The result of a custom Function."""
    hook = _hooks.current
    return apply(*args) if hook is None else hook(cls, apply, args)


_KEPT = frozenset({bool, int, float, complex, str})
_ADDRESS = re.compile("0x[0-9a-fA-F]{6,}")


def nodes_of_function(out: Any) -> list[Any]:
    """The nodes of a custom Function, by what it gave."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return nodes_of([first]) if isinstance(first, Tensor) else []


def is_of_the_users(node: Any) -> bool:
    """Whether a node is of a custom Function that functx has not."""
    of = getattr(getattr(node, "_forward_cls", None), "__module__", "")
    return _torch_nodes.is_of_python(node) and not of.startswith("functx.")


def kept_numbers(nodes: Sequence[Any], out: Any, args: Any) -> list[Any]:
    """The numbers and the like that a custom Function keeps for its backward, behind their names.

    What names a thing of this run is left out: the id and the address of a tensor that it was given
    or gave. So is what it keeps under a name that begins with an underscore.

    Args:
        nodes: of it.
        out: what it gave.
        args: what it was given.
    """
    numbers: list[tuple[str, Any]] = []
    for node in nodes:
        numbers += _past_torch(node, tensors_of(args))
        for key, x in _attributes(node):
            if type(x) in _KEPT:
                numbers.append((key, _ADDRESS.sub("0x", x) if type(x) is str else x))
            elif (found := kept(x) or kept_by_a_function(x)) is not None:
                numbers.append((key, found))
    if any(type(x) is int and x >= A_PAGE for _, x in numbers):
        named = {address for t in tensors_of(out, args) for address in _addresses(t)}
        numbers = [(key, x) for key, x in numbers if type(x) is not int or x not in named]
    return [x for pair in sorted(numbers, key=repr) for x in pair]


def _attributes(node: Any) -> list[tuple[str, Any]]:
    """What a custom Function keeps, but under names that begin with an underscore."""
    attributes = getattr(node, "__dict__", None) or {}
    return [(key, x) for key, x in attributes.items() if not key.startswith("_")]


def _past_torch(node: Any, given: Sequence[Tensor]) -> list[tuple[str, Any]]:
    """What a node keeps of memory that is not torch's, and that was not given to its Function."""
    if not is_of_the_users(node):
        return []  # what calls JAX, of which all arguments are compared
    of = getattr(node, "_forward_cls", None)
    those = _attributes(node)
    if _torch_globals.hooks_on_saved(True) is None:  # which would run
        with suppress(AttributeError, RuntimeError):  # written to since it was saved, perhaps
            those.append(("saved_tensors", node.saved_tensors))
    code = getattr(of, "backward", None)
    found = [(key, held_by([x], given, code)) for key, x in those if type(x) not in _KEPT]
    return [(key, held) for key, held in found if held]


def _addresses(t: Tensor) -> list[int]:
    found = [id(t)]
    while _torch.is_wrapped(t):
        t = _torch.get_unwrapped(t)
    try:
        return [*found, t.data_ptr()]
    except RuntimeError:  # it has no memory of its own
        return found
