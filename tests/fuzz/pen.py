"""What writes lines: choices, fresh names, operands that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .forms import SHAPES
from .program import Scope


@dataclass
class Pen:
    """Draws from ``choose`` and writes lines.

    Attributes:
        choose: a number below the one it is given; 0 is the simplest.
        lines: what is written.
        features: what is in it.
        budget: how many statements may hold others.
        stack: transforms that will be around it.
    """

    choose: Callable[[int], int]
    lines: list[str] = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    count: int = 0
    budget: int = 0
    stack: tuple[str, ...] = ()
    more: bool = False  # whether something may come behind all else
    inside: int = 0  # transforms in the program itself that are around what is written

    def pick(self, options: Sequence[Any]) -> Any:
        """One of the options; the first is the simplest."""
        return options[self.choose(len(options))]

    def chance(self, one_in: int) -> bool:
        """True once in so many times."""
        return self.choose(one_in) == one_in - 1

    def fresh(self, prefix: str = "v") -> str:
        """A name that was not used yet."""
        self.count += 1
        return f"{prefix}{self.count}"

    def emit(self, scope: Scope, *texts: str) -> None:
        """Write lines in the body of a scope."""
        self.lines += ["    " * scope.depth + text for text in texts]

    def operand(self, scope: Scope, shape: str) -> str:
        """A name of that shape, or an expression that makes one of what there is."""
        names = [n for n, s in scope.names if s == shape]
        if names:
            # The newest ones more often, so that results are used.
            return self.pick(names[::-1][:3]) if not self.chance(3) else self.pick(names)
        vector = self.operand(scope, "v")
        return {"s": f"{vector}.sum()", "m": f"torch.outer({vector}, {vector})"}[shape]

    def fill(self, scope: Scope, form: tuple[str, str, str]) -> tuple[str, str]:
        """An expression of a form, and its shape."""
        text, operands, result = form
        shape = self.pick("vms") if "x" in operands else ""
        names = [self.operand(scope, shape or s) for s in operands]
        return text.format(*names, shape=SHAPES[shape or result]), shape or result

    def define(self, scope: Scope, text: str, shape: str) -> str:
        """A new name for an expression."""
        name = self.fresh()
        self.emit(scope, f"{name} = {text}")
        scope.names.append((name, shape))
        return name

    @property
    def at_base(self) -> bool:
        """Whether nothing but plain autograd will differentiate what is written."""
        return not self.stack and not self.inside
