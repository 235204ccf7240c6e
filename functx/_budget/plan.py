"""Plans: which blocks of a chain to recompute, so that forward and backward fit in a budget.

The blocks of a chain are measured (`block_costs`), and all useful ways to cut the chain into
regions are found (`solver`). The candidates are then measured. If the *measured* peak of several
candidates is within the budget, the one with the least recompute is taken. The model of memory only
orders the candidates. A function is run as a chain of its operations (`op_trace`).

What could be improved: measuring runs the chain once per candidate, so the first call with a budget
takes many times as long as the later ones.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from functx import _torch
from functx._budget.block_costs import Blocks, MeasuredChain, peak_of, walk
from functx._budget.op_trace import Recording, record
from functx._budget.solver import Tree, frontier, numbers_in, work_again
from functx._core import (
    RematError,
    check_callable,
    checked_budget,
    describe,
    has_derivatives,
    name_of,
    storages_of,
)
from functx._core import tree as _tree
from functx._insight import labels, undisturbed
from functx._loops import segments
from functx._remat import Options, is_tracked, listening, on_budget, remat, sharding, unseen

NEAR = 8  # how many trees are measured beyond those that the search finds to fit
REMEMBERED = 256  # how many plans are kept for one function


@dataclass(frozen=True)
class Plan:
    """Which blocks of a chain to recompute. Prints as a table.

    Attributes:
        blocks: the number of blocks.
        tree: the numbers of the blocks; a tuple in it is a region, which may contain regions.
        budget: the budget in bytes.
        peak: the measured peak of the forward and the backward pass under the plan, in bytes.
        peak_without: the measured peak without any regions, in bytes.
        work: the FLOPs of the forward pass.
        again: the FLOPs that the regions repeat in a backward pass.
        names: the names of the blocks.
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
        """The chain of these blocks, with the regions of the plan.

        Args:
            blocks: an ``nn.Sequential``, or as many callables as the plan was made for; or the
                function that the plan was made for.

        Returns:
            A function from the input of the first block to the result of the last.

        Raises:
            ValueError: there are more blocks, or fewer.
        """
        parts = _blocks_of(blocks)
        if parts is None and callable(blocks):
            return remat(blocks, policy=self)
        if parts is None or len(parts) != self.blocks:
            got = describe(blocks) if parts is None else f"{len(parts)}"
            raise ValueError(
                f"Plan.apply: the plan is for {self.blocks} blocks, got {got}. Make a plan for "
                "these blocks with functx.plan."
            )
        return functools.partial(walk, self.tree, parts)  # so that copy.deepcopy copies the blocks

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON."""
        Path(path).write_text(json.dumps(asdict(self)) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan that `save` wrote.

        Raises:
            ValueError: the file does not contain a plan.
        """
        try:
            fields = json.loads(Path(path).read_text())
            fields["tree"], fields["names"] = _tuples(fields["tree"]), tuple(fields["names"])
            plan = Plan(**fields)
            if sorted(numbers_in(plan.tree)) != list(range(plan.blocks)):
                raise KeyError("the tree and the number of blocks do not agree")
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"functx.Plan.load: {path} is not a plan ({error})") from error
        return plan

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


