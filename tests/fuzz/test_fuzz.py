"""Random programs: remat at random places of random functions under random transforms.

A program is operations, views, writes to intermediates, random numbers, closures of several levels,
modules, custom Functions and hooks, with regions at random places, nested, called in several ways
with random static arguments and policies, under a stack of up to three transforms. It runs with
remat and without: values are the same bit by bit, gradients up to the order of sums. ``sigmoid``
ends each region and is nowhere else, so that its count says whether regions were recomputed.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

import functx
from functx._remat import _contents

from . import sweep
from .census import NAMES, Census
from .mechanisms import MECHANISMS
from .program import Program
from .runner import Difference, check, plain, reference, run
from .shrink import smallest
from .sweep import one
from .writer import Writer, numbered

pytestmark = pytest.mark.usefixtures("no_hooks")


@st.composite
def programs(draw) -> Program:
    """Programs, the simplest first."""
    return Writer(lambda n: draw(st.integers(0, n - 1)), more=True).program()


def search(n: int, number: int, *, shrink: bool = True) -> Census:
    """``n`` programs, the same at each call with the same ``number``; a difference is shrunk."""
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
        note(str(program))
        one(program, "", census)

    with sweep.quick_collections():
        each()
    return census


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", sweep.KEPT)
def test_what_was_found_before(name):
    program = sweep.KEPT[name]
    check(program, reference(program))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("number", [4974, 6781])
def test_what_the_latest_sweep_found(number, threads, monkeypatch):
    """A list had an entry more: what a replay put there was taken for another thread's."""
    monkeypatch.setattr(_contents.threading, "active_count", lambda: threads)
    program = numbered(number)
    check(program, reference(program))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [69, 371, 549, 5155])
def test_what_was_found_on_the_way(number):
    """They raised, when what hooks and backwards call came to be compared. All are right."""
    program = numbered(number)
    check(program, reference(program))


@pytest.mark.filterwarnings("ignore")
def test_a_few_hundred_programs():
    census = search(200, 0)
    print(census)
    assert census.again > census.forward / 2  # policies keep much, and programs are small
    assert sum(census.features[name] > 0 for name in NAMES) > 0.9 * len(NAMES)


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, sweep.PROGRAMS, sweep.SLICE))
def test_ten_thousand_programs(first):
    """Each slice by itself; whatever ends last looks at the whole."""
    failures = sweep.slice_of_sweep(first, first + sweep.SLICE).failures
    whole = sweep.put_together()
    if whole is not None:
        whole.check()
    assert not failures


@pytest.mark.sweep
@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_is_needed(name):
    """Without it, one of a thousand programs does otherwise, or one that is kept."""
    number = sweep.notices(name)
    sweep.put_together()
    assert number is not None


def test_each_mechanism_is_there():
    """Under the names that it is taken out by, and is there again afterwards."""
    for mutation in MECHANISMS.values():
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["captures", "recomputing"])
def test_some_mechanisms_are_needed(name, monkeypatch):
    MECHANISMS[name](monkeypatch)
    with pytest.raises(Difference):
        search(100, 0, shrink=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [0, 71])
def test_a_mechanism_without_which_replays_begin_again(number):
    """Values are right, so only the number of operations tells; where it does nothing, none."""
    program = numbered(number)
    expected = reference(program)
    usual = check(program, expected).operations
    assert usual > expected.operations
    does = sweep.does_without("inner replays", program, expected, usual)
    assert (does or "").startswith("runs ") == (number == 71)


@pytest.mark.filterwarnings("ignore")
def test_what_is_left_of_a_program(monkeypatch):
    """The smallest program that a broken remat fails, which is what a failure prints."""
    monkeypatch.setattr(functx, "remat", lambda f, **options: f)

    def fails(program):
        try:
            one(program, "", Census())
        except Difference as difference:
            return "nothing was recomputed" in str(difference)
        return False

    number = next(n for n in range(100) if fails(numbered(n)))
    program = smallest(number, fails, tries=200)
    assert fails(program)
    assert len(program.source) < len(numbered(number).source) / 2


def test_a_slice_is_written_down_and_reported(tmp_path, monkeypatch):
    """As it was read, and once: a sweep that was stopped goes on where it was."""
    monkeypatch.setattr(sweep, "results", lambda: tmp_path)
    census = sweep.slice_of_sweep(0, 5)
    assert census.programs + census.refused + census.refusals.total() == 5
    monkeypatch.setattr(sweep, "run_slice", lambda *_: pytest.fail("it is there"))
    assert sweep.slice_of_sweep(0, 5) == census
    assert sweep.put_together() is None  # the other slices are missing
    census.failures["7"] = "gradient 0 is off"
    text = sweep.report(census, dict.fromkeys(MECHANISMS, 3))
    assert "| 7 | gradient 0 is off |" in text
    assert all(f"| {name} |" in text for name in (*NAMES, *MECHANISMS))


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
