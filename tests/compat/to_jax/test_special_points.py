"""Values, first and second derivatives where formulas change: a selection here, all in sweeps."""

import jax
import pytest

from tools.derivatives import by_hand, database_cases
from tools.derivatives.judge import TORCH, judge

# Each of these was wrong, or had no derivative, where torch has one.
BY_HAND = """
smooth_l1_loss, beta 1.0; huber_loss, delta 0.5; binary_cross_entropy; focal loss; DPO
logistic regression; multilabel_soft_margin_loss, by hand; multi_margin_loss, by hand
linalg: pinv; linalg: hermitian pinv; linalg: pinv of a wide matrix, with a tolerance
linalg: det; linalg: info of inv; choices: median; choices: nanmedian; choices: clamp at one bound
choices: scatter_reduce of prod, include_self=False; choices: segment_reduce of prod
choices: scatter_reduce of amax, include_self=True; choices: segment_reduce of max
choices: distances of order inf among; elu, alpha 2; celu, alpha 0.5; softplus, beta 2
grid_sample, bilinear, border, align_corners=True; grid_sample of a volume, reflection
"""
OF_THE_DATABASE = "copysign hypot i0 histc sinc special.bessel_j1 special.i1 special.xlog1py xlogy"


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
    return {name: found[name] for name in wanted} | of_entries


SELECTION = selection()


@pytest.mark.parametrize("name", SELECTION)
def test_derivatives_are_torch_s_or_torch_differs_from_its_own_values(name):
    judged = judge(SELECTION[name])
    assert judged.points
    assert [v for v in judged.verdicts if v.outcome != TORCH and "torch nan" not in v.detail] == []
