"""Rule 5, its one paragraph: Python's side effects happen once in each run of a region's code."""

import functools
import random

import pytest
import torch
from cases import numbers
from references import assert_same

import functx

X = numbers(4)


class Effects:
    """A function that does what it should not, but may."""

    def __init__(self, path):
        self.log, self.table, self.count, self.path = [], {}, 0, path
        self.items = iter(range(100))

    def __call__(self, x):
        self.log.append(x.detach().sum().item())
        self.table[len(self.table)] = "run"
        self.count += 1
        next(self.items)
        with open(self.path, "a") as file:
            file.write("run\n")
        print("run")
        random.random()
        return x.sin().exp()

    def runs(self, printed):
        file = self.path.read_text().splitlines()
        seen = [len(self.log), len(self.table), self.count, next(self.items), len(file)]
        return [*seen, printed.count("run\n")]


@pytest.mark.parametrize("nested", [False, True])
def test_side_effects_happen_again_in_a_replay_and_only_there(tmp_path, capsys, nested):
    effects = Effects(tmp_path / "log")
    f = functx.remat(effects)
    if nested:
        f = functx.remat(functools.partial(lambda g, x: g(x.cos()), f))
    x = X.clone().requires_grad_()
    out = f(x).sum()
    printed = capsys.readouterr().out
    assert printed.count("run\n") == effects.count == 1
    out.backward()
    printed += capsys.readouterr().out
    # of a region in a region once more at most: a replay that reads no result of it leaves it out
    assert effects.count in ((2, 3) if nested else (2,))
    assert set(effects.runs(printed)) == {effects.count}
    y = X.cos() if nested else X
    expected = y.cos() * y.sin().exp() * (-X.sin() if nested else 1)
    assert_same(x.grad, expected, eps=8)


def test_where_nothing_is_differentiated_they_happen_once(tmp_path, capsys):
    effects = Effects(tmp_path / "log")
    functx.remat(effects)(X)
    with torch.no_grad():
        functx.remat(effects)(X.clone().requires_grad_())
    functx.vmap(functx.remat(lambda x: x.sin()))(X)
    assert set(effects.runs(capsys.readouterr().out)) == {2}


def test_each_derivative_runs_it_again_and_is_right(tmp_path):
    effects = Effects(tmp_path / "log")
    x = X.clone().requires_grad_()
    out = functx.remat(effects)(x).sum()
    for times in (2, 3):
        (found,) = torch.autograd.grad(out, x, retain_graph=True)
        assert effects.count == times
        assert_same(found, X.cos() * X.sin().exp(), eps=8)
