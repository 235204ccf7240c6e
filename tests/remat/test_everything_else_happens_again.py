"""Rule 5, its one paragraph: Python's side effects happen once in each run of a region's code."""

import pytest
import torch
from cases import numbers
from references import assert_same

import functx

X = numbers(4)


@pytest.mark.parametrize("nested", [False, True])
def test_side_effects_happen_again_in_a_replay_and_only_there(capsys, nested):
    log, table, items = [], {}, iter(range(100))

    def f(x):
        log.append(x.detach().sum().item())
        table[len(table)] = next(items)
        print("run")
        return x.sin().exp()

    def runs():
        printed.append(capsys.readouterr().out.count("run"))
        assert len(log) == len(table) == sum(printed)
        return len(log)

    printed = []
    region = functx.remat((lambda x: functx.remat(f)(x.cos())) if nested else f)
    region(X)  # where nothing is differentiated, once
    with torch.no_grad():
        region(X.clone().requires_grad_())
    assert runs() == 2
    x = X.clone().requires_grad_()
    out = region(x).sum()
    assert runs() == 3
    y = X.cos() if nested else X
    expected = y.cos() * y.sin().exp() * (-X.sin() if nested else 1)
    for times in (1, 2):
        (found,) = torch.autograd.grad(out, x, retain_graph=True)
        # of a region in a region once more at most: a replay that reads no result leaves it out
        assert runs() in ((3 + times, 3 + 2 * times) if nested else (3 + times,))
        assert_same(found, expected, eps=8)
