"""Values, first and second derivatives where formulas change: a selection here, all in sweeps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.scipy import special

from tools.derivatives import by_hand, complex_cases, database_cases, from_jax, to_jax
from tools.derivatives.causes import CAUSES, NOT_SWEPT, OF_JAX
from tools.derivatives.judge import TORCH, judge

# Each of these was wrong, or had no derivative, where torch has one. Here is one of each kind; the
# sweep has all.
BY_HAND = """
smooth_l1_loss, beta 1.0; binary_cross_entropy; logistic regression; multi_margin_loss, by hand
linalg: pinv; linalg: pinv of a wide matrix, with a tolerance; linalg: det; linalg: info of inv
choices: median; choices: nanmedian; choices: clamp at one bound; choices: segment_reduce of prod
choices: scatter_reduce of amax, include_self=True; choices: segment_reduce of max
choices: distances of order inf among; elu, alpha 2; softplus, beta 2
grid_sample, bilinear, border, align_corners=True
"""
OF_THE_DATABASE = "copysign hypot i0 histc sinc special.bessel_j1 xlogy"
OF_COMPLEX_NUMBERS = "acosh bool logaddexp logcumsumexp pow var"


@pytest.fixture(autouse=True)
def _in_64_bits():
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def selection():
    wanted = [name.strip() for name in BY_HAND.replace("\n", ";").split(";") if name.strip()]
    found = {case.name: case for case in by_hand.cases()}
    of_entries = {case.name: case for case in database_cases.cases(OF_THE_DATABASE.split())}
    of_entries |= {c.name: c for c in complex_cases.of_the_database(OF_COMPLEX_NUMBERS.split())}
    return {name: found[name] for name in wanted} | of_entries


SELECTION = selection()


@pytest.mark.parametrize("name", SELECTION)
def test_derivatives_are_torch_s_or_torch_differs_from_its_own_values(name):
    judged = judge(SELECTION[name])
    assert judged.points
    assert [v for v in judged.verdicts if v.outcome != TORCH and "torch nan" not in v.detail] == []


def along(f, modes):
    """Derivatives in turn, each in forward or reverse mode, along three directions."""
    for n, mode in enumerate(modes):
        v = jnp.asarray(np.random.default_rng(n).normal(size=(4, 4)))
        g = f
        if mode == "F":
            f = lambda x, g=g, v=v: jax.jvp(g, (x,), (v,))[1]
        else:
            f = lambda x, g=g, v=v: (jax.grad(g)(x) * v).sum()
    return f


@pytest.mark.parametrize(
    "modes", ["FF", "RRR", *(pytest.param(m, marks=pytest.mark.sweep) for m in ("RR", "FRF"))]
)
def test_derivatives_of_a_determinant_are_those_of_a_polynomial_or_nan(modes):
    def polynomial(a):  # by minors of the first two rows
        pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
        minor = lambda r, c: a[r, c[0]] * a[r + 1, c[1]] - a[r, c[1]] * a[r + 1, c[0]]
        signs = (1, -1, 1, 1, -1, 1)
        return sum(s * minor(0, p) * minor(2, q) for s, p, q in zip(signs, pairs, pairs[::-1]))

    drawn = np.random.default_rng(9).normal(size=(4, 4))
    rank = lambda n: jnp.asarray(drawn[:, :n] @ drawn[:n])
    found = jax.jit(along(to_jax.to_jax(torch.linalg.det), modes))
    for a in (jnp.asarray(drawn), jnp.eye(4), rank(3), rank(2)):
        if len(modes) == 3 and jnp.linalg.matrix_rank(a) == 2:
            assert np.isnan(found(a))
        else:
            np.testing.assert_allclose(found(a), along(polynomial, modes)(a), rtol=1e-8)


def tables():
    return (json.loads(module.TABLE.read_text()) for module in (to_jax, from_jax))


def test_the_table_is_of_the_present_rules_and_functions_and_the_page_of_the_table():
    of, other = tables()
    swept = of["rules"].keys()
    assert swept | NOT_SWEPT.keys() | to_jax.drawing_rules() == to_jax.rule_names().keys()
    assert not swept & NOT_SWEPT.keys()
    names = {to_jax.base(case.name) for case in by_hand.cases()}
    assert names <= of["cases"].keys()
    assert to_jax.PAGE.read_text() == to_jax.page(of, other)
    assert other["functions"].keys() == {name for name, *_ in from_jax.cases()}


def test_every_difference_has_a_cause_and_every_cause_a_difference():
    of, other = tables()
    assert {name for name, case in of["cases"].items() if case["verdicts"]} == CAUSES.keys()
    differ = {name for name, case in other["functions"].items() if case["differ"]}
    assert differ == from_jax.CAUSES.keys()
    assert all("need a key" in why or "depends on data" in why or "no rule" in why
               for why in of["refused"].values())  # fmt: skip


def test_what_jax_itself_gets_wrong_it_still_does():
    """Where it no longer does, `to_jax` can use JAX's function again."""
    second = lambda f: jax.grad(jax.grad(f))
    one = jnp.ones(())
    products = lambda f, a: jax.grad(lambda a: (jax.grad(f)(a) * a).sum())(a)
    ratio = lambda x, y: jax.jvp(jax.grad(jnp.hypot), (x, y), (one, -one))[1]
    found = {
        "jax.scipy.special.i0": jax.grad(special.i0)(0.0) != 0,
        "jax.scipy.special.i1": second(special.i1)(0.0) != 0,
        "jnp.hypot": ratio(one, one) == 0,
        "jnp.sinc": jax.grad(jnp.sinc)(1e-300) == -jnp.inf,
        "jnp.linalg.det": np.isnan(products(jnp.linalg.det, jnp.ones((4, 4)))).any(),
        "jax.scipy.special.gammainc": np.isnan(special.gammainc(0.0, 0.5)),
    }
    assert {name for name, wrong in found.items() if wrong} == {
        name for name, (_, rule) in OF_JAX.items() if rule
    }


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(to_jax.PARTS))
def test_all_derivatives_agree_or_differ_for_a_known_cause(part):
    assert to_jax.without_a_cause(to_jax.run_part(part)) == []


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_derivatives_of_jax_functions_are_jax_s_own():
    found = from_jax.sweep()
    from_jax.TABLE.write_text(json.dumps(found, indent=1) + "\n")
    assert {n for n, c in found["functions"].items() if c["differ"]} == from_jax.CAUSES.keys()
