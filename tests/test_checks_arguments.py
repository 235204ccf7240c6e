"""Arguments that are no tensors: a replay that is given others than the forward was is found."""

import functools
import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from programs import identity
from references import assert_same
from right import X, check
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


class Pair(NamedTuple):
    a: object
    b: object


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = float(by)
        return x * ctx.by

    @staticmethod
    def backward(ctx, g):
        return g * ctx.by, None


class Index:
    def __init__(self, at):
        self.at = at

    def __index__(self):
        return self.at


def single(x):
    return np.float32(x)


CASES = {
    "an array": (lambda x, a: x * torch.tensor(a), np.arange(4.0), np.ones(4)),
    "a scalar of numpy": (lambda x, a: x * a, single(2), single(3)),
    "a list of them": (lambda x, a: x * torch.tensor(a), [single(2)] * 4, [single(3)] * 4),
    "an index of numpy": (lambda x, a: x[a], np.int64(1), np.int64(2)),
    "an array of indices": (lambda x, a: x[a], np.array([0, 1]), np.array([1, 2])),
    "a mask": (lambda x, a: x[a], np.array([True, False] * 2), np.array([False, True] * 2)),
    "a range": (lambda x, a: x[a], range(2), range(1, 3)),
    "an ellipsis": (lambda x, a: x.view(2, 2)[a], (0, ...), (..., 0)),
    "a size": (lambda x, a: x[:, None].expand(a).sum(1), torch.Size((4, 2)), torch.Size((4, 3))),
    "a named tuple": (lambda x, a: torch.roll(x, a, (0, 0)), Pair(0, 1), Pair(1, 1)),
    "what has an index": (lambda x, a: x[a:], Index(1), Index(2)),
    "a layout": (
        lambda x, a: x.view(1, 2, 2, 1).contiguous(memory_format=a),
        torch.channels_last,
        torch.contiguous_format,
    ),
    "an argument of a Function": (lambda x, a: Doubled.apply(x, a), single(2), single(3)),
    "bytes": (lambda x, a: x * torch.tensor(a), bytearray(b"1234"), bytearray(b"4321")),
}


@pytest.mark.parametrize("case", CASES)
class TestChanged:
    def test_it_is_found(self, case):
        f, before, after = CASES[case]
        data = {"now": before}
        x = X.clone().requires_grad_()
        out = functx.remat(lambda x: f(x.sin(), data["now"]))(x)
        data["now"] = after
        with pytest.raises(functx.ReplayError, match="is called with"):
            out.sum().backward()

    def test_the_same_is_no_difference(self, case):
        f, given, _ = CASES[case]
        ways = ["backward"] if "Function" in case else ["backward", "grad"]
        check(lambda remat: remat(lambda x: f(x.sin(), given).exp()), ways=ways)


def test_an_array_written_in_place():
    data = np.arange(4.0)
    x = X.clone().requires_grad_()
    out = functx.remat(lambda x: x.sin() * torch.tensor(data))(x)
    data += 1
    with pytest.raises(functx.ReplayError, match="is called with"):
        out.sum().backward()


def test_tensors_in_a_named_tuple_are_inputs_too():
    """They get stand-ins like any other."""

    def program(remat):
        w = X.exp().requires_grad_()
        x = X.clone().requires_grad_()
        out = remat(lambda x: torch.stack(Pair(x.sin(), w * 2)).prod(0))(x)
        captured = remat(lambda x: torch.stack(Pair(x, w)).prod(0))(x)
        return torch.autograd.grad((out + captured).sum(), (x, w))

    assert_same(program(functx.remat), program(identity))


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.factors = (factor for factor in [2.0, 3.0])

    def forward(self, x):
        return x * next(self.factors)


ADVANCED = [2.0, 3.0, 4.0]
GLOBAL = itertools.count(2), None
TAKEN_FROM = (factor for factor in ADVANCED)


def all_of(iterator):
    def f(x):
        for factor in iterator:
            x = x * factor
        return x

    return f


def nested(f):
    return lambda x: f(x) * 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (all_of(factor for factor in ADVANCED), r"'iterator' \(generator\)"),
        (nested(all_of(map(float, (f for f in ADVANCED)))), r"'iterator' \(map\)"),
        (lambda x: x * next(GLOBAL[0]), r"'GLOBAL' \(count\)"),
        (lambda x, it=TAKEN_FROM: x * next(it), r"'it' \(generator\)"),
        (
            functools.partial(lambda it, x: x * next(it), (x for x in ADVANCED)),
            r"an argument \(gen",
        ),
        (Takes(), r"'Takes.factors' \(generator\)"),
    ],
)
def test_iterators_that_are_not_put_back_are_named(body, says):
    """A generator, and what is in a tuple: a replay would be given what comes next."""
    y = functx.remat(body)(torch.ones(3, requires_grad=True))
    with pytest.raises(functx.ReplayError, match=rf"reaches an iterator, {says}.*take from it out"):
        y.sum().backward()


def test_an_iterator_that_is_an_argument_is_named():
    factors = (factor for factor in ADVANCED)
    y = functx.remat(lambda x, it: x * next(it))(torch.ones(3, requires_grad=True), factors)
    with pytest.raises(functx.ReplayError, match=r"an argument \(generator\)"):
        y.sum().backward()


def test_where_there_is_no_iterator_none_is_named():
    flags = [2.0]
    y = functx.remat(lambda x: x * flags[0])(torch.ones(3, requires_grad=True))
    flags[0] = 3.0
    with pytest.raises(functx.ReplayError) as error:
        y.sum().backward()
    assert "reaches an iterator" not in str(error.value)


def test_an_iterator_that_has_ended_does_not_end_what_takes_backward_passes():
    """As a loop over ``map`` would, silently."""
    x, factors = torch.ones(3, requires_grad=True), (iter([2.0]), None)
    y = functx.remat(lambda x: x * next(factors[0]))(x)
    with pytest.raises(functx.ReplayError, match=r"has ended\. It reaches an iterator, 'factors'"):
        list(map(torch.Tensor.backward, [y.sum()]))


def test_other_errors_of_a_replay_are_what_they_are():
    runs, x = [], torch.ones(3, requires_grad=True)

    def body(x):
        runs.append(1)
        if len(runs) > 1:
            raise KeyError("mine") from OSError("cause")
        return x * 2

    for around in (lambda f: f, lambda f: functx.remat(lambda x: functx.remat(f)(x).sin())):
        runs.clear()
        y = functx.remat(around(body))(x)
        with pytest.raises(KeyError, match="mine") as caught:
            y.sum().backward()
        assert isinstance(caught.value.__cause__, OSError)
        assert any(
            "ran again for a derivative" in note and "changed since (a flag" in note
            for note in caught.value.__notes__
        )
