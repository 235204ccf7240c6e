"""Claim: under a budget, less is computed again than in uniform segments of the same peak.

Each network is cut into uniform segments, as ``checkpoint_sequential`` cuts. The peak of that is
the budget of two plans: of the blocks, and of the operations of the network as one function.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import functx
from bench._common import Column, Result, device_argument, environment
from bench._plan_models import NETWORKS
from functx._budget import block_costs
from functx._budget.solver import work_again
from functx._core import tree as _tree
from functx._loops import binomial

NAME = "budget"
CLAIM = (
    "What a plan computes again, in FLOPs and in forward passes, and what uniform segments do, "
    "whose measured peak is its budget."
)
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "budget.png"

SEGMENTS = (2, 3, 4, 6, 8, 12)


class Network(nn.Module):
    """A chain as one function."""

    def __init__(self, blocks: list[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        """One block after another."""
        for block in self.blocks:
            x = block(x)
        return x


def peak_of(tree: Any, blocks: Any, x: Any) -> int:
    wanted = [True] * len(_tree.leaves(x))
    return block_costs.peak_of(lambda x: block_costs.walk(tree, blocks, x), x, wanted)


def rows_of(name: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    blocks, x = NETWORKS[name]()
    n, state, work = len(blocks), x, []
    for block in blocks:
        work.append(functx.plan([block], state, budget=1.0).work)
        state = block(state)
    plain = peak_of(list(range(n)), blocks, x)
    rows = []
    network = Network(blocks)
    for segments in (k for k in SEGMENTS if k <= n):
        cuts = binomial.segments(n, segments)
        tree = [*(list(range(*cut)) for cut in cuts[:-1]), *range(*cuts[-1])]
        peak = peak_of(tree, blocks, x)
        plan = functx.plan(blocks, x, budget=peak)
        fine = functx.plan(network, x, budget=peak)
        took = peak_of(plan.tree, blocks, x)  # measured once more
        assert max(took, plan.peak, fine.peak) <= peak
        rows.append(
            {
                "network": name,
                "blocks": n,
                "segments": segments,
                "peak": peak,
                "share": peak / plain,
                "took": took,
                "again": plan.again,
                "uniform": work_again(tree, work) / sum(work),
                "plan": plan.again / sum(work),
                "fine": fine.again / fine.work,
            }
        )
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Recompute over memory, a picture for each network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(2, 4)
    axes[1, 3].set_axis_off()
    for name, own in zip(NETWORKS, axes.flat):
        ours = sorted((row for row in rows if row["network"] == name), key=lambda r: r["share"])
        shares = [row["share"] for row in ours]
        own.plot(shares, [row["uniform"] for row in ours], "x", label="uniform segments")
        own.plot(shares, [row["plan"] for row in ours], "o-", label="plan of blocks", markersize=4)
        own.plot(shares, [row["fine"] for row in ours], "s-", label="of operations", markersize=4)
        own.set_title(name, fontsize="medium")
        own.set_ylim(bottom=0)
        own.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("peak, of that without regions")
    figure.supylabel("computed again, in forward passes")
    axes[0, 0].legend(frameon=False)
    figure.savefig(PICTURE, dpi=150)


def run(device: torch.device) -> Result:
    rows = [row for name in NETWORKS for row in rows_of(name)]
    draw(rows)
    columns = [
        Column("network", "network"),
        Column("blocks", "blocks", ".0f"),
        Column("segments", "segments", ".0f"),
        Column("peak", "budget, MiB", ".2f", 2**20),
        Column("share", "of the peak without", ".2f"),
        Column("took", "plan's peak, MiB", ".2f", 2**20),
        Column("again", "plan, MFLOP", ".1f", 1e6),
        Column("uniform", "uniform segments", ".2f"),
        Column("plan", "plan of blocks", ".2f"),
        Column("fine", "plan of operations", ".2f"),
    ]
    notes = []
    for key, title in (("plan", "of blocks"), ("fine", "of operations")):
        # The whole network counts a little more work than its blocks, one by one.
        less = sum(row[key] < 0.99 * row["uniform"] for row in rows)
        more = sum(row[key] > 1.01 * row["uniform"] for row in rows)
        notes.append(f"Plans {title}: less in {less} of {len(rows)} cases, more in {more}.")
    return Result(NAME, CLAIM, columns, rows, notes, environment(device))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
