"""Plans: what to recompute so that a pullback fits in a budget, chosen by measuring and solving.

The blocks of a chain are measured (`_costs`), all useful ways to cut it into regions are found
(`_chain`), and the one with the least recompute is taken whose *measured* peak is within the
budget: the model of memory only orders the candidates.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from functx import _schedules, _tree
from functx._chain import Tree, frontier, numbers_in, work_again
from functx._costs import Blocks, fresh, measured, peak_of, walk, work
from functx._remat import is_tracked, remat
from functx._validate import describe


@dataclass(frozen=True)
class Plan:
    """Which blocks of a chain to recompute. Prints as a table; a JSON value; call it to run it.

    Attributes:
        blocks: how many there are.
        tree: blocks by number; a tuple in it is a region, which may hold regions.
        budget: that was asked for, in bytes.
        peak: measured of the forward and the backward pass under the plan, in bytes.
        peak_without: likewise without any regions.
        work: of the forward pass, in FLOPs.
        again: work that the regions do again in a backward pass.
        names: of the blocks.
    """

    blocks: int
    tree: tuple[Any, ...]
    budget: int
    peak: int
    peak_without: int
    work: int
    again: int
    names: tuple[str, ...] = ()

    is_functx_plan = True

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The blocks that are in some region, by number."""
        return tuple(numbers_in(part for part in self.tree if isinstance(part, tuple)))

    def apply(self, blocks: Any) -> Callable[[Any], Any]:
        """The chain of these blocks, cut as planned.

        Args:
            blocks: an ``nn.Sequential``, or as many callables as the plan was made for; or the
                function that it was made for.

        Returns:
            A function from the input of the first block to the result of the last.

        Raises:
            ValueError: there are more blocks, or fewer.
        """
        parts = blocks_of(blocks)
        if parts is None and callable(blocks):
            return remat(blocks, policy=self)
        if parts is None or len(parts) != self.blocks:
            got = describe(blocks) if parts is None else f"{len(parts)}"
            raise ValueError(f"this plan is one for {self.blocks} blocks, got {got}")
        return lambda x: walk(self.tree, parts, x)

    def to_json(self) -> str:
        """The plan as a JSON text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: it is no such text.
        """
        try:
            fields = json.loads(text)
            fields["tree"], fields["names"] = _tuples(fields["tree"]), tuple(fields["names"])
            plan = Plan(**fields)
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"functx.Plan.from_json: this is no plan ({error})") from error
        if sorted(numbers_in(plan.tree)) != list(range(plan.blocks)):
            raise ValueError("functx.Plan.from_json: this is no plan: its tree has other blocks")
        return plan

    def save(self, path: str | Path) -> None:
        """Write it to a file, as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan that `save` wrote."""
        return Plan.from_json(Path(path).read_text())

    def __str__(self) -> str:
        lines = [
            f"budget {self.budget:>15,} bytes",
            f"peak   {self.peak:>15,} bytes, {self.peak_without:,} without regions",
            f"again  {self.again:>15,} FLOPs, {self.again / max(self.work, 1):.2f} forward passes",
        ]
        return "\n".join([*lines, *self._drawn(self.tree, "")])

    def _drawn(self, tree: tuple[Any, ...], indent: str) -> list[str]:
        lines = []
        for part in tree:
            if isinstance(part, tuple):
                lines += [f"{indent}region", *self._drawn(part, indent + "    ")]
            else:
                lines.append(f"{indent}{part} {self.names[part] if self.names else ''}".rstrip())
        return lines


NEAR = 8  # so many cheaper trees are measured beyond the last that the model says to fit


def chosen(blocks: Blocks, x: Any, budget: int | float, api: str) -> Plan:
    """The plan for some blocks called on a pytree, measured where this is called.

    Derivatives are those of the tensors in ``x`` that require grad; if none does, of all that can.

    Raises:
        ValueError: no plan fits in the bytes, or the share, of ``budget``.
    """
    tensors, how = _tree.parted(x)
    tracked = [*map(is_tracked, tensors)]
    can = [t.is_floating_point() or t.is_complex() for t in tensors]
    required = tracked if True in tracked else can
    own = fresh(tensors, required)
    peaks: dict[Tree, int] = {}

    def peak(tree: Tree) -> int:
        def body(*leaves: Tensor) -> Any:
            return walk(tree, blocks, _tree.joined(leaves, how))

        if tree not in peaks:
            peaks[tree] = peak_of(body, own, required)
        return peaks[tree]

    tree, again = tuple(range(len(blocks))), 0
    with torch.enable_grad():
        most = peak(tree)
        allowed = int(budget * most) if isinstance(budget, float) else budget
        x = _tree.joined(own, how)
        flops = work(lambda: walk(range(len(blocks)), blocks, x))
        if most > allowed:
            costs, leaving = measured(blocks, x, required)
            trees = [point.tree for point in frontier(costs, leaving)]
            # The model of memory only orders the trees; what counts is what they are measured to
            # take: of those that are allowed, the one with the least work done again.
            last = max(bisect.bisect_right(trees, allowed, key=peak) - 1, 0)
            candidates = [*reversed(trees[last : last + NEAR]), *_segmentations(len(blocks))]
            found = next((tree for tree in candidates if peak(tree) <= allowed), None)
            if found is None:
                raise ValueError(
                    f"{api}: no plan fits in {allowed:,} bytes; the least possible is "
                    f"{min(peaks.values()):,} bytes"
                )
            tree, again = found, work_again(found, [cost.work for cost in costs])
    return Plan(len(blocks), tree, allowed, peaks[tree], most, flops, again, names_of(blocks))


def _segmentations(n: int) -> list[tuple[Any, ...]]:
    """Trees of equal segments, for where the model is wrong."""
    cuts = [_schedules.segments(n, k) for k in range(2, n + 1)]
    return [(*(tuple(range(*c)) for c in cut[:-1]), *range(*cut[-1])) for cut in cuts]


def names_of(blocks: Blocks) -> tuple[str, ...]:
    """What a plan calls some blocks."""
    return tuple(getattr(b, "__qualname__", None) or type(b).__name__ for b in blocks)


def blocks_of(f: Any) -> list[Callable[[Any], Any]] | None:
    """The blocks of a chain, if that is what ``f`` is."""
    if isinstance(f, nn.Sequential):
        return list(f.children())
    return list(f) if isinstance(f, (list, tuple, nn.ModuleList)) else None


def _tuples(tree: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_tuples(part) if isinstance(part, list) else part for part in tree)
