"""Where in the user's code each node of a traced graph comes from.

While the function runs, every torch call notes the innermost frame that is neither torch's nor
functx's, and the tracer copies the note to the nodes it makes.  Frames are looked at only here, so
an ordinary trace does not pay for them.
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node
from torch.fx.traceback import set_stack_trace
from torch.overrides import TorchFunctionMode

import functx

_FOLDERS = (Path(str(file)).parent for file in (torch.__file__, functx.__file__, __file__))
_INTERNAL = ("<", *(f"{folder}/" for folder in _FOLDERS))
_MARK = "functx source: "


@dataclass(frozen=True)
class Source:
    """A line of the user's code.

    Attributes:
        file: its path.
        line: its number.
        function: the function that it is in.
        text: the line itself.
    """

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class _Note(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
            frame = frame.f_back
        if frame is not None:
            code = frame.f_code
            set_stack_trace([f"{_MARK}{code.co_filename}\n{frame.f_lineno}\n{code.co_name}"])
        return func(*args, **(kwargs or {}))


def noted(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f``, noting where it is while it runs.

    Trace it under ``torch.fx.traceback.preserve_node_meta()``.
    """

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        with _Note():
            return f(*args)

    return run


def source_of(node: Node) -> Source | None:
    """The line that made a node, if it was noted."""
    trace = node.stack_trace or ""
    if not trace.startswith(_MARK):
        return None
    file, line, function = trace.removeprefix(_MARK).split("\n")[:3]
    return Source(file, int(line), function, linecache.getline(file, int(line)).strip())
