"""A random program, and what of it is being written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Scope:
    """Names visible in a function body, with their shapes; the last are its own."""

    names: list[tuple[str, str]]
    depth: int
    own: int  # names from here on may be rebound


@dataclass
class Program:
    """A random program.

    Attributes:
        source: defines ``build``.
        features: what is in it.
        stack: transforms around it, innermost first.
        places: where remat goes around: 0 around the function, ``i`` around ``i`` transforms.
        randomness: of every vmap.
        library: ``functx`` or ``torch.func``, for the transforms of the stack.
        twice: whether it is pulled back twice.
        before: what ran alike before, so that nobody watches: the ``"same"``, with a ``"leaf"`` or
            the ``"input"`` not differentiated, or with another ``"batch"``; or nothing.
    """

    source: str
    features: set[str]
    stack: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    randomness: str = "different"
    library: str = "functx"
    twice: bool = False
    before: str = ""

    def __str__(self) -> str:
        return (
            f"# transforms {self.stack} of {self.library}, innermost first; remat at "
            f"{self.places}; randomness={self.randomness!r}; twice={self.twice}; "
            f"before={self.before!r}\n{self.source}"
        )

    __repr__ = __str__