def plan(f: Any, /, *args: Any, budget: int | float | str, **kwargs: Any) -> Plan:
    """Choose what to recompute, so that ``f`` and its pullback fit in ``budget``.

    The blocks are measured. A dynamic program over all nestings of regions finds the cuts that
    recompute least, and candidates are measured as a whole, by one forward and one backward pass.
    Derivatives are taken with respect to the tensors that require grad, among the arguments and
    among captured tensors; if no argument requires grad, with respect to all floating point
    arguments. The gradients are part of the peak. Other uses may need more memory: several
    cotangents at once, higher derivatives, or a pullback that is called again.

    Args:
        f: a chain of blocks, each called with the result of the one before: an ``nn.Sequential``,
            an ``nn.ModuleList`` or a list of callables. Or any function or module, whose operations
            are then the blocks; if there are more than 32, a block has several operations.
        *args: the arguments of ``f``. A chain takes one argument, any pytree.
        budget: the most bytes that the forward and the backward pass may allocate at once, as an
            int or a string such as ``"2GiB"``. A float up to 1 is a share of the peak without
            regions.
        **kwargs: keyword arguments of ``f``, if it is a function.

    Returns:
        A `Plan`: ``plan.apply(f)(x)`` is ``f(x)`` with the regions of the plan, and so is
        ``functx.remat(f, policy=plan)`` for a function.

    Raises:
        TypeError: a block is not callable, or ``budget`` is neither a number nor a string.
        ValueError: no plan fits; the message gives the least possible number of bytes.
        functx.RematError: the operations of a function depend on values, or can't be recorded.

    Example:
        >>> import torch, functx
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())] * 12
        >>> x = torch.ones(500, 64)
        >>> plan = functx.plan(layers, x, budget=0.6)
        >>> plan.peak <= plan.budget <= 0.6 * plan.peak_without
        True
        >>> torch.equal(plan.apply(layers)(x), torch.nn.Sequential(*layers)(x))
        True
    """
    budget = checked_budget(budget, "functx.plan")
    blocks = _blocks_of(f)
    if blocks is None:
        check_callable(f, "functx.plan")
        name = name_of(f)
        return _planned(record(f, args, kwargs, name), budget, name)
    for block in blocks:
        check_callable(block, "functx.plan")
    if not blocks:
        raise ValueError("functx.plan: the list of blocks is empty")
    if len(args) != 1 or kwargs:
        raise TypeError(
            f"functx.plan: a chain of blocks takes one argument, got {len(args) + len(kwargs)}; "
            "pass several tensors as one tuple"
        )
    buffers = [t for b in blocks for t, (kind, _) in labels(b, (), {}) if kind == "buffer"]
    with undisturbed(buffers), sharding.watching("functx.plan", RematError):
        return _chosen(blocks, args[0], budget, "functx.plan")


@on_budget
def run_planned(f: Callable[..., Any], args: Any, kwargs: Any, o: Options) -> Any:
    """``f(*args, **kwargs)`` with the regions of its plan, which the first call makes."""
    recording = record(f, args, kwargs, o.name)
    blocks, values, plan = recording.blocks(), recording.values, o.budget
    if not isinstance(plan, Plan):
        # Inside another region, a replay must use the same plan as the forward, at any level. So
        # the key then leaves out the tensors, which may be wrapped in a different way.
        outermost = [*values.values()] if listening() is None else []
        if outermost and not any(map(is_tracked, outermost)):  # nothing is pulled back
            return recording.finish(walk(range(len(blocks)), blocks, values))
        sizes = [sum(storage.nbytes() for storage in storages_of(t)) for t in outermost]
        key = recording.signature(), *map(is_tracked, outermost), *sizes
        assert o.plans is not None  # options with a budget have a cache of plans
        if key not in o.plans:
            if len(o.plans) >= REMEMBERED:
                o.plans.clear()
            o.plans[key] = _planned(recording, o.budget, o.name)
        plan = o.plans[key]
    if plan.names != _names_of(blocks):
        raise RematError(
            f"remat: the plan was not made for {o.name!r}, but for another function, for other "
            f"shapes, or for a list of {plan.blocks} blocks. Make a new plan for this function, or "
            "call plan.apply(blocks)."
        )
    return recording.finish(walk(plan.tree, blocks, values, o))


