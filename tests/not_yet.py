"""What functx does not do yet, test by test: each raises (or is named in the README's limits).

The tests are written and run; they are expected to fail, strictly, so that one that begins to pass
has to leave this list.
"""

_DUAL = "raises RematError: forward over reverse by forward_ad.dual_level; functx.jvp does it"
_VALUES = "determinism_check='values' raises ValueError: it is not there yet"
_DEBUG = "debug=True raises NotImplementedError: it is not there yet"

NOT_YET = {
    "test_never_a_constant[from_an_inner_region-backward]": (
        "raises ReplayError, which names the operation but not yet its file and line"
    ),
    "test_the_fast_path_is_taken_where_it_is_without_remat[False]": (
        "equal to rounding, not bitwise: the fast path asks whether a torch-function mode is active"
    ),
    "TestParameters::test_parametrizations[True]": (
        "raises ReplayError: a parametrization cached around the forward alone runs in the replay"
    ),
    "TestValues::test_finds_other_numbers": _VALUES,
    "TestValues::test_finds_other_random_numbers": _VALUES,
    "TestValues::test_is_content_with_the_same_numbers": _VALUES,
    "TestValues::test_is_content_under_transforms": _VALUES,
    "TestValues::test_runs_everything_again": _VALUES,
    "TestMessages::test_debug_shows_both_sequences_with_source_lines": _DEBUG,
    "TestMessages::test_without_debug_the_way_to_it_is_named": _DEBUG,
    "TestModes::test_pushed_by_the_user[backward-DoublesBelow]": (
        "a dispatch mode entered around the backward alone acts on the replay too: it can't be "
        "told from one that counts operations, which has to see them"
    ),
    "TestChecks::test_gradgradcheck": _DUAL,
    "TestOtherWays::test_dual_level": _DUAL,
    "TestAutogradFunctional::test_hessian[forward-mode]": (
        "raises: torch's older vmap, which vectorize=True uses, can't unpack dual tensors"
    ),
    "TestOtherWays::test_is_grads_batched": (
        "raises: a second derivative through torch's older vmap, which is_grads_batched uses"
    ),
    "TestOtherWays::test_outer_saved_tensors_hooks[False-own]": (
        "raises ReplayError: hooks that replace saved tensors change what the replay runs"
    ),
    "TestLinearize::test_keeps_boundaries_only": (
        "torch's linearize traces its function, and regions in a trace are inlined"
    ),
    "TestCaches::test_written_by_one_region_and_read_by_another": (
        "raises ReplayError: a constant that one region reads is written by the next"
    ),
}
