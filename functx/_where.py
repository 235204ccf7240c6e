"""Which submodules of a model are meant: by class, name, pattern, predicate, or the module itself.

A module that a model holds in several places has several names and is one module.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

Where = (
    type[nn.Module]
    | str
    | re.Pattern[str]
    | nn.Module
    | Callable[[str, nn.Module], bool]
    | Collection[Any]
)

MARKED = "gradient_checkpointing"
"""Stands for the layers that a model's library marks as worth checkpointing."""


def find(model: nn.Module, where: Where, caller: str) -> dict[str, nn.Module]:
    """The submodules of ``model`` that ``where`` means, by their first names, in their order.

    Args:
        model: whose submodules; the model itself counts only if it is named by ``""``, or given.
        where: see `functx.apply_remat`.
        caller: who asks, for messages.

    Raises:
        TypeError: ``where`` is nothing that can mean modules.
        ValueError: it means no module of ``model``, or one without a forward of its own.
    """
    named = list(model.named_modules(remove_duplicate=False))
    if isinstance(where, nn.ModuleDict):
        where = list(where.values())
    parts = [where] if _is_one(where) else list(where)  # type: ignore[arg-type]
    if not parts:
        raise ValueError(f"{caller}: where is empty. {_available(named)}")
    chosen: set[int] = set()
    for part in parts:
        chosen |= _matches(model, named, part, caller)
    return {name: m for name, m in model.named_modules() if id(m) in chosen}


def _is_one(where: Any) -> bool:
    if isinstance(where, (str, type, re.Pattern, nn.Module)):
        return not isinstance(where, nn.ModuleList)  # a list of modules
    return not isinstance(where, Iterable)


def _matches(
    model: nn.Module, named: list[tuple[str, nn.Module]], where: Any, caller: str
) -> set[int]:
    if isinstance(where, nn.Module):
        hits = [(name, m) for name, m in named if m is where]
        if not hits:
            raise ValueError(
                f"{caller}: the {type(where).__name__} given in where is no part of the model."
            )
        _refuse_containers(hits, caller)
    elif isinstance(where, str):
        hits = _by_text(model, named, where, caller)
    elif isinstance(where, type):
        hits = [(name, m) for name, m in named if isinstance(m, where) and m is not model]
    elif isinstance(where, re.Pattern):
        hits = [(name, m) for name, m in named if name and where.fullmatch(name)]
    elif callable(where):
        alone = _takes_one(where)
        hits = [
            (name, m)
            for name, m in named
            if m is not model and (where(m) if alone else where(name, m))
        ]
    else:
        raise TypeError(
            f"{caller}: where holds {where!r}, expected a class of modules, a name or a pattern of "
            "names, a compiled regular expression, a module, a predicate of (name, module), or a "
            "list of these."
        )
    runnable = {id(m) for _, m in hits if not _is_container(m)}
    if not runnable:
        _refuse_containers(hits, caller)
        raise ValueError(
            f"{caller}: {_describe(where)} matches no submodule. {_near(named, where)}"
        )
    return runnable


def _takes_one(predicate: Callable[..., Any]) -> bool:
    """Whether a predicate takes a module alone, as those of torch's own wrappers do."""
    try:
        parameters = inspect.signature(predicate).parameters.values()
    except (TypeError, ValueError):  # builtins
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind in _POSITIONAL]
    return len(required) == 1 and not any(p.kind is p.VAR_POSITIONAL for p in parameters)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _by_text(
    model: nn.Module, named: list[tuple[str, nn.Module]], where: str, caller: str
) -> list[tuple[str, nn.Module]]:
    exact = [(name, m) for name, m in named if name == where]
    if exact:
        _refuse_containers(exact, caller)
        return exact
    if any(c in where for c in "*?["):
        pattern = re.compile(_as_regex(where))
        return [(name, m) for name, m in named if name and pattern.fullmatch(name)]
    if where == MARKED:
        return marked(model, named, caller)
    return [
        (name, m)
        for name, m in named
        if m is not model and any(c.__name__ == where for c in type(m).__mro__)
    ]


