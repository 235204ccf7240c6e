"""The smallest program near one that fails: fewer and lower choices, as long as it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .program import Program
from .writer import from_choices, recorded


def smallest(number: int, fails: Callable[[Program], bool], tries: int = 1500) -> Program:
    """What is left of a numbered program when everything is gone that it fails without.

    Args:
        number: of a program that fails.
        fails: whether another one fails, in the same way.
        tries: how many programs to run at most.
    """
    best, seen = recorded(number), set()
    improved = True
    while improved:
        improved = False
        for candidate in _simpler(best):
            program = from_choices(candidate)
            if str(program) in seen:
                continue
            seen.add(str(program))
            if len(seen) > tries:
                return from_choices(best)
            if _size(candidate) < _size(best) and fails(program):
                best, improved = candidate, True
                break
    return from_choices(best)


def _size(choices: list[int]) -> tuple[int, int, list[int]]:
    program = from_choices(choices)
    return len(str(program)) + 40 * len(program.stack), len(choices), choices


def _simpler(choices: list[int]) -> Iterator[list[int]]:
    """Shorter ones first, large steps first."""
    length = 32
    while length:
        for start in range(0, len(choices), length):
            yield choices[:start] + choices[start + length :]
        for start in range(0, len(choices), length):
            if any(choices[start : start + length]):
                block = [0] * len(choices[start : start + length])
                yield choices[:start] + block + choices[start + length :]
        length //= 2
    for i, choice in enumerate(choices):
        for lower in {choice // 2, choice - 1} - {choice}:
            if lower > 0:
                yield [*choices[:i], lower, *choices[i + 1 :]]
