"""Random programs do with regions what they do without; and what would be wrong is noticed."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils import _pytree as pytree

import functx
from tools.fuzz.judge import FAILURES, judge, warm
from tools.fuzz.run import sweep
from tools.fuzz.templates import GROUPS
from tools.fuzz.writer import write

SLICE, SEEDS, FEW = 25, range(50), range(24)


@pytest.fixture(scope="module", autouse=True)
def _warm():
    warm()


# 25 programs each, some of which torch takes long to trace.
@pytest.mark.parametrize("first", SEEDS[::SLICE])
def test_regions_change_nothing(first):
    verdicts = {seed: judge(write(seed)) for seed in range(first, first + SLICE)}
    failed = {n: v for n, v in verdicts.items() if v.outcome in FAILURES}
    texts = [f"{n}: {v.outcome}: {v.why}\n{write(n)}\n{v.trace}" for n, v in failed.items()]
    assert not failed, "\n\n".join(texts)


def test_each_feature_is_in_three_programs_of_a_hundred():
    counts = Counter(feature for seed in range(2000) for feature in write(seed).features)
    assert set(GROUPS) <= set(counts)
    assert not {feature for feature, count in counts.items() if count < 0.03 * 2000}


def _changed(change):
    """A ``remat`` that lets this function have what a region returns."""
    return lambda f, **_: lambda *args, **kwargs: change(f(*args, **kwargs))


def _twice(f, **_):
    return lambda *args, **kwargs: (f(*args, **kwargs), f(*args, **kwargs))[1]


def _off(t):
    return t * (1 + 1e-7) if t.is_floating_point() else t


def _refused(out):
    raise functx.RematError("on purpose")


_kept = []
WRONG = {
    "run twice": (_twice, "wrong"),
    "slightly off": (_changed(partial(pytree.tree_map_only, torch.Tensor, _off)), "wrong"),
    "a constant": (_changed(partial(pytree.tree_map_only, torch.Tensor, torch.detach)), "wrong"),
    "tensors kept": (_changed(lambda out: _kept.append(out) or out), "leaked"),
    "grad mode off": (_changed(lambda out: (out, torch.set_grad_enabled(False))[0]), "leaked"),
    "an exception": (_changed(lambda out: 1 / 0), "crashed"),
    "a refusal": (_changed(_refused), "refused wrongly"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_remat_that_is_wrong_is_noticed(name):
    remat, outcome = WRONG[name]
    outcomes = Counter(judge(write(seed), remat).outcome for seed in FEW)
    _kept.clear()
    assert outcomes[outcome] >= 3, outcomes


@pytest.mark.parametrize("feature", ["default generator", "torch.Generator", "counter", "own norm"])
def test_what_advances_twice_is_noticed(feature):
    seeds = [n for n in range(400) if feature in write(n).features and not write(n).stack]
    assert any(judge(write(n), _twice).outcome == "wrong" for n in seeds)


@pytest.mark.sweep
def test_ten_thousand_programs():
    found, _ = sweep(range(10_000), 1)
    assert len(found) == 10_000
    failed = {seed: verdict for seed, verdict in found.items() if verdict.outcome in FAILURES}
    assert not failed
