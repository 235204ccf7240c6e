"""Find the line of user code for each node of a traced graph.

While the function runs, every torch call notes the innermost frame that is not in torch, JAX or
functx, and the tracer copies the note to the nodes that it makes.
"""

from __future__ import annotations

import linecache
import warnings
from dataclasses import dataclass

from torch.fx import Node
from torch.fx.traceback import set_stack_trace

from functx._core import users_line

_MARK = "functx source: "


@dataclass(frozen=True)
class Source:
    """A line of user code.

    Attributes:
        file: the path of the file.
        line: the line number.
        function: the function around the line.
        text: the line itself.
    """

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def note_source() -> None:
    """Note the line of user code that runs, for the nodes that are made next.

    This has an effect only under ``torch.fx.traceback.preserve_node_meta()``.
    """
    if found := users_line():
        set_stack_trace([_MARK + "\n".join(map(str, found))])


def at_line(error: BaseException | None = None) -> str:
    """Like `at_source`, for the line of user code that runs now, or that raised ``error``."""
    found = users_line(error)
    return "" if found is None else " at {}:{} in {}".format(*found)


def warn(message: str) -> None:
    """Warn at the line of user code that runs now."""
    file, line, _ = users_line() or ("sys", 1, "")
    warnings.warn_explicit(message, UserWarning, file, line)


def source_of(node: Node) -> Source | None:
    """The line that made a node, if it was noted."""
    trace = node.stack_trace or ""
    if not trace.startswith(_MARK):
        return None
    file, line, function = trace.removeprefix(_MARK).split("\n")[:3]
    return Source(file, int(line), function, linecache.getline(file, int(line)).strip())


def at_source(node: Node) -> str:
    """``" at FILE:LINE in FUNCTION"`` for messages; ``""`` if no line was noted."""
    source = source_of(node)
    return "" if source is None else f" at {source}"
