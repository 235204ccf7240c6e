"""`linearize`: torch's values and errors, one run of the function, regions' inputs kept only."""

import pytest
import torch
from cases import DTYPE, identity, numbers
from references import assert_same
from torch.utils import _pytree as pytree

import functx

X, Y = numbers(4), numbers(4, start=1.0)
Z = torch.complex(X, Y)

CASES = {
    "one": (torch.sin, (X,)),
    "two": (lambda x, y: {"a": x * y, "b": (x.sum(), torch.tensor(3), x > 0)}, (X, Y)),
    "a tree": (lambda d: d["a"] * d["b"][0].exp(), ({"a": X, "b": [Y]},)),
    "complex": (lambda z: z * z.conj() + z.exp(), (Z,)),
    "complex to real": (torch.abs, (Z,)),
    "real to complex": (lambda x: torch.complex(x, x.sin()), (X,)),
    "constant": (lambda x: torch.ones(2, dtype=DTYPE), (X,)),
    "no tensors": (lambda x: (x * 2, None, 3), (X,)),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("remat", [functx.remat, identity])
def test_values_and_tangents_are_those_of_torch(case, remat):
    f, primals = CASES[case]
    tangents = pytree.tree_map(lambda t: t.flip(0), primals)
    value, linear = functx.linearize(remat(f), *primals)
    expected, expected_linear = torch.func.linearize(f, *primals)
    assert_same(value, expected)
    for _ in range(2):
        assert_same(linear(*tangents), expected_linear(*tangents), eps=16)


def body(x):
    return torch.nn.functional.dropout(x.sin().exp(), 0.5) * x


class TestRegions:
    def test_it_runs_once_and_draws_once(self):
        runs = []

        def f(x):
            runs.append(1)
            return body(x)

        _, linear = functx.linearize(f, X)
        assert_same(linear(Y), linear(Y))
        assert len(runs) == 1

    @pytest.mark.parametrize("remat", [functx.remat, identity])
    def test_every_call_is_of_the_same_function(self, remat):
        value, linear = functx.linearize(remat(body), X)
        jacobian = functx.vmap(linear)(torch.eye(4, dtype=DTYPE))
        assert_same(jacobian.diagonal() == 0, value == 0)
        assert_same(jacobian @ Y, linear(Y), eps=8)

    @pytest.mark.parametrize("remat", [functx.remat, identity])
    def test_it_works_under_transforms(self, remat):
        f = remat(lambda x: x.sin())

        def derivative(x):
            return functx.linearize(f, x)[1](torch.ones_like(x))

        assert_same(functx.vmap(derivative)(X), X.cos(), eps=4)
        assert_same(functx.grad(lambda x: derivative(x).sum())(X), -X.sin(), eps=4)
        with torch.no_grad():
            assert_same(derivative(X), X.cos(), eps=4)


@pytest.mark.parametrize(
    ("tangents", "match"),
    [((X[:2],), "shape"), ((X.float(),), "dtype"), ((X, X), "structure"), ((), "structure")],
)
def test_tangents_that_do_not_fit_are_an_error(tangents, match):
    linear = functx.linearize(torch.sin, X)[1]
    with pytest.raises(RuntimeError, match=match):
        linear(*tangents)
