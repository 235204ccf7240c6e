"""Random programs: remat at random places of random functions under random transforms.

A program is operations, views, writes to intermediates, random numbers, closures of several levels,
modules, custom Functions and hooks, with regions at random places, nested, called in several ways
with random static arguments, under a stack of up to three transforms. It runs with remat and
without: values are the same bit by bit, gradients up to the order of sums. ``sigmoid`` ends each
region and is nowhere else, so that its count says whether regions were recomputed.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

import functx

from .census import Census
from .found import FOUND
from .mechanisms import MECHANISMS
from .runner import Difference, compare, plain, reference, run
from .writer import Program, Writer

pytestmark = pytest.mark.usefixtures("no_hooks")


@st.composite
def programs(draw) -> Program:
    """Programs, the simplest first."""
    return Writer(lambda n: draw(st.integers(0, n - 1))).program()


def check(program: Program, census: Census) -> None:
    """One program, with and without remat."""
    try:
        expected = reference(program)
    except Exception:  # torch refuses the program itself
        census.refused += 1
        return
    note(str(program))
    try:
        ours = run(program, functx.remat)
    except Exception as error:
        raise Difference(f"raises {type(error).__name__}: {error}") from error
    compare(program, ours, expected)
    census.add(program, ours, expected)


def sweep(n: int, number: int, *, shrink: bool = True) -> Census:
    """``n`` programs, the same at each call with the same ``number``."""
    census = Census()

    @seed(number)
    @settings(
        max_examples=n,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(programs())
    def each(program: Program) -> None:
        check(program, census)

    each()
    return census


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_before(name):
    program = FOUND[name]
    compare(program, run(program, functx.remat), reference(program))


@pytest.mark.filterwarnings("ignore")
def test_a_few_hundred_programs():
    sweep(300, 0).check()


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(1, 11))
def test_ten_thousand_programs(number):
    sweep(1000, number).check()


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_is_needed(name, monkeypatch):
    """Without it, one of a thousand programs differs."""
    MECHANISMS[name](monkeypatch)
    with pytest.raises(Difference):
        sweep(1000, 0, shrink=False)


@pytest.mark.parametrize("name", ["captures", "recomputing"])
def test_some_mechanisms_are_needed(name, monkeypatch):
    MECHANISMS[name](monkeypatch)
    with pytest.raises(Difference):
        sweep(200, 0, shrink=False)


def test_numbers_of_a_program_are_those_of_its_source():
    """The seed decides: a printed program can be run again by itself."""
    found = []

    @seed(5)
    @settings(max_examples=8, database=None, deadline=None)
    @given(programs())
    def each(program: Program) -> None:
        found.append(program)

    each()
    for program in found:
        try:
            first = run(program, plain)
        except RuntimeError:  # torch refuses it
            continue
        for a, b in zip(first.gradients, run(program, plain).gradients, strict=True):
            assert torch.equal(a, b)
