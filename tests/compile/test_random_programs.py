"""Random programs, with the world changing between calls, give what they give in eager."""

import random

import pytest

from tools.fuzz_jit import judged, written

SEEDS = [*range(24), 473, 570, 1205, 1483, 1550, 1659, 3146, 3939]  # the last ones were found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_is_right_or_refused(seed):
    source = written(random.Random(seed))
    outcome, said = judged(source)
    assert outcome in ("compiled", "in eager", "refused", "fails in both"), f"{said}\n{source}"


def test_a_difference_is_found():
    source = "k = [1.0]\njitted = jit(lambda x: x * k[0])\nk = [2.0]\ncall(jitted, values(4, 3))\n"
    assert judged(source)[0] == "compiled"
    hidden = "import math\nmath.k = 1.0\njitted = jit(lambda x: x * math.k)\n"
    hidden += "call(jitted, values(4, 3))\nmath.k = 2.0\ncall(jitted, values(4, 3))\ndel math.k\n"
    assert judged(hidden)[0] == "silent"  # a constant by J3
