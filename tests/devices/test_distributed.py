"""remat in DDP, FSDP2 and tensor parallelism, on two processes of this machine; four in sweeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo"
)
RIGHT = [
    "ddp_applied_after", "fsdp_apply_before", "fsdp_apply_after", "fsdp_remat_modules",
    "fsdp_per_example", "clipped_sum_of_split_layers", "clipped_sum_needs_whole_parameters",
    "clipped_sum_over_ranks", "tensor_parallel_apply", "collectives_inside",
]  # fmt: skip


def on_processes(number, cases, script="processes.py"):
    """What each of some processes finds, case by case."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(number), str(Path(__file__).with_name(script)), *cases),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, run.stdout + run.stderr
    everyone = json.loads(lines[0].removeprefix("FOUND "))
    assert len(everyone) == number
    return everyone


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.sweep)])
def found(request):
    # Starts two processes that import torch, once for all tests.
    return on_processes(request.param, [*RIGHT, "tensor_parallel_as_it_is"])


@pytest.mark.parametrize("case", RIGHT)
def test_gradients_and_errors_are_right_on_every_process(found, case):
    for results in found:
        right = results[case][0] if isinstance(results[case], list) else results[case]
        assert right is True, right


@pytest.mark.parametrize("way", ["apply_before", "apply_after", "remat_modules"])
def test_collectives_of_fsdp_are_those_without_remat(found, way):
    for results in found:
        counts = results[f"fsdp_{way}"][1]
        assert counts == {"_allgather_base_": 6, "_reduce_scatter_base_": 3}


def test_collectives_of_tensor_parallelism_run_again_in_replays(found):
    for results in found:
        assert results["tensor_parallel_as_it_is"] == {"all_reduce": 5}
        assert results["tensor_parallel_apply"][1] == {"all_reduce": 5 + 3}  # one a layer
