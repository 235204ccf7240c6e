"""Claim: what a plan computes again is within 5 % of the least possible, where that is known.

Six blocks of each network can be nested in regions in 394 ways. All of them are measured, which
gives the least recompute for every budget; plans for budgets from the least possible peak to that
without regions are compared with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import functx
from bench._common import Column, Result, device_argument, environment
from bench._plan_models import NETWORKS
from bench.budget import peak_of
from functx import _costs, _tree
from functx._chain import all_trees, work_again

NAME = "budget_exact"
CLAIM = (
    "What plans compute again and the least of all 394 nestings of regions around six blocks, "
    "budgets from the least possible to no regions at all."
)

BLOCKS, BUDGETS, EXAMPLES = 6, 10, 2


def row_of(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    blocks, x = NETWORKS[name]()
    blocks = blocks[:BLOCKS]
    x = _tree.map_(lambda t: t[: max(len(t) // 4, EXAMPLES)], x)
    work, state = [], x
    with _costs.undisturbed(blocks):
        for block in blocks:
            work.append(_costs.work(block, state))
            state = block(state)
        known = [(peak_of(t, blocks, x), work_again(t, work)) for t in all_trees(0, BLOCKS)]
    least, most = min(p for p, _ in known), peak_of([*range(BLOCKS)], blocks, x)
    found, worst = 0, 1.0
    for i in range(BUDGETS):
        budget = least + (most - least) * i // (BUDGETS - 1)
        best = min(again for peak, again in known if peak <= budget)
        plan = functx.plan(blocks, x, budget=budget)
        assert plan.peak <= budget
        found += plan.again == best
        worst = max(worst, plan.again / best if best else (1.0 if not plan.again else math.inf))
    return {
        "network": name,
        "least": least,
        "most": most,
        "budgets": BUDGETS,
        "found": found,
        "worst": 100 * (worst - 1),
    }


def run(device: torch.device) -> Result:
    rows = [row_of(name) for name in NETWORKS]
    columns = [
        Column("network", "network"),
        Column("least", "least peak, MiB", ".3f", 2**20),
        Column("most", "without regions, MiB", ".3f", 2**20),
        Column("budgets", "budgets", ".0f"),
        Column("found", "least recompute found", ".0f"),
        Column("worst", "most above the least, %", ".1f"),
    ]
    return Result(NAME, CLAIM, columns, rows, [], environment(device))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
