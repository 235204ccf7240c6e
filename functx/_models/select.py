"""Select submodules of a model by class, name, pattern or predicate, or by the module itself.

A module that occurs in several places of a model has several names, but counts once.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from functx._core import has_forward

Where = type[nn.Module] | str | re.Pattern[str] | nn.Module | Callable[..., bool] | Collection[Any]
Named = list[tuple[str, nn.Module]]

MARKED = "gradient_checkpointing"  # selects the layers that transformers or diffusers checkpoint
_WILDCARDS = {"**": ".*", "*": "[^.]*", "?": "[^.]"}  # `**` crosses dots


def find(model: nn.Module, where: Where, caller: str) -> dict[str, nn.Module]:
    """The submodules of ``model`` that ``where`` selects, by their first names, in order.

    The model itself is selected only by the name ``""`` or by the module.

    Raises:
        TypeError: ``where`` has a type that can't select modules.
        ValueError: it selects no module of ``model``, or one that does not define ``forward``.
    """
    named = list(model.named_modules(remove_duplicate=False))
    if isinstance(where, nn.ModuleDict):
        where = list(where.values())
    is_one = isinstance(where, (str, type, nn.Module)) and not isinstance(where, nn.ModuleList)
    parts = list(where) if isinstance(where, Iterable) and not is_one else [where]
    if not parts:
        raise ValueError(f"{caller}: where is empty. {_hint(named)}")
    chosen: set[int] = set()
    for part in parts:
        hits = _matches(named, part, caller)
        runnable = {id(m) for _, m in hits if has_forward(m)}
        if not runnable:
            raise ValueError(f"{caller}: {_nothing(named, part, hits)}")
        chosen |= runnable
    return {name: m for name, m in model.named_modules() if id(m) in chosen}


def _matches(named: Named, where: Any, caller: str) -> Named:
    inner = [(name, m) for name, m in named if m is not named[0][1]]
    if isinstance(where, nn.Module):
        return [(name, m) for name, m in named if m is where]
    if isinstance(where, str):
        if exact := [(name, m) for name, m in named if name == where]:
            return exact
        if any(c in where for c in "*?["):
            where = _pattern(where)
        elif where == MARKED:
            return _marked(named, caller)
        else:
            classes = [(name, m, [c.__name__ for c in type(m).__mro__]) for name, m in inner]
            return [(name, m) for name, m, names in classes if where in names]
    if isinstance(where, type):
        return [(name, m) for name, m in inner if isinstance(m, where)]
    if isinstance(where, re.Pattern):
        return [(name, m) for name, m in named[1:] if where.fullmatch(name)]
    if callable(where):
        alone = _takes_one(where)
        return [(name, m) for name, m in inner if (where(m) if alone else where(name, m))]
    raise TypeError(
        f"{caller}: where must be a class of modules, a name or a pattern of names, a compiled "
        "regular expression, a module, a predicate of (name, module), or a list of these. Got "
        f"{where!r}."
    )


def _takes_one(predicate: Callable[..., Any]) -> bool:
    """Whether a predicate takes only a module, like the predicates of torch's own wrappers."""
    parameters = inspect.signature(predicate).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    return len(required) == 1 and not any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _pattern(glob: str) -> re.Pattern[str]:
    """Convert a pattern, in which ``*`` and ``?`` do not match dots, and ``**`` does."""
    texts = re.split(r"(\*\*|[*?]|\[[^]]+\])", glob)
    texts[::2] = map(re.escape, texts[::2])
    texts[1::2] = (_WILDCARDS.get(t) or t.replace("[!", "[^", 1) for t in texts[1::2])
    return re.compile("".join(texts))


def _marked(named: Named, caller: str) -> Named:
    """The layers that transformers marks; for diffusers, the blocks in lists of marked modules."""
    if layers := [(name, m) for name, m in named if is_marked_layer(m)]:
        return layers
    marked = {id(m) for _, m in named if any(hasattr(part, MARKED) for part in m.modules())}
    owned = [part for _, m in named if hasattr(m, MARKED) for part in m.children()]
    blocks = {id(m) for part in owned if isinstance(part, nn.ModuleList) for m in part} - marked
    if not blocks:
        raise ValueError(
            f"{caller}: no layer of {type(named[0][1]).__name__} is marked for gradient "
            f"checkpointing. Name the layers instead. {_hint(named)}"
        )
    return [(name, m) for name, m in named if id(m) in blocks]


def is_marked_layer(module: nn.Module) -> bool:
    """Whether this is a ``GradientCheckpointingLayer`` of transformers."""
    return any(
        c.__name__ == "GradientCheckpointingLayer" and c.__module__.startswith("transformers.")
        for c in type(module).__mro__
    )


def without_own_checkpoint(forward: Any) -> Any:
    """The ``forward`` of a layer of transformers, without the checkpoint that is built into it.

    transformers wraps the ``forward`` of each class of marked layers, and the wrapper checkpoints
    if ``gradient_checkpointing_enable()`` was called. A region replaces that checkpoint.
    """
    module = getattr(forward, "__globals__", {}).get("__name__")
    is_wrapper = module == "transformers.modeling_layers" and hasattr(forward, "__wrapped__")
    return forward.__wrapped__ if is_wrapper else forward


def _nothing(named: Named, where: Any, containers: Named) -> str:
    """The reason why ``where`` selects nothing that can be a region, and what could be selected."""
    for name, module in containers:
        return (
            f"{name or 'the model'!r} is a {type(module).__name__}, which does not define forward, "
            f"so it can't be a region. Name the modules in it: {name + '.*'!r}."
        )
    if isinstance(where, nn.Module):
        return f"the {type(where).__name__} in where is not a part of the model."
    if isinstance(where, type) and isinstance(named[0][1], where):
        return (
            f"only the model itself is a {where.__name__}: functx.remat(model) makes it a region "
            "as a whole."
        )
    regex = where.pattern if isinstance(where, re.Pattern) else where
    text = regex if isinstance(regex, str) else getattr(where, "__name__", repr(where))
    return f"{text!r} matches no submodule, by its whole name or class. {_hint(named, text)}"


def _hint(named: Named, text: str = "") -> str:
    """The names of submodules: those that are similar to ``text``, or else the first ones."""
    names = [name for name, _ in named if name]
    if not names:
        return "The model has no submodules; functx.remat(model) makes it a region as a whole."
    classes = list(dict.fromkeys(type(m).__name__ for _, m in named[1:]))
    if near := difflib.get_close_matches(text, [*names, *classes], n=5, cutoff=0.5):
        return f"Similar names are {', '.join(map(repr, near))}."
    shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    return f"The submodules are {shown} (of the classes {', '.join(classes)})."
