"""A clipped sum over data-parallel ranks is that of one process, by one all-reduce."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from references import assert_same

from functx import per_sample

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.sweep), 4])
def test_ranks_together_compute_the_sum_of_one_process(ranks, tmp_path):
    from ranks_per_sample import loss, problem

    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(HERE / "ranks_per_sample.py"), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    # Not the exit code: gloo may abort when processes leave, after all of them have answered.
    answers = [tmp_path / f"{rank}.pt" for rank in range(ranks)]
    assert all(answer.exists() for answer in answers), run.stderr[-3000:]
    found = [torch.load(answer) for answer in answers]

    params, x = problem()
    total, extras = per_sample.clipped_sum(loss, max_norm=0.5, return_norms=True)(params, x)
    for one in found:
        assert_same(one["total"], total, eps=64)
        assert_same(one["total"], found[0]["total"])  # every rank has the same bits
        assert one["reduced"] == [30 + 20 + 3, 30 + 20]  # one all-reduce, also of two dtypes
    assert_same(torch.cat([one["norms"] for one in found]), extras.norms, eps=8)
    assert (extras.norms > 0.5).any()
    same = {"w": params["w"], "v": params["v"].double()}
    expected = per_sample.clipped_sum(loss, max_norm=0.5)(same, x)
    assert_same(found[0]["alike"], expected, eps=64)