def _as_regex(glob: str) -> str:
    """``*`` and ``?`` stay within one part of a dotted name, ``**`` crosses dots."""
    out, at = "", 0
    while at < len(glob):
        c = glob[at]
        end = glob.find("]", at + 2) if c == "[" else -1
        if glob.startswith("**", at):
            out, at = out + ".*", at + 1
        elif c == "*":
            out += "[^.]*"
        elif c == "?":
            out += "[^.]"
        elif end > 0:
            inside = glob[at + 1 : end]
            out += f"[{'^' + inside[1:] if inside[0] == '!' else inside}]"
            at = end
        else:
            out += re.escape(c)
        at += 1
    return out


def marked(
    model: nn.Module, named: list[tuple[str, nn.Module]], caller: str
) -> list[tuple[str, nn.Module]]:
    """The layers that transformers or diffusers marks as worth checkpointing."""
    layers = [(name, m) for name, m in named if is_marked_layer(m)]
    if layers:
        return layers
    blocks: set[int] = set()
    for _, owner in named:
        if hasattr(owner, MARKED):  # it checkpoints its blocks, but those with blocks of their own
            if getattr(owner, MARKED) is True and caller == "apply_remat":
                raise ValueError(
                    f"{caller}: {type(owner).__name__} is checkpointed by its library already. "
                    "Call model.disable_gradient_checkpointing() first, or keep it and use "
                    "functx.patch_checkpoint()."
                )
            parts = [part for part in _blocks(owner) if not _flagged(part)]
            if not parts and owner is not model and not any(map(_flagged, owner.children())):
                parts = [owner]
            blocks |= {id(part) for part in parts}
    if not blocks:
        raise ValueError(
            f"{caller}: no layer of {type(model).__name__} is marked for gradient checkpointing. "
            f"Name the layers instead. {_available(named)}"
        )
    return [(name, m) for name, m in named if id(m) in blocks]


def is_marked_layer(module: nn.Module) -> bool:
    """Whether this is a ``GradientCheckpointingLayer`` of transformers."""
    return any(
        c.__name__ == "GradientCheckpointingLayer" and c.__module__.startswith("transformers.")
        for c in type(module).__mro__
    )


def _blocks(owner: nn.Module) -> list[nn.Module]:
    """What a module has in lists, and what it has that is called a block."""
    found: list[nn.Module] = []
    for part in owner.children():
        if isinstance(part, nn.ModuleList):
            found += part
        elif "Block" in type(part).__name__:
            found.append(part)
    return found


def _flagged(module: nn.Module) -> bool:
    """Whether it, or something in it, checkpoints by itself."""
    return any(hasattr(part, MARKED) for part in module.modules())


def _is_container(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _refuse_containers(hits: list[tuple[str, nn.Module]], caller: str) -> None:
    for name, module in hits:
        if _is_container(module):
            raise ValueError(
                f"{caller}: {name or 'the model'!r} is a {type(module).__name__}, which has no "
                f"forward of its own to make a region of. Name what is in it: {name + '.*'!r}."
            )


def _describe(where: Any) -> str:
    if isinstance(where, str):
        return f"{where!r}"
    if isinstance(where, type):
        return f"the class {where.__name__}"
    if isinstance(where, re.Pattern):
        return f"the regular expression {where.pattern!r} (which has to match a whole name)"
    return f"the predicate {getattr(where, '__name__', where)!r}"


def _near(named: list[tuple[str, nn.Module]], where: Any) -> str:
    names = [name for name, _ in named if name]
    classes = list(dict.fromkeys(type(m).__name__ for _, m in named[1:]))
    text = where if isinstance(where, str) else getattr(where, "pattern", None)
    text = where.__name__ if isinstance(where, type) else text
    if isinstance(where, type) and named and isinstance(named[0][1], where):
        return (
            f"The model itself is a {where.__name__}: functx.remat(model) makes a region of the "
            "whole."
        )
    if text:
        near = difflib.get_close_matches(text, [*names, *classes], n=5, cutoff=0.5)
        if near:
            return f"Near are {', '.join(map(repr, near))}."
    return _available(named)


def _available(named: list[tuple[str, nn.Module]]) -> str:
    names = [name for name, _ in named if name]
    shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    classes = ", ".join(dict.fromkeys(type(m).__name__ for _, m in named[1:]))
    return (
        f"There are {shown or 'no submodules'} (of the classes {classes})."
        if names
        else ("The model has no submodules; functx.remat(model) makes a region of the whole.")
    )