def _planned(recording: Recording, budget: Any, name: str) -> Plan:
    """The plan for a recorded function, measured inside the surrounding transforms."""
    # The function writes to these tensors. Measuring runs it several times, so it gets copies.
    written = [recording.values[n] for n in recording.written if n in recording.values]
    others = [o[0] for operation in recording.operations for o in operation.how[1] if o]
    generators = {g: g.get_state() for g in others if isinstance(g, torch.Generator)}
    with unseen(), _torch.without_dispatch_modes(), undisturbed([]):
        try:
            api = f"a budget for {name!r}"
            return _chosen(recording.blocks(), recording.values, budget, api, written)
        finally:
            for generator, state in generators.items():
                generator.set_state(state)
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()


def _chosen(
    blocks: Blocks, x: Any, budget: int | float, api: str, written: Sequence[torch.Tensor] = ()
) -> Plan:
    """The plan for a chain of blocks, measured inside the surrounding transforms.

    Args:
        blocks: the chain.
        x: its argument. Derivatives are taken with respect to the tensors that require grad; if
            there is none, with respect to all tensors that have derivatives.
        budget: bytes, or a share.
        api: the name to use in errors.
        written: tensors that are written in place. Measuring uses copies of them.

    Raises:
        ValueError: no plan fits.
    """
    tensors, how = _tree.partition(x)
    tracked = [*map(is_tracked, tensors)]
    required = tracked if True in tracked else [*map(has_derivatives, tensors)]
    shared = {id(t) for t, r in zip(tensors, required) if r} - {*map(id, written)}
    # Detach all tensors from their tapes. Copy those that are not differentiated, since the blocks
    # may write to them.
    with torch.no_grad():
        own = [t.detach() if id(t) in shared else t.detach().clone() for t in tensors]
    x = _tree.combine(own, how)

    @functools.cache
    def peak(tree: Tree) -> int:
        return peak_of(lambda x: walk(tree, blocks, x), x, required)

    tree, again = tuple(range(len(blocks))), 0
    with torch.enable_grad():
        chain = MeasuredChain(blocks, x, required)
        costs, taken = chain.costs(), chain.peak
        work = [cost.work for cost in costs]
        allowed = int(budget * chain.peak) if isinstance(budget, float) else budget
        if chain.peak > allowed:
            trees = [point.tree for point in frontier(costs, [*chain.states[:-1], ()])]
            # The trees are ordered by memory. Search for the last one that is measured to fit, add
            # some beyond it, because the model is not exact, and take the one with the least work.
            near = trees[: bisect.bisect_right(trees, allowed, key=peak) + NEAR]
            near += _segmentations(len(blocks))
            candidates = sorted(near, key=lambda tree: work_again(tree, work))
            found = next((tree for tree in candidates if peak(tree) <= allowed), None)
            if found is None:
                raise ValueError(
                    f"{api}: no plan fits in {allowed:,} bytes; the least possible is "
                    f"{min(map(peak, candidates)):,} bytes, and without regions it is "
                    f"{chain.peak:,}"
                )
            tree, taken, again = found, peak(found), work_again(found, work)
    names = _names_of(blocks)
    return Plan(len(blocks), tree, allowed, taken, chain.peak, sum(work), again, names)


def _segmentations(n: int) -> list[tuple[Any, ...]]:
    """Trees of equal segments, so that no plan is worse than the best of them."""
    cuts = [segments(n, k) for k in range(2, n + 1)]
    return [(*(tuple(range(*c)) for c in cut[:-1]), *range(*cut[-1])) for cut in cuts]


def _names_of(blocks: Blocks) -> tuple[str, ...]:
    """The names of blocks in a plan."""
    return tuple(getattr(b, "__qualname__", None) or type(b).__name__ for b in blocks)


def _blocks_of(f: Any) -> list[Callable[[Any], Any]] | None:
    """The blocks of ``f`` if it is a chain, else ``None``."""
    if isinstance(f, nn.Sequential):
        return list(f.children())
    return list(f) if isinstance(f, (list, tuple, nn.ModuleList)) else None


def _tuples(tree: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_tuples(part) if isinstance(part, list) else part for part in tree)
