"""Modules that are spread over processes: functx is right, or refuses before anything is wrong.

The kind: hooks of torch.distributed put parameters into a module, communicate, or redistribute
gradients around its forward. Code that replaces those parameters, traces the hooks, or
differentiates their backward is silently wrong in torch, leaves a dead model, or ends the process.
Each case checks what stays right too, and that the module computes and trains as before after each
refusal, with the same objects in its slots. The cases are in ``sharded.py``.
"""

import pytest
import torch

import functx

from .test_distributed import on_processes

CASES = [
    *("derivatives_by_parameters_of_fsdp", "derivatives_by_some_parameters_of_any_sharding"),
    *("parameters_that_fsdp_ignores", "forward_mode_by_parameters", "functional_call"),
    *("by_inputs", "a_pullback_called_twice", "functions_of_dtensors", "reverse_over_reverse"),
    *("traces_and_plans", "jit_inside_fsdp", "fsdp1", "ddp_by_parameters"),
    *("private_names_of_torch", "second_derivatives_of_split_modules"),
    "split_modules_under_transforms",
]
needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo"
)


@pytest.fixture(scope="module")
def found():
    return on_processes(2, CASES, "sharded.py")


@needs_gloo
@pytest.mark.parametrize("case", CASES)
def test_a_sharded_module_is_right_or_refused_and_stays_alive(found, case):
    for results in found:
        assert results[case] is True, results[case]


def test_a_process_without_a_process_group_has_no_hooks_on_its_modules():
    has_hooks = torch.nn.modules.module._has_any_global_hook
    seen = []

    def f(x):
        seen.append(bool(has_hooks()))
        return x.sum()

    functx.vmap(functx.grad(f))(torch.ones(2, 3))
    functx.jvp(f, (torch.ones(2),), (torch.ones(2),))
    functx.jacfwd(f)(torch.ones(2))
    assert seen == [False] * 3
