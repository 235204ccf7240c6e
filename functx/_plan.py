"""Plans: what to recompute so that a pullback fits in a budget, chosen by measuring and solving.

The blocks of a chain are measured (`_costs`), all useful ways to cut it into regions are found
(`_chain`), and the one with the least recompute is taken whose *measured* peak is within the
budget: the model of memory only orders the candidates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from functx import _schedules
from functx._chain import Tree, tree_of, work_again
from functx._costs import filled, fresh, measured, peak_of, tensors_of, walk, work
from functx._remat import remat
from functx._residuals import undisturbed
from functx._tensor_names import labels
from functx._validate import check_callable, checked_budget, describe


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
        return tuple(i for part in self.tree if isinstance(part, tuple) for i in _flat(part))

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
        parts = _as_blocks(blocks)
        if parts is None and callable(blocks):
            return remat(blocks, policy=self)
        if parts is None or len(parts) != self.blocks:
            got = describe(blocks) if parts is None else f"{len(parts)}"
            raise ValueError(f"this plan is one for {self.blocks} blocks, got {got}")
        return lambda x: walk(self.nested, parts, x)

    @property
    def nested(self) -> Tree:
        """The tree as nested lists."""
        return _lists(self.tree)

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
        if sorted(_flat(plan.tree)) != list(range(plan.blocks)):
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


def plan(f: Any, /, *args: Any, budget: int | float | str, **kwargs: Any) -> Plan:
    """Choose what to recompute, so that ``f`` and its pullback fit in ``budget``.

    Blocks are measured; the cuts that recompute least are found by a dynamic programme over
    all nestings of regions, and measured again as a whole, by one forward and one backward pass.
    Derivatives are those of the tensors that require grad, in the arguments and reached otherwise;
    if no argument does, of all floating point arguments. Their bytes are part of the peak. Other
    uses may take more: several cotangents at once, derivatives of derivatives, a pullback that is
    kept to be called again.

    Args:
        f: blocks that are called one after another, each with the result of the one before: an
            ``nn.Sequential``, an ``nn.ModuleList``, a list of callables. Or any function or
            module: its operations are the blocks, up to 32 of them, more are taken together.
        *args: what ``f`` is called with; a chain, with one argument, any pytree.
        budget: the most bytes that the forward and the backward pass may have live beside what
            was there before, as an int or a text such as ``"2GiB"``; a float up to 1 is a share of
            what they have without regions.
        **kwargs: likewise, for a function.

    Returns:
        A `Plan`: ``plan.apply(f)(x)`` is ``f(x)`` with the regions of the plan, and so is
        ``functx.remat(f, policy=plan)`` for a function.

    Raises:
        TypeError: blocks are no callables; ``budget`` is neither a number nor a text.
        ValueError: no plan fits; the message says what the least possible is.
        functx.RematError: what a function runs depends on values, or can't be recorded.

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
    blocks = _as_blocks(f)
    if blocks is None:
        check_callable(f, "functx.plan")
        return _FUNCTIONS[0](f, args, kwargs, budget)
    for block in blocks:
        check_callable(block, "functx.plan")
    if not blocks:
        raise ValueError("functx.plan: there are no blocks")
    if len(args) != 1 or kwargs:
        raise TypeError(f"functx.plan: blocks are called with one argument, got {len(args)}")
    some = any(t.requires_grad for t in tensors_of(args[0]))

    def wanted(t: Tensor) -> bool:
        return t.requires_grad if some else t.is_floating_point() or t.is_complex()

    buffers = [t for b in blocks for t, (kind, _) in labels(b, (), {}) if kind == "buffer"]
    with undisturbed(buffers):
        return chosen(blocks, args[0], budget, tuple(map(_name, blocks)), "functx.plan", wanted)


_FUNCTIONS: list[Callable[..., Plan]] = []


def function_planner(planner: Any) -> Any:
    """Register what plans for functions that are no chains."""
    _FUNCTIONS.append(planner)
    return planner


def chosen(
    blocks: Any,
    x: Any,
    budget: int | float,
    names: tuple[str, ...],
    api: str,
    wanted: Callable[[Tensor], bool],
) -> Plan:
    """The plan for some blocks called on ``x``.

    Args:
        blocks: the chain.
        x: what goes into it, a pytree.
        budget: bytes, or a share.
        names: of the blocks.
        api: who asks, for messages.
        wanted: which of the tensors in ``x`` are differentiated.
    """
    tensors = tensors_of(x)
    required = [*map(wanted, tensors)]
    own = fresh(tensors, required)

    def peak(tree: Tree) -> int:
        def body(*leaves: Tensor) -> Any:
            return walk(tree, blocks, filled(x, tensors, leaves))

        return peak_of(body, own, required)

    everything: Tree = list(range(len(blocks)))
    with torch.enable_grad():
        most = peak(everything)
        allowed = int(budget * most) if isinstance(budget, float) else budget
        flops = work(lambda: walk(everything, blocks, filled(x, tensors, own)))
        if most <= allowed:
            best = everything, most, 0
        else:
            by_id = dict(zip(map(id, own), required))
            best = _fitting(blocks, filled(x, tensors, own), allowed, api, peak, by_id)
    tree, peak_found, again = best
    return Plan(len(blocks), _tuples(tree), allowed, peak_found, most, flops, again, names)


NEAR = 8  # so many cheaper trees are measured beyond the last that the model says to fit


def _fitting(
    blocks: Any,
    x: Any,
    allowed: int,
    api: str,
    peak: Callable[[Tree], int],
    required: dict[int, bool],
) -> tuple[Tree, int, int]:
    """The tree with the least work done again of those whose measured peak is allowed.

    The model of memory only orders the trees; what counts is what they are measured to take.
    """
    chain = measured(blocks, x, lambda t: required[id(t)])
    trees = [tree_of(point.tree) for point in chain.frontier()]
    peaks: dict[int, int] = {}

    def fits(i: int) -> bool:
        if i not in peaks:
            peaks[i] = peak(trees[i])
        return peaks[i] <= allowed

    low, high = -1, len(trees)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    for i in reversed(range(max(low, 0), min(low + NEAR, len(trees)))):
        if fits(i):
            return trees[i], peaks[i], work_again(trees[i], chain.work)
    n = len(blocks)
    for k in range(2, n + 1):  # equal segments, if the model is wrong
        cuts = _schedules.segments(n, k)
        trees.append([*([*range(*cut)] for cut in cuts[:-1]), *range(*cuts[-1])])
        if fits(len(trees) - 1):
            return trees[-1], peaks[len(trees) - 1], work_again(trees[-1], chain.work)
    raise ValueError(
        f"{api}: no plan fits in {allowed:,} bytes; the least possible is "
        f"{min(peaks.values()):,} bytes"
    )


def _name(block: Any) -> str:
    return getattr(block, "__qualname__", None) or type(block).__name__


def _flat(tree: Any) -> list[int]:
    return [i for part in tree for i in (_flat(part) if isinstance(part, tuple) else [part])]


def _tuples(tree: Any) -> tuple[Any, ...]:
    return tuple(_tuples(p) if isinstance(p, (list, tuple)) else p for p in tree)


def _lists(tree: Any) -> Tree:
    return [_lists(p) if isinstance(p, tuple) else p for p in tree]


def _as_blocks(f: Any) -> list[Callable[[Any], Any]] | None:
    """The blocks of a chain, if that is what ``f`` is."""
    if isinstance(f, nn.Sequential):
        return list(f.children())
    return list(f) if isinstance(f, (list, tuple, nn.ModuleList)) else None
