"""What functx does not do yet, test by test: each raises (or is named in the README's limits).

The tests are written and run; they are expected to fail, strictly, so that one that begins to pass
has to leave this list.
"""

_DUAL = "raises RematError: forward over reverse by forward_ad.dual_level; functx.jvp does it"

NOT_YET = {
    "test_the_fast_path_is_taken_where_it_is_without_remat[False]": (
        "equal to rounding, not bitwise: the fast path asks whether a torch-function mode is active"
    ),
    "TestParameters::test_parametrizations[True]": (
        "raises ReplayError: a parametrization cached around the forward alone runs in the replay"
    ),
    "TestModes::test_pushed_by_the_user[backward-DoublesBelow]": (
        "a dispatch mode entered around the backward alone acts on the replay too: it can't be "
        "told from one that counts operations, which has to see them"
    ),
    "TestChecks::test_gradgradcheck": _DUAL,
    "TestOtherWays::test_dual_level": _DUAL,
    "TestAutogradFunctional::test_hessian[forward-mode]": (
        "raises: torch's older vmap, which vectorize=True uses, can't unpack dual tensors"
    ),
    "TestLinearize::test_keeps_boundaries_only": (
        "torch's linearize traces its function, and regions in a trace are inlined"
    ),
    "TestCaches::test_written_by_one_region_and_read_by_another": (
        "raises ReplayError: a constant that one region reads is written by the next"
    ),
}
