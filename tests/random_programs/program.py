"""A random program as data: statements (lines, blocks, functions), and transforms around them.

The text is Python, and it is what runs: ``str(program)`` shows it, `Program.compiled` executes it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Block:
    """Statements under a ``with``, a ``for`` or an ``if``."""

    head: str
    body: list[Any]

    def __str__(self) -> str:
        return f"{self.head}\n{_indented(self.body)}"


@dataclass
class Inner:
    """A function, its region (``remat({})`` or ``{}``), and a call, in which ``F`` stands for both.

    The result is assigned to ``target``; lines ``after`` it take it apart.
    """

    name: str
    parameters: str
    body: list[Any]
    result: str
    region: str
    call: str
    target: str
    after: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        body = _indented([*self.body, f"return {self.result}"])
        function = self.region.replace("{}", self.name, 1)
        call = re.sub(r"\bF\b(?!\.)", lambda _: function, self.call)
        head = f"def {self.name}({self.parameters}):"
        return "\n".join([head, body, f"{self.target} = {call}", *self.after])


def _indented(statements: list[Any]) -> str:
    return textwrap.indent("\n".join(map(str, statements)), "    ")


@dataclass
class Program:
    """A function of a matrix and a vector, transforms and regions around it, the innermost first.

    ``end`` says how the result is differentiated outside of them (`stack.finish`), ``may_refuse``
    that rule 4 may refuse it, ``loose`` that half precision is differentiated more than once.
    """

    body: list[Any]
    result: str
    stack: list[str]
    end: str
    features: set[str] = field(default_factory=set)
    may_refuse: bool = False
    loose: bool = False

    def __str__(self) -> str:
        transformed = "program"
        for layer in self.stack:
            transformed = layer.replace("{}", transformed, 1)
        body = _indented([*self.body, f"return {self.result}"])
        return f"def program(m0, v0):\n{body}\n\ntransformed = {transformed}  # end: {self.end}"

    def compiled(self, namespace: dict[str, Any]) -> Callable[..., Any]:
        """The transformed function, with these globals."""
        exec(compile(str(self), "<program>", "exec"), namespace)
        return namespace["transformed"]
