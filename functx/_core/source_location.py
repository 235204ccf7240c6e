"""Find the line of user code that is running, and the modules that it runs in.

A `Place` is a code object and an instruction. It is not a frame, because a frame would keep all of
its variables alive. `line_of` looks the line number up when a message needs it.
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
# Files in these folders are not user code. Neither is code without a file, which Python and
# torch.fx make.
_internal: tuple[str, ...] = (
    os.path.dirname(torch.__file__) + os.sep,
    _FUNCTX + os.sep,
    "<frozen",
    "<eval_with_key>",
    "<__array_function__",
)


def add_internal(file: str) -> None:
    """Count the folder of ``file``, a package's ``__init__``, as framework code."""
    global _internal
    _internal = (*_internal, os.path.dirname(file) + os.sep)
    is_internal.cache_clear()


@functools.cache
def is_internal(filename: str) -> bool:
    """Whether a file belongs to torch, functx or another framework (`add_internal`)."""
    return filename.startswith(_internal)


def where(inner: int = 1) -> Place:
    """The place in user code that is running; the outermost frame if there is no user code.

    Args:
        inner: how many innermost frames to skip because they are functx's own.
    """
    frame = sys._getframe(inner)
    while is_internal(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def users_line(error: BaseException | None = None) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that is running, or that raised ``error``.

    ``None`` if no frame is user code.
    """
    if error is not None:
        for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
            code = frame.f_code
            # (torch.fx makes functions without a file, in modules of torch.)
            is_torchs = str(frame.f_globals.get("__name__")).startswith("torch.")
            if not (is_internal(code.co_filename) or is_torchs):
                return code.co_filename, line, code.co_name
        return None
    place = where()
    if is_internal(place[0].co_filename):
        return None
    return *line_of(place)[:2], place[0].co_name


def line_now(error: BaseException | None = None) -> str:
    """``file:line`` of the user's code that is running, or that raised ``error``."""
    found = (error and users_line(error)) or line_of(where())
    return f"{found[0]}:{found[1]}"


def line_of(place: Place) -> tuple[str, int, str]:
    """File, line and function of a place."""
    code, instruction = place
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line)
    return code.co_filename, next(lines, code.co_firstlineno), code.co_qualname


def module_of(error: BaseException) -> str:
    """``, in CLASS,`` for the innermost module that was running when an error was raised."""
    frames = (frame for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]))
    called = (f for f in frames if f.f_code is nn.Module._call_impl.__code__)
    frame = next(called, None)
    return "" if frame is None else f", in {type(frame.f_locals['self']).__name__},"


def module_now(cache: ModulePaths) -> str:
    """The path of the innermost module that is running, from the outermost module seen so far.

    ``cache`` holds the paths below each outermost module, and is filled by these calls.
    """
    running: list[nn.Module] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            running.append(frame.f_locals["self"])
        frame = frame.f_back
    if not running:
        return ""
    root = next((r for r, paths in cache.items() if running[-1] in paths), running[-1])
    if root not in cache:
        cache[root] = {m: path for path, m in root.named_modules(remove_duplicate=False)}
    return cache[root].get(running[0], "")
