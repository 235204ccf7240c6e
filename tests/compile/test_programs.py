"""Each small program gives under `functx.jit` what it gives in eager, or says why not (J1)."""

import functools
import importlib
import random
import warnings

import pytest
import torch

import functx
from functx._core import compiler_warnings

KINDS = (
    "hooks",
    "state",
    "effects",
    "surroundings",
    "everyday",
    "corners",
    "projects",
    "habits",
    "traps",
    "models",
    "places",
    "pullbacks",
)


def programs():
    for kind in KINDS:
        module = importlib.import_module(f"{__package__}.programs.{kind}")
        for program in module.PROGRAMS:
            yield pytest.param(program, id=f"{kind}-{program.run.__name__}")


def seen(x):
    """What can be seen of a result; floats as in float64 to nine digits."""
    if isinstance(x, torch.Tensor):
        numbers = x.detach().resolve_conj().resolve_neg().reshape(-1).tolist()
        return x.dtype, tuple(x.shape), x.requires_grad, seen(numbers)
    if isinstance(x, (list, tuple)):
        return [seen(part) for part in x]
    if isinstance(x, dict):
        return {key: seen(part) for key, part in x.items()}
    return repr(round(x, 9)) if isinstance(x, float) else x


def run(program, jit):
    torch.manual_seed(0)
    random.seed(0)
    try:
        return seen(program.run(lambda f=None, **options: jit if f is None else jit(f, **options)))
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [*programs()])
def test_a_program_gives_what_it_gives_in_eager_or_says_why_not(program, monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    expected = run(program, lambda f, **_: f)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(program, functools.partial(functx.jit, backend=lambda module, _: module))
    said = [str(w.message) for w in caught if "runs in eager" in str(w.message)]
    if program.outcome == "refused":
        assert isinstance(found, functx.TracingError), found
        assert program.words in str(found)
    elif isinstance(expected, Exception):
        assert type(found) is type(expected) is RuntimeError, found
    else:
        assert found == expected
        assert bool(said) == (program.outcome == "in eager"), said
        assert all(program.words in text for text in said)
