"""Lines of the user's code: which one is running, and what it is called.

A place is a code object and an instruction, not a frame, which would keep alive all that it refers
to; the line is looked up when somebody asks for it.
"""

from __future__ import annotations

import os
import types
from typing import Any

import torch

from functx import _torch_modules

Place = tuple[types.CodeType, int]

_INTERNAL = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


class _Internal(dict[str, bool]):
    """Whether a file is of torch or functx, by its name."""

    def __missing__(self, filename: str) -> bool:
        internal = self[filename] = filename.startswith(_INTERNAL)
        return internal


is_internal = _Internal()


def is_ours(filename: str) -> bool:
    """Whether a file is of functx."""
    return filename.startswith(_INTERNAL[1])


def where(skipped: int = 0) -> Place:
    """The line outside of torch and functx that is running, not looked up yet.

    Args:
        skipped: how many frames, the caller's first, are known to be of functx.
    """
    # Never this function's own frame: a frame that holds itself is garbage with all it refers to.
    frame: Any = _torch_modules.frame_above(skipped + 1)
    here = frame
    while is_internal[frame.f_code.co_filename]:
        frame = frame.f_back
        if frame is None:
            frame = here
            break
    return frame.f_code, frame.f_lasti


def line_of(place: Place) -> int:
    """The number of the line of a place."""
    code, instruction = place
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end and line]
    return lines[0] if lines else code.co_firstlineno


def describe_place(place: Place) -> str:
    """``file:line`` of a place."""
    return f"{place[0].co_filename}:{line_of(place)}"


class ModulePaths:
    """Where among the modules that are running this is: `module_path`, many times over."""

    def __init__(self) -> None:
        self._paths: dict[int, tuple[torch.nn.Module, dict[int, str]]] = {}

    def here(self) -> str:
        """The path from the outermost module that is running; ``""`` outside of modules."""
        running = _torch_modules.running_modules()
        if not running:
            return ""
        root = running[-1]
        if id(root) not in self._paths:
            named = root.named_modules(remove_duplicate=False)
            self._paths[id(root)] = root, {id(module): path for path, module in named}
        return self._paths[id(root)][1].get(id(running[0]), "")
