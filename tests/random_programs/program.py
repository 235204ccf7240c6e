"""A random program as data: a tree of statements, transforms around it, and its text.

The text is Python, and it is what runs: ``str(program)`` shows it, `Program.compiled` executes it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Line:
    """A line of Python, and the name that it gives to its result."""

    text: str
    out: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass
class Block:
    """Statements under a ``with``, a ``for`` or an ``if``."""

    head: str
    body: list[Any]

    def __str__(self) -> str:
        return f"{self.head}\n{_indented(self.body)}"


@dataclass
class Inner:
    """A function, and a call of it under some wrappers.

    Attributes:
        name: of the function.
        parameters: as in its ``def``.
        body: its statements.
        result: what it returns.
        wrappers: texts with a ``{}``, the innermost first.
        target: what the result of the call is assigned to.
        arguments: of the call, or ``None`` where the last wrapper makes it.
        after: lines that take the result apart.
        outs: the names that are bound at last.
    """

    name: str
    parameters: str
    body: list[Any]
    result: str
    wrappers: list[str]
    target: str
    arguments: str | None
    after: list[str] = field(default_factory=list)
    outs: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        called = wrapped(self.name, self.wrappers)
        lines = [
            f"def {self.name}({self.parameters}):",
            _indented([*self.body, f"return {self.result}"]),
            f"{self.target} = {called}" + ("" if self.arguments is None else f"({self.arguments})"),
            *self.after,
        ]
        return "\n".join(lines)


def wrapped(name: str, wrappers: list[str]) -> str:
    """The text of a function under wrappers."""
    for wrapper in wrappers:
        name = wrapper.replace("{}", name, 1)
    return name


def _indented(statements: list[Any]) -> str:
    return textwrap.indent("\n".join(map(str, statements)), "    ")


@dataclass
class Program:
    """A function of a matrix and a vector, and what is done to it.

    Attributes:
        body: its statements.
        result: what it returns.
        stack: wrappers around it, the innermost first: transforms of `stack`, and regions.
        end: how its result is differentiated outside of all transforms; see `stack.finish`.
        features: what is in it.
        may_refuse: whether something in it may be an error by rule 4.
        loose: whether derivatives of derivatives of half precision are in it.
    """

    body: list[Any]
    result: str
    stack: list[str]
    end: str
    features: set[str] = field(default_factory=set)
    may_refuse: bool = False
    loose: bool = False

    def __str__(self) -> str:
        return (
            f"def program(m0, v0):\n{_indented([*self.body, f'return {self.result}'])}\n\n"
            f"transformed = {wrapped('program', self.stack)}  # end: {self.end}"
        )

    def compiled(self, namespace: dict[str, Any]) -> Callable[..., Any]:
        """The transformed function, with these globals."""
        exec(compile(str(self), "<program>", "exec"), namespace)
        return namespace["transformed"]

    def bodies(self) -> Iterator[list[Any]]:
        """Each list of statements, the outermost first."""
        pending = [self.body]
        while pending:
            body = pending.pop(0)
            yield body
            pending += [s.body for s in body if not isinstance(s, Line)]
