"""Lines of the user's code: which one runs, and in which modules.

A place is a code object and an instruction, not a frame, which would keep alive all that it refers
to; the line is looked up when somebody asks for it.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
import types

import torch
from torch import nn

Place = tuple[types.CodeType, int]
ModulePaths = dict[nn.Module, dict[nn.Module, str]]  # by root, the path of each module in it

_FUNCTX = os.path.dirname(os.path.dirname(__file__))
# Files below these folders, and code without a file that Python and torch.fx make, are not the
# user's.
_internal: tuple[str, ...] = (
    os.path.dirname(torch.__file__) + os.sep,
    _FUNCTX + os.sep,
    "<frozen",
    "<eval_with_key>",
    "<__array_function__",
)


def add_internal(file: str) -> None:
    """Count the folder of ``file``, a package's ``__init__``, as a framework's own code."""
    global _internal
    _internal = (*_internal, os.path.dirname(file) + os.sep)
    is_internal.cache_clear()


@functools.cache
def is_internal(filename: str) -> bool:
    """Whether a file belongs to torch, functx or another framework (`add_internal`)."""
    return filename.startswith(_internal)


def where(inner: int = 1) -> Place:
    """The line outside of torch and functx that is running; without one, the outermost of all.

    So many ``inner`` frames are known to be none.
    """
    frame = sys._getframe(inner)
    while is_internal(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def users_line(error: BaseException | None = None) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that is running, or that raised ``error``.

    ``None`` where no code of the user's is among the frames.
    """
    if error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        for found in reversed(frames):
            if not is_internal(found.filename):
                return found.filename, found.lineno or 0, found.name
        return None
    place = where()
    if is_internal(place[0].co_filename):
        return None
    return *line_of(place)[:2], place[0].co_name


def line_now(error: BaseException | None = None) -> str:
    """``file:line`` of the user's code that is running, or that an error has come from."""
    found = (error and users_line(error)) or line_of(where())
    return f"{found[0]}:{found[1]}"


def line_of(place: Place) -> tuple[str, int, str]:
    """File, line and function of a place."""
    code, instruction = place
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line)
    return code.co_filename, next(lines, code.co_firstlineno), code.co_qualname


def module_now(known: ModulePaths) -> str:
    """The path from the outermost module that is running, or was; ``known`` is kept."""
    running: list[nn.Module] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            running.append(frame.f_locals["self"])
        frame = frame.f_back
    if not running:
        return ""
    root = next((r for r, paths in known.items() if running[-1] in paths), running[-1])
    if root not in known:
        known[root] = {m: path for path, m in root.named_modules(remove_duplicate=False)}
    return known[root].get(running[0], "")
