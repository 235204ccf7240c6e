"""remat in DDP, FSDP2 and tensor parallelism, on two processes of this machine; four in sweeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import distributed_cases
import distributed_variants
import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo"
)


def on_processes(number, script):
    """What each of some processes finds, case by case."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(number), str(Path(script).absolute())),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, run.stdout + run.stderr
    everyone = json.loads(lines[0].removeprefix("FOUND "))
    assert len(everyone) == number
    return everyone


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.sweep)])
def found(request):
    return on_processes(request.param, distributed_cases.__file__)


@pytest.mark.sweep
@pytest.mark.parametrize("processes", [2, 4])
def test_variants(processes):
    for results in on_processes(processes, distributed_variants.__file__):
        assert results == dict.fromkeys(distributed_variants.CASES, True)


@pytest.mark.parametrize("case", distributed_cases.CASES)
def test_right_on_every_process(found, case):
    for results in found:
        result = results[case]
        if isinstance(result, dict):
            assert all(result.values()), result
        else:
            right = result[0] if isinstance(result, list) else result
            assert right is True, result


FSDP = [name for name in distributed_cases.CASES if name.startswith("fsdp_")]
COUNTED = [name for name in FSDP if name not in ("fsdp_saves_memory", "fsdp_per_example")]


@pytest.mark.parametrize("case", COUNTED)
def test_collectives_of_fsdp_are_those_without_remat(found, case):
    for results in found:
        assert results[case][1] == {"_allgather_base_": 6, "_reduce_scatter_base_": 3}


@pytest.mark.parametrize("case", ["tensor_parallel_apply", "tensor_parallel_apply_before"])
def test_collectives_of_tensor_parallelism_run_again_in_replays(found, case):
    for results in found:
        forward = distributed_cases.LAYERS
        assert results["tensor_parallel_as_it_is"] == {"all_reduce": 2 * forward - 1}
        assert results[case][1] == {"all_reduce": 2 * forward - 1 + forward}
